"""A user's own training script under several recipes: run once for each, its model converted on the way."""

from ._compare_script import ScriptRow as ScriptRow
from ._compare_script import compare_script as compare_script
