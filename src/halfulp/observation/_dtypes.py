"""Dtypes as formats: their names and digits."""

from __future__ import annotations

import torch

from .. import formats
from .._torch_versions import find_dtype

# Bits of float32's significand, the implicit one included, from which a lost change is no practical loss: what rounds
# away there is below 2^-24 of its number, and ten thousand such steps change it by a thousandth. A bias before a batch
# normalization, whose gradient is rounding noise around 0, loses such updates in health.
WIDE = 24


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the short name of a dtype: that of its format where it has one.

    >>> dtype_name(torch.bfloat16), dtype_name(torch.int8), dtype_name(None)
    ('bf16', 'int8', 'unknown dtype')
    """
    try:
        return formats.get(dtype).name if dtype is not None else "unknown dtype"
    except ValueError:
        return str(dtype).removeprefix("torch.")


def precision(dtype: torch.dtype | None) -> int | None:
    """Return the bits of a dtype's significand with the implicit one, None where it is no floating-point format.

    >>> precision(torch.bfloat16), precision(torch.float32), precision(torch.int8), precision(torch.complex64)
    (8, 24, None, 24)
    """
    try:
        if dtype is None:
            return None
        return formats.get(dtype.to_real() if dtype.is_complex else dtype).precision
    except ValueError:
        return None


def holds_numbers(dtype: torch.dtype) -> bool:
    """Return whether an element of a dtype is one signed floating-point number, as a weight is.

    Scales without sign and zero are none, and neither are packed pairs.

    >>> holds_numbers(torch.float8_e4m3fn), holds_numbers(torch.int8)
    (True, False)
    """
    if not dtype.is_floating_point or dtype == find_dtype("float4_e2m1fn_x2"):
        return False
    try:
        return formats.get(dtype).signed
    except ValueError:
        return False


def is_narrow(dtype: torch.dtype | None) -> bool:
    """Return whether it is a floating-point dtype with fewer digits than float32."""
    bits = precision(dtype)
    return bits is not None and bits < WIDE


def is_wide(dtype: torch.dtype) -> bool:
    """Return whether it is a floating-point dtype with float32's digits or more."""
    bits = precision(dtype)
    return bits is not None and bits >= WIDE


def cannot_decay(rate: float, dtype: torch.dtype | None) -> bool:
    """Return whether a state of a dtype, rounded to nearest, loses every decay by a share of itself.

    That is where rate * v is under half the spacing below every number v of p bits, 2^-(p + 1) v at least.

    >>> cannot_decay(1 - 0.999, torch.bfloat16), cannot_decay(1 - 0.99, torch.bfloat16)
    (True, False)
    """
    bits = precision(dtype)
    return bits is not None and 0 < rate < 2.0 ** -(bits + 1)
