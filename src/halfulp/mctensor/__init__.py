"""MCTensor: tensors whose value is a sum of several narrow components."""

from .. import _needs_torch as _needs_torch
from . import rules as rules
from ._convert_model import multicomponent as multicomponent
from ._convert_model import plain_state_dict as plain_state_dict
from ._convert_model import single_component as single_component
from ._mctensor import MCTensor as MCTensor
from ._mctensor import implements as implements
