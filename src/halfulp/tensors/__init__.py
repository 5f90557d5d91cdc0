"""Tensors with a companion: MCTensor, a sum of components."""

from .. import _needs_torch as _needs_torch
from . import _rules as _rules
from ._collective_operators import collective_rule as collective_rule
from ._collective_operators import group_size as group_size
from ._collective_operators import is_collective as is_collective
from ._fallback import FallbackWarning as FallbackWarning
from ._fallback import note_fallback as note_fallback
from ._fallback import recorded as recorded
from ._fallback import strict as strict
from ._graph_cache import graph_key as graph_key
from ._in_place import functional_form as functional_form
from ._in_place import is_written as is_written
from ._mctensor import MCTensor as MCTensor
from ._model import multicomponent as multicomponent
from ._model import single_component as single_component
from ._model_fallbacks import fallbacks as fallbacks
from ._registry import implements as implements
from ._rule_table import RuleTable as RuleTable
from ._saving import register_collate as register_collate
from ._state_dict import plain_state_dict as plain_state_dict
from ._wrappers import shard_groups as shard_groups
from ._wrappers import sharded_modules as sharded_modules
