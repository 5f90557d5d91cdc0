"""float16 in machine code: the processor's own conversions, or integer arithmetic on processors that have none.

Without instructions for them LLVM calls functions of a runtime library that is not there when code is compiled in
memory, and the process dies. The first argument of both functions is a `VectorBuilder`.
"""

from __future__ import annotations

import functools

from ._processor import has_half_conversions

_INFINITY, _QUIET = 0x7F800000, 0x400000
# Between the exponent fields of float32 and float16.
_BIAS = 112


def _words_like(vectors, value):
    """Return the builder, the type of as many 32-bit words as a value has lanes, and what makes constants of it."""
    words = vectors.like(value, vectors.i32)
    return vectors.b, words, functools.partial(vectors.constant, words)


def half_to_float(vectors, raw):
    """16-bit words that hold float16 as float32, exactly; a NaN becomes a quiet one."""
    real, (b, words, word) = vectors.like(raw, vectors.f32), _words_like(vectors, raw)
    if has_half_conversions():
        return b.fpext(b.bitcast(raw, vectors.like(raw, vectors.f16)), real)

    bits = b.zext(raw, words)
    magnitude = b.and_(bits, word(0x7FFF))
    normal = b.add(b.shl(magnitude, word(13)), word(_BIAS << 23))
    below = b.bitcast(b.fmul(b.sitofp(magnitude, real), vectors.constant(real, 2.0**-24)), words)
    beyond = b.or_(b.shl(magnitude, word(13)), word(_INFINITY))
    quiet = b.or_(beyond, word(_QUIET))
    beyond = b.select(b.icmp_unsigned(">", magnitude, word(0x7C00)), quiet, beyond)
    found = b.select(b.icmp_unsigned("<", magnitude, word(0x400)), below, normal)
    found = b.select(b.icmp_unsigned("<", magnitude, word(0x7C00)), found, beyond)
    sign = b.shl(b.and_(bits, word(0x8000)), word(16))
    return b.bitcast(b.or_(found, sign), real)


def float_to_half(vectors, value):
    """float32 rounded to nearest, ties to even, as 16-bit words that hold float16.

    The arithmetic does not depend on how the processor treats subnormals.
    """
    short, (b, words, word) = vectors.like(value, vectors.i16), _words_like(vectors, value)
    if has_half_conversions():
        return b.bitcast(b.fptrunc(value, vectors.like(value, vectors.f16)), short)

    bits = b.bitcast(value, words)
    magnitude = b.and_(bits, word(0x7FFFFFFF))
    last = b.and_(b.lshr(magnitude, word(13)), word(1))
    rounded = b.add(magnitude, b.add(last, word(0xFFF)))
    normal = b.sub(b.lshr(rounded, word(13)), word(_BIAS << 10))
    # Neighbours of a float32 beside 1/2 are as far apart as subnormals of float16.
    below = b.fadd(b.bitcast(magnitude, value.type), vectors.constant(value.type, 0.5))
    below = b.sub(b.bitcast(below, words), word(0x3F000000))
    found = b.select(b.icmp_unsigned("<", magnitude, word((_BIAS + 1) << 23)), below, normal)
    # From 65520 on, half a step above the largest float16, all is infinite.
    found = b.select(b.icmp_unsigned("<", magnitude, word(0x477FF000)), found, word(0x7C00))
    payload = b.and_(b.lshr(magnitude, word(13)), word(0x3FF))
    found = b.select(b.icmp_unsigned(">", magnitude, word(_INFINITY)), b.or_(payload, word(0x7E00)), found)
    sign = b.and_(b.lshr(bits, word(16)), word(0x8000))
    return b.trunc(b.or_(found, sign), short)
