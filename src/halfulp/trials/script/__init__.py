"""A user's own training script under several recipes: run once for each, its model converted on the way."""

from ._comparison import ScriptComparison as ScriptComparison
from ._comparison import ScriptError as ScriptError
from ._comparison import ScriptRow as ScriptRow
from ._comparison import compare_script as compare_script
