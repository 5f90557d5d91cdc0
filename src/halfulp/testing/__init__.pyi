"""Checks for a test suite of one's own: of rules of scaled tensors, and of a model under a recipe."""

from ._precision import PrecisionCheck as PrecisionCheck
from ._precision import PrecisionError as PrecisionError
from ._precision import assert_precision_ok as assert_precision_ok
from ._rules import RuleError as RuleError
from ._rules import check_rule as check_rule
