"""Constants and tables of mpmath, cut into float64 components."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

MPMATH_PRECISION_BITS = 420
FloatTable = tuple[float, ...]


def make_mpmath_context() -> Any:
    """Return a context of mpmath of its own, as the precision of `mpmath.mp` is the user's."""
    from mpmath import MPContext  # a twentieth of a second, which few calls need

    context = MPContext()
    context.prec = MPMATH_PRECISION_BITS
    return context


def split_into_floats(value: Any, count: int) -> tuple[float, ...]:
    """Return a Fraction, or one of mpmath's numbers, as a canonical sum of float64."""
    out = []
    for _ in range(count):
        out.append(float(value))
        value -= type(value)(out[-1])
    return tuple(out)


def split_into_bit_chunks(value: Any, bits: int, count: int) -> tuple[float, ...]:
    """Return a number > 0 as pieces of at most `bits` bits each, so that small integers times them are exact."""
    out, whole = [], int(value * 2**MPMATH_PRECISION_BITS)
    place = whole.bit_length() - bits
    for _ in range(count):
        piece = (whole >> place) << place if place > 0 else whole
        out.append(piece / 2**MPMATH_PRECISION_BITS)
        whole -= piece
        place -= bits
    return tuple(out)


@functools.cache
def compute_log(base: int) -> Any:
    """Return the natural logarithm of an integer."""
    return make_mpmath_context().log(base)


@functools.cache
def compute_pi() -> Any:
    """Return pi as an mpmath number."""
    return +make_mpmath_context().pi


def _split_into_tables(values: Iterable[Any], count: int = 5) -> list[FloatTable]:
    """Return the first components of all values, their second ones, and so on."""
    return list(zip(*(split_into_floats(value, count) for value in values)))


@functools.cache
def make_reciprocal_and_log_tables() -> tuple[FloatTable, list[FloatTable]]:
    """Return c about 64 / j and -log c as components, for j = 45 to 91."""
    mp, c = make_mpmath_context(), tuple(64 / j for j in range(45, 92))
    return c, _split_into_tables((-mp.log(x) for x in c), 6)


@functools.cache
def make_fractional_power_tables() -> list[FloatTable]:
    """Return 2^(j/128) - 1 for j = -64 to 64."""
    mp = make_mpmath_context()
    return _split_into_tables(mp.expm1(mp.ln2 * j / 128) for j in range(-64, 65))


@functools.cache
def make_sine_cosine_tables() -> tuple[list[FloatTable], list[FloatTable]]:
    """Return sin and cos of j pi / 32 for j = 0 to 63."""
    mp = make_mpmath_context()
    points = [mp.mpf(j) / 32 for j in range(64)]
    return _split_into_tables(map(mp.sinpi, points)), _split_into_tables(map(mp.cospi, points))
