"""float16 in machine code: the processor's own conversions, or integer arithmetic on processors that have none.

Without instructions for them LLVM calls functions of a runtime library that is not there when code is compiled in
memory, and the process dies.
"""

from __future__ import annotations

from ..scalar._processor import has_half_conversions

_INFINITY, _QUIET = 0x7F800000, 0x400000
# Between the exponent fields of float32 and float16.
_BIAS = 112


def half_to_float(builder, raw, shape):
    """16-bit words that hold float16 as float32, exactly; a NaN becomes a quiet one.

    Args:
        builder: writes the instructions.
        raw: an integer or a vector of them.
        shape: from a scalar LLVM type to that of all lanes.
    """
    from llvmlite import ir

    if has_half_conversions():
        return builder.fpext(builder.bitcast(raw, shape(ir.HalfType())), shape(ir.FloatType()))
    return _Words(builder, shape).half_to_float(raw)


def float_to_half(builder, value, shape):
    """float32 rounded to nearest, ties to even, as 16-bit words that hold float16; arguments as of `half_to_float`."""
    from llvmlite import ir

    if has_half_conversions():
        return builder.bitcast(builder.fptrunc(value, shape(ir.HalfType())), shape(ir.IntType(16)))
    return _Words(builder, shape).float_to_half(value)


class _Words:
    """Conversions by arithmetic on 32-bit words, which do not depend on how subnormals are treated."""

    def __init__(self, builder, shape) -> None:
        from llvmlite import ir

        self.ir, self.b = ir, builder
        self.real, self.word, self.short = (shape(kind) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(16)))

    def constant(self, value, kind=None):
        kind = kind or self.word
        return self.ir.Constant(kind, [value] * kind.count if isinstance(kind, self.ir.VectorType) else value)

    def half_to_float(self, raw):
        b, word = self.b, self.constant
        bits = b.zext(raw, self.word)
        magnitude = b.and_(bits, word(0x7FFF))
        normal = b.add(b.shl(magnitude, word(13)), word(_BIAS << 23))
        below = b.bitcast(b.fmul(b.sitofp(magnitude, self.real), self.constant(2.0**-24, self.real)), self.word)
        beyond = b.or_(b.shl(magnitude, word(13)), word(_INFINITY))
        quiet = b.or_(beyond, word(_QUIET))
        beyond = b.select(b.icmp_unsigned(">", magnitude, word(0x7C00)), quiet, beyond)
        found = b.select(b.icmp_unsigned("<", magnitude, word(0x400)), below, normal)
        found = b.select(b.icmp_unsigned("<", magnitude, word(0x7C00)), found, beyond)
        sign = b.shl(b.and_(bits, word(0x8000)), word(16))
        return b.bitcast(b.or_(found, sign), self.real)

    def float_to_half(self, value):
        b, word = self.b, self.constant
        bits = b.bitcast(value, self.word)
        magnitude = b.and_(bits, word(0x7FFFFFFF))
        last = b.and_(b.lshr(magnitude, word(13)), word(1))
        rounded = b.add(magnitude, b.add(last, word(0xFFF)))
        normal = b.sub(b.lshr(rounded, word(13)), word(_BIAS << 10))
        # Neighbours of a float32 beside 1/2 are as far apart as subnormals of float16.
        below = b.fadd(b.bitcast(magnitude, self.real), self.constant(0.5, self.real))
        below = b.sub(b.bitcast(below, self.word), word(0x3F000000))
        found = b.select(b.icmp_unsigned("<", magnitude, word((_BIAS + 1) << 23)), below, normal)
        # From 65520 on, half a step above the largest float16, all is infinite.
        found = b.select(b.icmp_unsigned("<", magnitude, word(0x477FF000)), found, word(0x7C00))
        payload = b.and_(b.lshr(magnitude, word(13)), word(0x3FF))
        found = b.select(b.icmp_unsigned(">", magnitude, word(_INFINITY)), b.or_(payload, word(0x7E00)), found)
        sign = b.and_(b.lshr(bits, word(16)), word(0x8000))
        return b.trunc(b.or_(found, sign), self.short)
