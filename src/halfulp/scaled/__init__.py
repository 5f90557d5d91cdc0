"""Tensors with a scale: ScaledTensor, a narrow payload times a power of two."""

from .. import _needs_torch as _needs_torch
from . import _operands as _operands
from . import rules as rules
from ._float8 import cast as cast
from ._float8 import eight_bit_engine as eight_bit_engine
from ._float8 import linear_fp8 as linear_fp8
from ._model_state import payload_hook as payload_hook
from ._model_state import plain_state_dict as plain_state_dict
from ._powers_of_two import round_to_power as round_to_power
from ._registry import implements as implements
from ._rescale import rescale as rescale
from ._scaled_tensor import ScaledTensor as ScaledTensor
from ._scalify import scalify as scalify
from ._scalify import scalify_function as scalify_function
from ._scalify import unscalify as unscalify
