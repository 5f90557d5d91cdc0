"""The target of a rounding: format, mode and overflow policy as integers that a torch operator takes."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from ..formats import Format
from ._modes import Rounding, code_of

NEAREST, TOWARD_ZERO, UP, DOWN, STOCHASTIC = range(5)  # as `code_of` numbers them; behind them the registered ones
POLICIES = ("inf", "nan", "saturate")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SUBNORMALS, _ZERO, _SIGNED, _SIGNED_ZERO = 1, 2, 4, 8


class Target(NamedTuple):
    """A format, a mode and an overflow policy.

    Attributes:
        mode: NEAREST, TOWARD_ZERO, UP, DOWN, STOCHASTIC, or the number of a registered one.
        mantissa_bits: explicit bits of the significand.
        emin: exponent of the smallest normal number.
        max_word: the bits of the largest number as a float64.
        policy: position in POLICIES.
        flags: whether there are subnormals, a zero, a sign, a negative zero.
    """

    mode: int
    mantissa_bits: int
    emin: int
    max_word: int
    policy: int
    flags: int

    @property
    def max(self) -> float:
        """Largest number."""
        return struct.unpack("<d", struct.pack("<q", self.max_word))[0]

    @property
    def subnormals(self) -> bool:
        """Whether numbers below 2^emin exist beside zero."""
        return bool(self.flags & _SUBNORMALS)

    @property
    def zero(self) -> bool:
        """Whether 0 exists."""
        return bool(self.flags & _ZERO)

    @property
    def signed(self) -> bool:
        """Whether there are negative numbers."""
        return bool(self.flags & _SIGNED)

    @property
    def signed_zero(self) -> bool:
        """Whether -0 exists."""
        return bool(self.flags & _SIGNED_ZERO)

    @property
    def tiny_exponent(self) -> int:
        """Exponent of the smallest positive number."""
        return self.emin - self.mantissa_bits * self.subnormals


def make_target(format: Format, rounding: Rounding, overflow: str | None, dtype: torch.dtype) -> Target | None:
    """The target of rounding tensors of a dtype; None where that changes nothing.

    Raises:
        ValueError: If the policy is not possible, or the dtype cannot hold the results.
    """
    policy = format.overflow if overflow is None else overflow
    if policy not in POLICIES:
        raise ValueError(f"overflow is one of {', '.join(POLICIES)}, or None for the format's own; got {overflow!r}")
    if policy == "inf" and not format.infinities:
        raise ValueError(f"{format.name} has no infinities: overflow='inf' is not possible, take 'saturate' or 'nan'")
    _check_held(format, rounding, policy, dtype)
    if _is_identity(format, policy, dtype):
        return None
    flags = format.subnormals * _SUBNORMALS + format.zero * _ZERO + format.signed * _SIGNED
    return Target(
        code_of(rounding),
        format.mantissa_bits,
        format.emin,
        struct.unpack("<q", struct.pack("<d", format.max))[0],
        POLICIES.index(policy),
        flags + format.signed_zero * _SIGNED_ZERO,
    )


# Of the dtypes that tensors come in: explicit mantissa bits, exponent of the smallest normal number, largest number.
_CONTAINERS = {
    torch.float16: (10, -14, 65504.0),
    torch.bfloat16: (7, -126, float.fromhex("0x1.fep127")),
    torch.float32: (23, -126, float.fromhex("0x1.fffffep127")),
    torch.float64: (52, -1022, float.fromhex("0x1.fffffffffffffp1023")),
}


def _is_identity(format: Format, policy: str, dtype: torch.dtype) -> bool:
    mantissa, emin, largest = _CONTAINERS[dtype]
    return (
        policy == "inf"
        and format.signed_zero
        and format.mantissa_bits >= mantissa
        and format.max >= largest
        and format.smallest_subnormal <= 2.0 ** (emin - mantissa)
    )


def _check_held(format: Format, rounding: Rounding, policy: str, dtype: torch.dtype) -> None:
    """Raise if a number of the dtype may round to one that it cannot hold."""
    if format.emin < -1022 and format.mantissa_bits < 52:
        raise NotImplementedError(
            f"{format.name} has normal numbers below 2^-1022, which are subnormal in float64: take a smaller bias"
        )
    mantissa, emin, largest = _CONTAINERS[dtype]
    finer = format.mantissa_bits >= mantissa
    beyond = format.max > largest and not (finer and policy != "saturate")
    gives_max = policy == "saturate" or rounding.name in ("toward_zero", "up", "down")
    if gives_max and format.max <= largest:
        beyond = format.max % 2.0 ** (format.emax - mantissa) != 0
    below = not format.zero and format.smallest_normal < 2.0 ** (emin - mantissa)
    if beyond or below:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} cannot hold the values of {format.name} (largest {format.max:.6g}) that overflow={policy!r} and "
            f"{rounding.name} rounding give: convert the tensor first, x.to(torch.{_wide_enough(format)})"
        )


def _wide_enough(format: Format) -> str:
    """The narrowest of float32 and float64 that holds all of a format."""
    mantissa, emin, largest = _CONTAINERS[torch.float32]
    fits = format.mantissa_bits <= mantissa and format.max <= largest
    return "float32" if fits and format.smallest_subnormal >= 2.0 ** (emin - mantissa) else "float64"
