"""Constants and tables to any number of digits, from integer arithmetic alone, cut into float64 components."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

BITS = 420
ONE = 1 << BITS


def components(value: int, count: int) -> tuple[float, ...]:
    """value / 2^BITS as a canonical sum of float64."""
    out = []
    for _ in range(count):
        part = value / ONE  # Python divides integers with one rounding
        out.append(part)
        value -= fixed(Fraction(part))
    return tuple(out)


def chunks(value: int, bits: int, count: int) -> tuple[float, ...]:
    """value / 2^BITS > 0 cut into pieces of at most `bits` bits each, so that small integers times them are exact."""
    out, place = [], value.bit_length() - bits
    for _ in range(count):
        piece = (value >> place) << place if place > 0 else value
        out.append(piece / ONE)
        value -= piece
        place -= bits
    return tuple(out)


def fixed(value: Fraction) -> int:
    """Return a rational times 2^BITS, rounded down."""
    return (value.numerator << BITS) // value.denominator


def _series(first: int, step: Callable[[int, int], int]) -> int:
    total, term, k = first, first, 1
    while term:
        term = step(term, k)
        total += term
        k += 1
    return total


def exp(x: int) -> int:
    """e^x for a fixed-point x."""
    halvings = 16
    small = x >> halvings if x >= 0 else -(-x >> halvings)
    value = _series(ONE, lambda term, k: _shift(term * small, k))
    for _ in range(halvings):
        value = value * value >> BITS
    return value


def _shift(product: int, k: int) -> int:
    whole = abs(product) // (k << BITS)
    return whole if product > 0 else -whole


def log(value: Fraction) -> int:
    """Return the natural logarithm of a positive rational: 2 atanh((v - 1) / (v + 1)), for v near 1."""
    s = fixed((value - 1) / (value + 1))
    power, total, k = s, 0, 1
    square = s * s >> BITS
    while power:
        total += _shift(power << BITS, k)
        power = _shift(power * square, 1)
        k += 2
    return 2 * total


@functools.cache
def ln2() -> int:
    """log 2."""
    return log(Fraction(2))


def arctan(x: Fraction) -> int:
    """Return the arc tangent of |x| <= 1, by halving the argument: atan x = 2 atan(x / (1 + sqrt(1 + x^2)))."""
    s = fixed(x)
    for _ in range(8):
        s = (s << BITS) // (ONE + math.isqrt((ONE * ONE) + s * s))
    power, total, k, square = s, 0, 1, s * s >> BITS
    while power:
        total += power // k if k % 4 == 1 else -(power // k)
        power = power * square >> BITS
        k += 2
    return total << 8


@functools.cache
def pi() -> int:
    """pi, as 16 atan(1/5) - 4 atan(1/239) (Machin)."""
    return 16 * arctan(Fraction(1, 5)) - 4 * arctan(Fraction(1, 239))


def sine_cosine(x: int) -> tuple[int, int]:
    """sin and cos of a fixed-point x, by their series at x / 2^8 and doubling."""
    small, square = x >> 8, (x >> 8) ** 2 >> BITS
    sine = _series(small, lambda term, k: -(term * square // ((2 * k * (2 * k + 1)) << BITS)))
    versine = _series(-(square >> 1), lambda term, k: -(term * square // (((2 * k + 1) * (2 * k + 2)) << BITS)))
    for _ in range(8):
        # cos - 1 is carried, which loses nothing near zero
        sine, versine = 2 * sine * (ONE + versine) >> BITS, 2 * versine * (2 * ONE + versine) >> BITS
    return sine, ONE + versine


def gauss(x: Fraction) -> int:
    """2 / sqrt(pi) e^(-x^2)."""
    return (exp(-fixed(x * x)) << BITS) * 2 // math.isqrt(pi() << BITS)


def error_function(x: Fraction) -> int:
    """erf x = 2/sqrt(pi) e^(-x^2) sum 2^k x^(2k+1) / (2k+1)!!, which has no cancellation."""
    square = fixed(2 * x * x)
    total = _series(fixed(x), lambda term, k: term * square // ((2 * k + 1) << BITS))
    return gauss(x) * total >> BITS


def to_components(values: list[int], count: int) -> list[tuple[float, ...]]:
    """Convert a table of fixed-point values to `count` tables of float64 components."""
    return [tuple(column) for column in zip(*(components(value, count) for value in values))]


@functools.cache
def reciprocals() -> tuple[tuple[float, ...], list[tuple[float, ...]]]:
    """Return c about 64 / j and -log c as components, for j = 45 to 91."""
    c = [64 / j for j in range(45, 92)]
    return tuple(c), to_components([-log(Fraction(x)) for x in c], 6)


@functools.cache
def fractional_powers() -> list[tuple[float, ...]]:
    """2^(j/128) - 1 for j = -64 to 64."""
    return to_components([exp(ln2() * j // 128) - ONE if j else 0 for j in range(-64, 65)], 5)


@functools.cache
def circle() -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """sin and cos of j pi / 32 for j = 0 to 63."""
    quarter = [sine_cosine(pi() * j // 32)[0] if j else 0 for j in range(16)] + [ONE]
    sines = [_sine_of(quarter, j) for j in range(80)]
    return to_components(sines[:64], 5), to_components(sines[16:80], 5)


def _sine_of(quarter: list[int], j: int) -> int:
    j %= 64
    sign = -1 if j >= 32 else 1
    j %= 32
    return sign * quarter[j if j <= 16 else 32 - j]


@functools.cache
def arcs() -> list[tuple[float, ...]]:
    """atan(j / 32) for j = 0 to 32."""
    return to_components([arctan(Fraction(j, 32)) for j in range(33)], 5)


@functools.cache
def bells(count: int) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """erf(j / 16) and 2/sqrt(pi) e^(-(j/16)^2) for j = 0 to count - 1."""
    points = [Fraction(j, 16) for j in range(count)]
    return to_components([error_function(x) for x in points], 5), to_components([gauss(x) for x in points], 5)


@functools.cache
def tails(count: int) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]], tuple[float, ...]]:
    """Return erfc(x) 2^k, 2/sqrt(pi) e^(-x^2) 2^k and the k that keeps them near 1, for x = j / 32, j < count."""
    points = [Fraction(j, 32) for j in range(count)]
    shifts = [int(float(x * x) * math.log2(math.e)) for x in points]
    bell = [(exp(k * ln2() - fixed(x * x)) << BITS) * 2 // math.isqrt(pi() << BITS) for x, k in zip(points, shifts)]
    tail = [_tail(x, k, b) for x, k, b in zip(points, shifts, bell)]
    return to_components(tail, 5), to_components(bell, 5), tuple(map(float, shifts))


def _tail(x: Fraction, shift: int, bell: int) -> int:
    """erfc(x) 2^shift: 1 - erf(x), and from 8 on the bell over 2 (x + (1/2)/(x + (2/2)/(x + (3/2)/(x + ...))))."""
    if x < 8:
        return (ONE - error_function(x)) << shift
    below = fixed(x)
    for k in range(160, 0, -1):
        below = fixed(x) + (k << (2 * BITS)) // (2 * below)
    return (bell << BITS) // (2 * below)
