"""Device functions that round a block: its largest magnitude, its scale, its elements."""

# ruff: noqa: F821  names that are free here (scale_of, payload, ...) are bound when a kernel is compiled
from __future__ import annotations

import numpy as np

from ...kernels._trace import block_largest
from ...kernels.scalar._operations import add as plus
from ...kernels.scalar._operations import bit_and as both
from ...kernels.scalar._operations import bit_or as either
from ...kernels.scalar._operations import bit_xor as flip
from ...kernels.scalar._operations import divide, real, word
from ...kernels.scalar._operations import shl as left
from ...kernels.scalar._operations import shr as right
from ...kernels.scalar._operations import sub as minus
from .._device_functions import as_real, as_word, choose, rounded
from .._target import (
    BASE,
    FIELD,
    HIGHEST,
    IMPLICIT,
    INFINITY,
    LARGEST,
    LOWEST,
    MAGNITUDE,
    NAN,
    ONE,
    ONES,
    SIGNIFICAND,
    TINY,
)

# Positions in a kernel's array of words about blocks.
FIRST, SECOND, SMALLEST, GREATEST, TWICE_BIAS, BELOW_NORMAL, UNIT, TENSOR, AMAX, DIVISOR = range(10)
WORDS = 10
SMALLEST_SCALE = np.float32(2.0**-126)


def block_element(w, u, c, d, b):
    """Device function: an element rounded over its block's scale, times the scale."""
    scale = scale_of(block_largest(both(w, c[MAGNITUDE])), c, d, b)
    return rounded_payload(w, u, inverse_of(scale, c, b), factor_of(scale, c, b), c)


def block_scale(a, c, d, b):
    """Device function: the scale of a block from its largest magnitude."""
    return factor_of(scale_of(a, c, d, b), c, b)


def finite_largest(w, c):
    """Device function: the largest magnitude of a block, 0 if one of its elements is infinite or NaN."""
    largest = block_largest(both(w, c[MAGNITUDE]))
    return choose(largest < c[INFINITY], largest, minus(largest, largest))


def rounded_payload(w, u, inverse, factor, c):
    """Device function: an element over its scale, rounded, times the scale."""
    return as_word(as_real(rounded(payload(w, inverse, c), u, c)) * as_real(factor))


# scales that are powers of two: the word of a scale is its exponent ------------------------------------------


def exponent_of_scale(a, c, d, b):
    """Device function: e - FIRST + (f >= SECOND) for amax = 2^e (1 + f), within the scale's range; all ones for NaN."""
    e = right(a, c[FIELD])
    e = choose(both(a, c[SIGNIFICAND]) >= b[SECOND], plus(e, c[ONE]), e)
    lowest = plus(b[SMALLEST], b[FIRST])
    e = minus(choose(e > lowest, e, lowest), b[FIRST])
    e = choose(e < b[GREATEST], e, b[GREATEST])
    return choose(a >= c[INFINITY], c[ONES], e)


def power(e, c, b):
    """Device function: 2^e; 2^-127 is subnormal in float32."""
    w = choose(e < c[ONE], b[BELOW_NORMAL], left(e, c[FIELD]))
    return choose(e == c[ONES], c[NAN], w)


def inverse_power(e, c, b):
    """Device function: 2^-e."""
    return choose(e == c[ONES], c[NAN], left(minus(b[TWICE_BIAS], e), c[FIELD]))


def multiplied(w, inverse, c):
    """Device function: an element over a power of two; one far below its block becomes 0, which it rounds to."""
    return as_word(as_real(w) * as_real(inverse))


def multiplied_kept(w, inverse, c):
    """Device function: the same for modes in which a small number is not 0."""
    return kept(w, multiplied(w, inverse, c), c)


def kept(w, y, c):
    """Device function: a quotient, of a number that is not 0 never 0."""
    zero = minus(c[ONE], c[ONE])
    lost = (both(y, c[MAGNITUDE]) == zero) & (both(w, c[MAGNITUDE]) > zero)
    return choose(lost, either(y, c[ONE]), y)


# any scale: the word of a scale is that of the product with the tensor's -------------------------------------


def product_of_scale(a, c, d, b):
    """Device function: amax / (largest element x tensor scale), rounded within the scale's range, x tensor scale."""
    q = as_word(as_real(a) / as_real(b[UNIT]))
    e = right(q, d[FIELD])
    e = choose(e < d[LOWEST], d[LOWEST], e)
    s = minus(d[BASE], choose(e > d[HIGHEST], d[HIGHEST], e))
    keep = left(d[ONES], s)
    r = both(plus(q, scale_addend(q, s, flip(keep, d[ONES]), d)), keep)
    r = choose(q < d[TINY], d[TINY], r)
    r = choose(r < d[LARGEST], r, d[LARGEST])
    return choose(a >= c[INFINITY], c[NAN], as_word(as_real(r) * as_real(b[TENSOR])))


def under_tensor_scale(b):
    """Device function: the words about blocks, UNIT times the tensor's scale, which is AMAX / DIVISOR."""
    scale = divide(real(b[AMAX]), real(b[DIVISOR]))
    scale = choose(scale > SMALLEST_SCALE, scale, SMALLEST_SCALE)
    changed = {TENSOR: word(scale), UNIT: word(scale * real(b[UNIT]))}
    return [changed.get(k, b[k]) for k in range(WORDS)]


def nearest_scale(q, s, lost, d):
    """Device function: to nearest, ties to even."""
    last = right(either(both(q, d[SIGNIFICAND]), d[IMPLICIT]), s)
    return plus(right(lost, d[ONE]), both(both(last, d[ONE]), lost))


def raised_scale(q, s, lost, d):
    """Device function: away from zero."""
    return lost


def itself(scale, c, b):
    """Device function: the scale's word is the scale."""
    return scale


def divided(w, inverse, c):
    """Device function: an element over its scale."""
    return as_word(as_real(w) / as_real(inverse))


def divided_kept(w, inverse, c):
    """Device function: the same for modes in which a small number is not 0."""
    return kept(w, divided(w, inverse, c), c)
