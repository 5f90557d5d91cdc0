"""A user's own training script under several recipes: run once for each, its model converted on the way."""

from ._compare_script import ScriptError as ScriptError
from ._compare_script import compare_script as compare_script
from ._comparison import ScriptComparison as ScriptComparison
from ._comparison import ScriptRow as ScriptRow
