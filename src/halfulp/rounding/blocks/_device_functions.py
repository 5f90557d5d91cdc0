"""Device functions that round a block: its largest magnitude, its scale, its elements."""

# ruff: noqa: F821  names that are free here (load, store, BLOCK, measured, ...) are bound when a kernel is compiled
from __future__ import annotations

from ...kernels.scalar._operations import add as plus
from ...kernels.scalar._operations import add as plus32
from ...kernels.scalar._operations import amax16x16, amax16x32, divide, real, word
from ...kernels.scalar._operations import bit_and as both
from ...kernels.scalar._operations import bit_or as either
from ...kernels.scalar._operations import bit_xor as flip
from ...kernels.scalar._operations import shl as left
from ...kernels.scalar._operations import shr as right
from ...kernels.scalar._operations import sub as minus
from .._device_functions import all_constants, as_real, as_word, bfloat16_word, choose, float16_word, rounded
from .._kernel_constants import (
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
from .._random_bits import WEYL, draw, stream_start

# Positions in a kernel's array of words about blocks.
FIRST, SECOND, SMALLEST, GREATEST, TWICE_BIAS, BELOW_NORMAL, UNIT, TENSOR = range(8)


def quantize_blocks(first, last, table, source, target, scales, constants, scale_constants, words, low, high):
    """Kernel: round the blocks of the groups [first, last); `scales` takes a word per block."""
    c, d, b = all_constants(constants), all_constants(scale_constants), block_words(words)
    for group in range(first, last):
        begin, whole, rest, block = table[group, 0], table[group, 1], table[group, 2], table[group, 3]
        measured(source, scales, begin, whole, rest, block, c)
        for k in range(block, block + whole + (rest > 0)):
            store_scale(scales, k, scale_of(load_scale(scales, k), c, d, b))
        counter = stream_start(low, high, begin)
        for k in range(whole):
            scale = load_scale(scales, block + k)
            inverse, factor = inverse_of(scale, c, b), factor_of(scale, c, b)
            start = begin + k * BLOCK
            for i in range(start, start + BLOCK):
                store(target, i, rounded_payload(load(source, i), draw(counter), inverse, factor, c))
                counter = plus32(counter, WEYL)
        if rest > 0:
            scale = load_scale(scales, block + whole)
            inverse, factor = inverse_of(scale, c, b), factor_of(scale, c, b)
            start = begin + whole * BLOCK
            for i in range(start, start + rest):
                store(target, i, rounded_payload(load(source, i), draw(counter), inverse, factor, c))
                counter = plus32(counter, WEYL)


def measure_blocks(first, last, table, source, scales, constants):
    """Kernel: the largest magnitude of every block of the groups [first, last)."""
    c = all_constants(constants)
    for group in range(first, last):
        block_amax(source, scales, table[group, 0], table[group, 1], table[group, 2], table[group, 3], c)


def block_amax(source, scales, begin, whole, rest, block, c):
    """Device function: the largest magnitude of each block, as words, among which NaN is the largest."""
    for k in range(whole):
        start = begin + k * BLOCK
        largest = minus(c[ONE], c[ONE])
        for i in range(start, start + BLOCK, AT_ONCE):
            a = amax(source, i, c)
            largest = choose(a > largest, a, largest)
        store_scale(scales, block + k, largest)
    if rest > 0:
        start = begin + whole * BLOCK
        largest = minus(c[ONE], c[ONE])
        for i in range(start, start + rest):
            a = both(load(source, i), c[MAGNITUDE])
            largest = choose(a > largest, a, largest)
        store_scale(scales, block + whole, largest)


def amax_of_one(source, i, c):
    """Device function: a magnitude."""
    return both(load(source, i), c[MAGNITUDE])


def amax_of_float32(source, i, c):
    """Device function: the largest magnitude of 16 float32."""
    return amax16x32(source, i)


def amax_of_bfloat16(source, i, c):
    """Device function: the largest magnitude of 16 bfloat16, as a float32's word."""
    return bfloat16_word(amax16x16(source, i))


def amax_of_float16(source, i, c):
    """Device function: the largest magnitude of 16 float16, as a float32's word."""
    return float16_word(amax16x16(source, i))


def already(source, scales, begin, whole, rest, block, c):
    """Device function: the magnitudes have been measured."""


def block_words(k):
    """Device function: the words about blocks as values, read once."""
    return (k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7])


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
    y = as_word(as_real(w) * as_real(inverse))
    zero = minus(c[ONE], c[ONE])
    lost = (both(y, c[MAGNITUDE]) == zero) & (both(w, c[MAGNITUDE]) > zero)
    return choose(lost, either(y, c[ONE]), y)


# any scale: the word of a scale is that of the product with the tensor's -------------------------------------


def product_of_scale(a, c, d, b):
    """Device function: amax / (largest element x tensor scale), rounded within the scale's range, x tensor scale."""
    q = word(divide(real(a), real(b[UNIT])))
    e = right(q, d[FIELD])
    e = choose(e < d[LOWEST], d[LOWEST], e)
    s = minus(d[BASE], choose(e > d[HIGHEST], d[HIGHEST], e))
    keep = left(d[ONES], s)
    r = both(plus(q, scale_addend(q, s, flip(keep, d[ONES]), d)), keep)
    r = choose(q < d[TINY], d[TINY], r)
    r = choose(r < d[LARGEST], r, d[LARGEST])
    return choose(a >= c[INFINITY], c[NAN], word(real(r) * real(b[TENSOR])))


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
    return word(divide(real(w), real(inverse)))


def divided_kept(w, inverse, c):
    """Device function: the same for modes in which a small number is not 0."""
    y = word(divide(real(w), real(inverse)))
    zero = minus(c[ONE], c[ONE])
    lost = (both(y, c[MAGNITUDE]) == zero) & (both(w, c[MAGNITUDE]) > zero)
    return choose(lost, either(y, c[ONE]), y)
