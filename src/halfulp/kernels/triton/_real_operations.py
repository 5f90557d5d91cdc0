"""Operations on reals of either width on Triton blocks: plain functions whose text goes into generated modules.

A name ends in the width of its reals, 32 or 64 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # triton.language in a generated module


def product_error32(a, b, p):
    minus_p = (p.to(tl.uint32, bitcast=True) ^ tl.full([], 0x80000000, tl.uint32)).to(tl.float32, bitcast=True)
    return tl.fma(a, b, minus_p)


def product_error64(a, b, p):
    minus_p = (p.to(tl.uint64, bitcast=True) ^ tl.full([], 0x8000000000000000, tl.uint64)).to(tl.float64, bitcast=True)
    return tl.fma(a, b, minus_p)


def rint32(x):
    # Next to 2^23 a float32 has no fraction; the sign of what becomes zero stays.
    magic = tl.full([], 12582912.0, tl.float32)
    whole = tl.where(tl.abs(x) < tl.full([], 4194304.0, tl.float32), (x + magic) - magic, x)
    sign = x.to(tl.uint32, bitcast=True) & tl.full([], 0x80000000, tl.uint32)
    return (whole.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


def rint64(x):
    magic = tl.full([], 6755399441055744.0, tl.float64)
    whole = tl.where(tl.abs(x) < tl.full([], 2251799813685248.0, tl.float64), (x + magic) - magic, x)
    sign = x.to(tl.uint64, bitcast=True) & tl.full([], 0x8000000000000000, tl.uint64)
    return (whole.to(tl.uint64, bitcast=True) | sign).to(tl.float64, bitcast=True)


def floor32(x):
    return tl.floor(x)


def floor64(x):
    return tl.floor(x)


def power_below32(x):
    return (x.to(tl.uint32, bitcast=True) & tl.full([], 0x7F800000, tl.uint32)).to(tl.float32, bitcast=True)


def power_below64(x):
    return (x.to(tl.uint64, bitcast=True) & tl.full([], 0x7FF0000000000000, tl.uint64)).to(tl.float64, bitcast=True)


def exponent32(x):
    biased = (x.to(tl.uint32, bitcast=True) >> tl.full([], 23, tl.uint32)) & tl.full([], 255, tl.uint32)
    return (biased.to(tl.int32, bitcast=True) - 127).to(tl.float32)


def exponent64(x):
    biased = (x.to(tl.uint64, bitcast=True) >> tl.full([], 52, tl.uint64)) & tl.full([], 2047, tl.uint64)
    return (biased.to(tl.int64, bitcast=True) - 1023).to(tl.float64)


def power32(k):
    # A NaN stands for no integer, and gives 1 as on the CPU.
    whole = tl.where(k == k, k, tl.full([], 0.0, tl.float32)).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


def power64(k):
    whole = tl.where(k == k, k, tl.full([], 0.0, tl.float64)).to(tl.int64)
    return ((whole + 1023) << 52).to(tl.float64, bitcast=True)


def gather(table, index, last: tl.constexpr):
    # An index beyond the table, or NaN, reads its nearest end, or its first value.
    inside = tl.where(index > 0, index, 0.0)
    inside = tl.where(inside < last, inside, last * 1.0)
    return tl.load(table + inside.to(tl.int32)).to(index.dtype)


def to_bfloat16(x):
    # By words, as Triton's interpreter converts subnormal numbers to others.
    w = x.to(tl.uint32, bitcast=True)
    nearest = (w + tl.full([], 0x7FFF, tl.uint32) + ((w >> 16) & 1)) >> 16
    nearest = tl.where(x == x, nearest, tl.full([], 0x7FC0, tl.uint32))
    return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
