"""Values of any format, kept in float32 tensors: the store of parameters trained with format=."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from ... import formats
from ...formats import Format
from ...kernels.scalar._operations import (
    add,
    bit_and,
    bit_or,
    load32,
    real,
    select,
    shr,
    store32,
    sub,
    to_real,
    to_word,
    word,
)
from ._storage import Store, f32_real

S8, ONE, ABS, SIGN, EXPONENT = (np.uint32(w) for w in (8, 1, 0x7FFFFFFF, 0x80000000, 0x7F800000))
TWO_M24 = np.float32(2.0**-24)

# Bound per format.
KEEP = UNDRAWN = HALF = SHIFT = LEAST_BINADE = RAISE = UNIT_SHIFT = LARGEST = BEYOND = np.uint32(0)
INVERSE_TOP = np.uint32(0)


def grid_nearest(x, random):
    """Device function: to nearest where every word loses the same bits (8 exponent bits)."""
    bits = word(x)
    rounded = bit_and(add(add(bits, HALF), bit_and(shr(bits, SHIFT), ONE)), KEEP)
    return select(bit_and(bits, ABS) > EXPONENT, bits, rounded)


def grid_stochastic(x, random):
    """Device function: stochastic where every word loses the same bits."""
    bits = word(x)
    return select(bit_and(bits, ABS) > EXPONENT, bits, bit_and(add(bits, shr(random, UNDRAWN)), KEEP))


def spaced_nearest(x, random):
    """Device function: to nearest by the float adder, whose spacing at 2^(e - m + 23) is the format's at 2^e."""
    bits = word(x)
    magnitude = bit_and(bits, ABS)
    large = real(add(binade_of(magnitude), RAISE))
    rounded = word((real(magnitude) + large) - large)
    return bit_or(limited(magnitude, rounded), bit_and(bits, SIGN))


def spaced_stochastic(x, random):
    """Device function: stochastic in units of the spacing."""
    bits = word(x)
    magnitude = bit_and(bits, ABS)
    bounded = select(magnitude < EXPONENT, magnitude, binade_of(ONE))
    binade = binade_of(bounded)
    units = real(bounded) * real(sub(INVERSE_TOP, binade))
    below = to_real(to_word(units))
    above = below + to_real(ONE)
    taken = select(to_real(shr(random, S8)) * TWO_M24 < units - below, above, below)
    rounded = word(taken * real(sub(binade, UNIT_SHIFT)))
    return bit_or(limited(magnitude, select(magnitude < EXPONENT, rounded, magnitude)), bit_and(bits, SIGN))


def binade_of(magnitude):
    """Device function: the power of two at or below a magnitude, at least the smallest normal one."""
    binade = bit_and(magnitude, EXPONENT)
    return select(binade > LEAST_BINADE, binade, LEAST_BINADE)


def limited(magnitude, rounded):
    """Device function: what lies beyond the largest number, by the format's policy; NaN stays."""
    inside = select(rounded <= LARGEST, rounded, BEYOND)
    return select(magnitude > EXPONENT, magnitude, inside)


@functools.cache
def format_store(given: Format | str | None) -> Store | None:
    """The store of a format's values in float32; None for no format and for float32 itself.

    Raises:
        ValueError: a format whose values float32 does not hold, or without sign, zero or subnormals.
    """
    fmt = None if given is None else formats.get(given)
    if fmt is None or fmt.layout == formats.fp32.layout:
        return None
    if not (fmt.signed and fmt.zero and fmt.subnormals and fmt.signed_zero) or fmt.mantissa_bits == 0:
        raise ValueError(f"format={fmt.name} cannot hold weights: a sign, both zeros and subnormals are needed")
    if fmt.exponent_bits == 8 and fmt.emin == -126:
        if fmt.mantissa_bits >= 23:
            raise ValueError(f"format={fmt.name} has more bits than the float32 parameters that are to hold it")
        return _grid_store(fmt)
    if fmt.emax - fmt.mantissa_bits + 24 > 127 or fmt.emin - fmt.mantissa_bits < -100 or fmt.mantissa_bits > 20:
        raise ValueError(f"format={fmt.name} does not fit into float32 parameters: its range or precision is too large")
    return _spaced_store(fmt)


def _grid_store(fmt: Format) -> Store:
    lost = 23 - fmt.mantissa_bits
    constants = {
        "KEEP": 0xFFFFFFFF << lost & 0xFFFFFFFF,
        "UNDRAWN": 32 - lost,
        "HALF": (1 << lost - 1) - 1,
        "SHIFT": lost,
    }
    return _store(fmt, (grid_nearest, grid_stochastic), constants)


def _spaced_store(fmt: Format) -> Store:
    constants = {
        "LEAST_BINADE": fmt.emin + 127 << 23,
        "RAISE": 23 - fmt.mantissa_bits << 23,
        "UNIT_SHIFT": fmt.mantissa_bits << 23,
        "INVERSE_TOP": 254 + fmt.mantissa_bits << 23,
        "LARGEST": int(np.float32(fmt.max).view(np.uint32)),
        "BEYOND": {"inf": 0x7F800000, "nan": 0x7FC00000}.get(fmt.overflow, int(np.float32(fmt.max).view(np.uint32))),
    }
    return _store(fmt, (spaced_nearest, spaced_stochastic), constants)


def _store(fmt: Format, pieces: tuple[Callable, Callable], constants: dict[str, int]) -> Store:
    bound = tuple((name, np.uint32(value)) for name, value in constants.items())
    return Store(
        fmt.name,
        torch.float32,
        load32,
        store32,
        f32_real,
        *pieces,
        32,
        fmt.mantissa_bits,
        fmt.emin,
        bound,
    )
