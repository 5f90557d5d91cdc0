"""Tensors with a scale: ScaledTensor, a narrow payload times a power of two."""

from . import _rules as _rules
from ._powers import round_to_power as round_to_power
from ._registry import implements as implements
from ._scaled_tensor import ScaledTensor as ScaledTensor
