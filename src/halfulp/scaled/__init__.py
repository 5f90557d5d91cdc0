"""Tensors with a scale: ScaledTensor, a narrow payload times a power of two."""

from .. import _needs_torch as _needs_torch
from . import _storage_rules as _storage_rules
from . import rules as rules
from ._float8 import cast as cast
from ._float8 import eight_bit_engine as eight_bit_engine
from ._float8 import linear_fp8 as linear_fp8
from ._payload_statistics import Drift as Drift
from ._payload_statistics import drift as drift
from ._powers_of_two import round_to_power as round_to_power
from ._registry import implements as implements
from ._rescale import propose_rescales as propose_rescales
from ._rescale import rescale as rescale
from ._scaled_tensor import ScaledTensor as ScaledTensor
from .model._ddp_payload_hook import payload_hook as payload_hook
from .model._scalify import scalify as scalify
from .model._scalify import scalify_function as scalify_function
from .model._scalify import unscalify as unscalify
from .model._state_dict import plain_state_dict as plain_state_dict
