"""Narrowing of a float32 parameter before its optimizer is made; the lost bits are kept for that optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from ...subclass.models._parameter_holders import replace_parameter_data
from .._storage import STORE_BY_DTYPE
from ..weight_updates._split import Split16
from ._local_tensors import get_local

_LOW_BITS_ATTRIBUTE, _FLOAT32_ATTRIBUTE = "_halfulp_low_bits", "_halfulp_float32"
_SPLIT_UPDATE = Split16()


def refuse_values_beyond(parameter: Tensor, dtype: torch.dtype, name: str, advice: str) -> None:
    """Raise for finite values of a parameter that a narrower dtype would make infinite."""
    value = get_local(parameter.detach())
    if value.is_meta or value.dtype.itemsize < 2:  # of 8 bits none is beyond, and torch has no isfinite of them
        return
    if bool((value.to(dtype).isinf() & value.isfinite()).any()):
        largest = f"{str(dtype).removeprefix('torch.')}'s largest, {torch.finfo(dtype).max:g}"
        raise ValueError(f"parameter {name!r} has values beyond {largest}: {advice}")


def narrow_parameter(parameter: Tensor, dtype: torch.dtype) -> None:
    """Make a float32 parameter bfloat16 or float16 in place, rounded to nearest (in bfloat16 ties away from zero).

    It stays the same object, and its gradient is narrowed too. What rounding dropped is held beside it until an
    optimizer takes it: `pop_kept_float32_values`.
    """
    value = parameter.detach()
    if dtype == torch.bfloat16:
        payload = torch.empty_like(value, dtype=dtype)
        low = torch.empty_like(value, dtype=torch.int16)
        _SPLIT_UPDATE.fill(STORE_BY_DTYPE[dtype], [payload, low], value)
    else:
        payload, low = value.to(dtype), value.clone()
    replace_parameter_data(parameter, payload)
    if not parameter.is_meta:  # the low 16 bits beside bfloat16, the float32 values beside float16
        setattr(parameter, _LOW_BITS_ATTRIBUTE, (low, parameter.data_ptr(), parameter._version))


def pop_kept_float32_values(parameter: Tensor) -> Tensor | None:
    """Return, once, the float32 values before `narrow_parameter`; None if taken already, or written over since."""
    held = getattr(parameter, "__dict__", {}).pop(_LOW_BITS_ATTRIBUTE, None)
    if held is None or held[1:] != (parameter.data_ptr(), parameter._version):
        return None
    low: Tensor = held[0]
    if parameter.dtype == torch.bfloat16 and low.dtype == torch.int16:
        return _SPLIT_UPDATE.read(STORE_BY_DTYPE[torch.bfloat16], [parameter.detach(), low])
    return low if parameter.dtype == torch.float16 else None


def widen_parameter(parameter: Tensor) -> None:
    """Make a narrow parameter float32 in place, with the bits that are still kept for it."""
    value = pop_kept_float32_values(parameter)
    replace_parameter_data(parameter, parameter.detach().float() if value is None else value.view_as(parameter))


def mark_to_stay_float32(parameter: Tensor, kept: bool = True) -> None:
    """Mark a parameter that no ``param_dtype=`` narrows, or take the mark away."""
    if kept:
        setattr(parameter, _FLOAT32_ATTRIBUTE, True)
    else:
        parameter.__dict__.pop(_FLOAT32_ATTRIBUTE, None)


def is_marked_to_stay_float32(parameter: Tensor) -> bool:
    """Return whether the parameter is marked to stay float32."""
    return getattr(parameter, _FLOAT32_ATTRIBUTE, False)
