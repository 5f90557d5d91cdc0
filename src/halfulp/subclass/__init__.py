"""The common base of the tensor subclasses: rule tables, fallbacks, pickling, and conversion of models."""

from ._derivation import find_functional_form as find_functional_form
from ._derivation import is_written_argument as is_written_argument
from ._rule_table import FallbackWarning as FallbackWarning
from ._rule_table import RuleTable as RuleTable
from ._rule_table import note_fallback as note_fallback
from ._rule_table import record_fallbacks as record_fallbacks
from ._rule_table import strict as strict
from .models._conversion import fallbacks as fallbacks
from .models._float32_products import float32_products as float32_products
from .models._parameter_holders import list_live_sharded_modules as list_live_sharded_modules
from .models._parameter_holders import list_shard_groups as list_shard_groups
