"""The target of a rounding, which a torch operator takes as text, and the constants of its kernels."""

from __future__ import annotations

import struct
from fractions import Fraction
from functools import lru_cache
from math import frexp
from typing import NamedTuple

import numpy as np
import torch

from ..formats import Format, get
from ..formats._reference import resolve_overflow_policy
from ._modes import Rounding

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Target(NamedTuple):
    """A format's numbers, the name of a mode, and what overflows become; the other fields are those of `Format`."""

    mode: str
    mantissa_bits: int
    emin: int
    max: float
    policy: str
    subnormals: bool
    zero: bool
    signed: bool
    signed_zero: bool

    @property
    def tiny_exponent(self) -> int:
        """Exponent of the smallest positive number."""
        return self.emin - self.mantissa_bits * self.subnormals


def make_target(format: Format, rounding: Rounding, overflow: str | None, dtype: torch.dtype) -> Target | None:
    """Return the target of rounding tensors of a dtype; None where that changes nothing.

    Raises:
        ValueError: If the policy is not possible, or the dtype cannot hold the results.
    """
    policy, held = resolve_overflow_policy(format, overflow), get(dtype)
    _check_range(format, rounding, policy, dtype)
    holds_all = format.mantissa_bits >= held.mantissa_bits and format.max >= held.max
    if holds_all and format.smallest_subnormal <= held.smallest_subnormal and policy == "inf" and format.signed_zero:
        return None
    signs = format.subnormals, format.zero, format.signed, format.signed_zero
    return Target(rounding.name, format.mantissa_bits, format.emin, format.max, policy, *signs)


def _check_range(format: Format, rounding: Rounding, policy: str, dtype: torch.dtype) -> None:
    """Raise if a number of the dtype may round to one that it cannot hold."""
    if format.emin < -1022 and format.mantissa_bits < 52:
        raise NotImplementedError(
            f"{format.name} has normal numbers below 2^-1022, which are subnormal in float64: take a smaller bias"
        )
    held = get(dtype)
    top_spacing = 2.0 ** (held.emax - held.mantissa_bits)
    finer = format.mantissa_bits >= held.mantissa_bits and format.smallest_subnormal <= top_spacing
    beyond = format.max > held.max and not (finer and policy != "saturate")
    gives_max = policy == "saturate" or rounding.name in ("toward_zero", "up", "down")
    if gives_max and format.max <= held.max:
        beyond = format.max % max(2.0 ** (format.emax - held.mantissa_bits), held.smallest_subnormal) != 0
    below = not format.zero and format.smallest_normal < held.smallest_subnormal
    if beyond or below:
        name = str(dtype).removeprefix("torch.")
        wide = get(torch.float32)
        fits = format.mantissa_bits <= wide.mantissa_bits and format.max <= wide.max
        enough = "float32" if fits and format.smallest_subnormal >= wide.smallest_subnormal else "float64"
        raise ValueError(
            f"{name} cannot hold the values of {format.name} (largest {format.max:.6g}) that overflow={policy!r} and "
            f"{rounding.name} rounding give: convert the tensor first, x.to(torch.{enough})"
        )


class WordLayout(NamedTuple):
    """The words of a container: their width, explicit mantissa bits and exponent bias."""

    width: int
    mantissa: int
    bias: int

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest subnormal."""
        return 1 - self.bias - self.mantissa

    def make_power_of_two_word(self, exponent: int) -> int:
        """Return the word of 2^exponent."""
        if exponent > -self.bias:
            return (exponent + self.bias) << self.mantissa
        return 1 << (exponent - self.smallest_exponent) if exponent >= self.smallest_exponent else 0

    def get_float_bits(self, value: float) -> int:
        """Return the bits of a number as the container's own float, float32 or float64."""
        real, integer = ("<f", "<I") if self.width == 32 else ("<d", "<Q")
        return struct.unpack(integer, struct.pack(real, value))[0]


WORD32_LAYOUT, WORD64_LAYOUT = WordLayout(32, 23, 127), WordLayout(64, 52, 1023)


def get_word_layout(dtype: torch.dtype) -> WordLayout:
    """Return the words in which kernels of a dtype compute."""
    return WORD64_LAYOUT if dtype == torch.float64 else WORD32_LAYOUT


# A fraction is compared with this many random bits where it has more: 31, and what a 30-bit product leaves for formats
# of few bits, whose fast path is a fixed-point number.
_FIXED_POINT_BITS = 29


class TargetConstants(NamedTuple):
    """The constants of one target for words of one layout."""

    # "fixed" where every word loses the same bits, "adder" where a float addition rounds, "scaled" where a fixed-point
    # number takes the random bits, else "packed".
    rounding_path: str
    keeps_signs: bool  # whether every result keeps the sign of its input
    saturates: bool  # whether what overflows becomes the largest number
    words: dict[str, int]  # by the names that device functions know them by; the same names for every target
    array: np.ndarray  # the words, uint32 or uint64


@lru_cache(maxsize=1024)
def choose_word_layout(target: Target) -> WordLayout:
    """Return the words in which a float32, bfloat16 or float16 tensor is rounded; float64 is always rounded in its own.

    Numbers of the format that are subnormal in float32, or whose draws would need a factor beyond its range, take
    the way through float64, which is exact.
    """
    if _has_fixed_shift(target, WORD32_LAYOUT):
        return WORD32_LAYOUT
    deep = target.mode not in ("nearest", "toward_zero", "up", "down") and target.tiny_exponent < -95
    return WORD64_LAYOUT if deep or target.emin < -126 else WORD32_LAYOUT


@lru_cache(maxsize=1024)
def make_target_constants(target: Target, layout: WordLayout) -> TargetConstants:
    """Return the path and the words of a target."""
    sign, infinity = 1 << (layout.width - 1), layout.make_power_of_two_word(layout.bias + 1)
    nan, ones = infinity | 1 << (layout.mantissa - 1), 2 * sign - 1
    real = np.float32 if layout.width == 32 else np.float64
    largest = infinity - 1
    if target.max <= float(np.finfo(real).max):  # toward zero: what the word rounds up to overflows
        largest = layout.get_float_bits(target.max) - (float(real(target.max)) > target.max)
    lost = max(0, layout.mantissa - target.mantissa_bits)
    base = max(0, layout.mantissa - target.mantissa_bits + target.emin + layout.bias)
    highest, tiny = max(0, base - lost), target.tiny_exponent
    exponent = max(0, 31 - tiny)
    halves = (exponent // 2, exponent - exponent // 2) if layout.width == 64 else (min(exponent, 127), 0)
    words = {
        "magnitude": sign - 1,
        "sign": sign,
        "infinity": infinity,
        "nan": nan,
        "ones": ones,
        "significand": (1 << layout.mantissa) - 1,
        "implicit": 1 << layout.mantissa,
        "field": layout.mantissa,
        "last_bit": layout.width - 1,
        "finite": infinity - 1,
        "drawn": ones & -1 << 32 - count_random_bits(target) & 0xFFFFFFFF,
        "largest": largest,
        "overflow": {"inf": infinity, "nan": nan, "saturate": largest}[target.policy],
        "zero_sign": sign * target.signed_zero,
        "value_sign": sign * target.signed,
        "negative": ones if target.signed else sign,
        # how many bits a word loses by its exponent, and the words around the smallest number
        "shift": lost,
        "base": base,
        "highest": highest,
        "lowest": min(highest, max(1, base - layout.mantissa)),
        "tiny": layout.make_power_of_two_word(tiny),
        "floor": 0 if target.zero else layout.make_power_of_two_word(tiny),
        "tie": layout.make_power_of_two_word(tiny - 1) + 1,
        "first_factor": layout.make_power_of_two_word(halves[0]),
        "second_factor": layout.make_power_of_two_word(halves[1]),
        **dict.fromkeys(("smallest_binade", "raise_by", "limit"), 0),
        **dict.fromkeys(("up_scale", "down_scale", "spare_bits", "whole_steps"), 0),
    }
    path = _choose_rounding_path(target, layout)
    if path == "adder":
        spacing = Fraction(2) ** (floor_log2(target.max) - target.mantissa_bits)
        steps = Fraction(target.max) / spacing
        # The addend 2^(e - m + M) of a magnitude with exponent e, and the largest that stays finite.
        words |= {
            "smallest_binade": layout.make_power_of_two_word(target.emin),
            "raise_by": (layout.mantissa - target.mantissa_bits) << layout.mantissa,
            "limit": layout.get_float_bits(float(Fraction(target.max) + spacing / 2)) - int(steps) % 2,
        }
    if path == "scaled":
        spare = _FIXED_POINT_BITS - target.mantissa_bits
        # Factors to and from fixed point, in which a step is 2^(29 - mantissa bits).
        words |= {
            "smallest_binade": layout.make_power_of_two_word(target.emin),
            "up_scale": (2 * layout.bias + _FIXED_POINT_BITS) << layout.mantissa,
            "down_scale": _FIXED_POINT_BITS << layout.mantissa,
            "spare_bits": layout.width - spare,
            "whole_steps": (1 << layout.width) - (1 << spare),
        }
    array = np.array([*words.values()], np.uint32 if layout.width == 32 else np.uint64)
    return TargetConstants(path, target.signed_zero, target.policy == "saturate", words, array)


def count_random_bits(target: Target) -> int:
    """Return how many random bits a fraction is compared with."""
    return _FIXED_POINT_BITS - target.mantissa_bits if target.mantissa_bits <= 6 else 31


def _choose_rounding_path(target: Target, layout: WordLayout) -> str:
    if _has_fixed_shift(target, layout):
        return "fixed"
    normal = target.zero and (target.subnormals or target.mantissa_bits == 0)
    if target.mode == "stochastic":
        scalable = normal and layout.width == 32 and target.mantissa_bits <= 6 and target.emin >= -96
        return "scaled" if scalable else "packed"
    addable = target.mode == "nearest" and normal
    roomy = floor_log2(target.max) + layout.mantissa + 1 - target.mantissa_bits <= layout.bias
    fine = target.mantissa_bits < layout.mantissa and target.tiny_exponent >= 3 - layout.bias
    return "adder" if addable and roomy and fine else "packed"


def _has_fixed_shift(target: Target, layout: WordLayout) -> bool:
    """Return whether the format's subnormals are the container's, so that every word loses the same bits."""
    if not (target.zero and target.subnormals and target.mantissa_bits):
        return False
    finer = target.mantissa_bits >= layout.mantissa and target.tiny_exponent <= layout.smallest_exponent
    return finer or target.emin == 1 - layout.bias


def floor_log2(value: float) -> int:
    """Return the e with 2^e <= value < 2^(e + 1)."""
    return frexp(value)[1] - 1
