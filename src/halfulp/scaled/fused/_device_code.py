"""Triton kernels on payloads and scales: plain functions whose text goes into a generated module.

Scales are read as float64, in which no product of them leaves the range. A payload's `kind` is its place in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...kernels.triton._operations import to_bfloat16
from ...kernels.triton._writer import module_of

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # triton.language in the generated module

KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e5m2: 3,
    torch.float8_e4m3fn: 4,
}
MODES = ("product", "values", "ratio", "factor", "deviation", "paired", "levelled", "brought", "held")


def read(pointer, i, lanes, kind: tl.constexpr):
    """Elements of a payload in float32."""
    loaded = tl.load(pointer + i, mask=lanes, other=0)
    if kind <= 2:
        return loaded.to(tl.float32)
    else:
        return widened(loaded.to(tl.uint16), kind)


def widened(words, kind: tl.constexpr):
    """Eight-bit floats in float32."""
    if kind == 3:
        return (words << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # the exponent's bias is 8 less than float16's
        sizes = ((words & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        sizes = tl.where((words & 0x7F) == 0x7F, float("nan"), sizes)
        return tl.where((words & 0x80) != 0, sizes * -1.0, sizes)


def held(v, largest):
    """Finite elements within a range; infinities and NaN as they are."""
    inside = tl.where(v > largest, largest, tl.where(v < -largest, -largest, v))
    return tl.where(tl.abs(v) == float("inf"), v, inside)


def rounded(v, kind: tl.constexpr):
    """Elements rounded to a payload's dtype, saturated but for infinities; eight bits as words."""
    if kind == 0:
        return v
    elif kind == 1:
        return to_bfloat16(v)
    elif kind == 2:
        return held(v, 65504.0).to(tl.float16)
    elif kind == 3:
        size = tl.abs(held(v, 57344.0))
        w = size.to(tl.uint32, bitcast=True)
        normal = ((w + 0xFFFFF + ((w >> 21) & 1)) >> 21) - (112 << 2)
        # Adding 2^7 rounds to multiples of 2^-16.
        small = (((tl.where(size < 1.0, size, 0.0) + 128.0) - 128.0) * 65536.0).to(tl.uint32)
        words = tl.where(size < 6.103515625e-05, small, normal)
        words = tl.where(size == float("inf"), 0x7C, words)
        return (tl.where(v == v, words, 0x7F) | sign_bit(v)).to(tl.uint8)
    else:
        size = tl.abs(held(v, 448.0))
        w = size.to(tl.uint32, bitcast=True)
        normal = ((w + 0x7FFFF + ((w >> 20) & 1)) >> 20) - (120 << 3)
        small = (((tl.where(size < 1.0, size, 0.0) + 16384.0) - 16384.0) * 512.0).to(tl.uint32)
        words = tl.where(size < 0.015625, small, normal)
        words = tl.where((size == float("inf")) | (v != v), 0x7F, words)
        return (words | sign_bit(v)).to(tl.uint8)


def sign_bit(v):
    """The sign of float32 elements, as eight-bit floats have it."""
    return (v.to(tl.uint32, bitcast=True) >> 24) & 0x80


def repeated(program, period, block: tl.constexpr, same: tl.constexpr):
    """The places of a block in an operand that repeats after a period, unless it is as long as the other."""
    start = program.to(tl.int64) * block
    if same:
        return start + tl.arange(0, block)
    else:
        return ((start % period).to(tl.int32) + tl.arange(0, block)) % period


def scale_in(pointer):
    """A scale in float64."""
    return tl.load(pointer).to(tl.float64)


def within(x):
    """A number brought into the range of scales, 2^-126 to 2^127."""
    least = tl.full([], 1.1754943508222875e-38, tl.float64)
    most = tl.full([], 1.7014118346046923e38, tl.float64)
    return tl.minimum(tl.maximum(x, least), most)


def at_least_smallest(x):
    """A number raised to 2^-126."""
    return tl.maximum(x, tl.full([], 1.1754943508222875e-38, tl.float64))


def factors_of(s0, s1, s2, s3, number, mode: tl.constexpr, count: tl.constexpr):
    """A result's scale and two factors of its payload, all in float64: see `finish`."""
    one = tl.full([], 1.0, tl.float64)
    if mode == 0:
        total = product_of(s0, s1, s2, number, count)
        return within(total), total / within(total), one
    elif mode == 1:
        return scale_in(s0), at_least_smallest(one / scale_in(s0)), one
    elif mode == 2:
        return scale_in(s1), at_least_smallest(scale_in(s0) / scale_in(s1)), one
    elif mode == 3:
        return one, within(product_of(s0, s1, s2, number, count)), one
    elif mode == 4:
        scale = tl.minimum(within(one / scale_in(s0)), one * number)
        return scale, at_least_smallest(one / scale), one
    elif mode == 5:
        total = product_of(s0, s1, s2, number, count - 1)
        pair = scale_in(s1) * scale_in(s2) if count == 3 else scale_in(s2) * scale_in(s3)
        return within(total), total / within(total), one / within(pair)
    elif mode == 8:
        return one, one, one
    elif mode == 7:
        huge = tl.full([], 1.2676506002282294e30, tl.float64)
        return scale_in(s1), tl.minimum(at_least_smallest(scale_in(s0) / scale_in(s1)), huge), one
    else:
        total = product_of(s0, s1, s2, number, count)
        return within(total), total / within(total), one / scale_in(s1)


def product_of(s0, s1, s2, number, count: tl.constexpr):
    """The product of so many scales and a number in float64."""
    total = tl.full([], 1.0, tl.float64) * number
    if count > 0:
        total = total * scale_in(s0)
    if count > 1:
        total = total * scale_in(s1)
    if count > 2:
        total = total * scale_in(s2)
    return total


def finish(
    y, s0, s1, s2, s3, out, out_scale, n, factor, number,
    mode: tl.constexpr, count: tl.constexpr, of: tl.constexpr, to: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    scale, rest, extra = factors_of(s0, s1, s2, s3, number, mode, count)
    if mode != 3 and mode != 8:  # noqa: SIM102 (a constant, and a value of the program)
        if program == 0:
            tl.store(out_scale, scale.to(tl.float32))
    i = program.to(tl.int64) * block + tl.arange(0, block)
    lanes = i < n
    values = read(y, i, lanes, of) * factor * extra.to(tl.float32) * rest.to(tl.float32)
    if mode == 8:
        most = tl.full([], 3.3895313892515355e38, tl.float64)
        values = held(values, tl.minimum(most / scale_in(s0), most).to(tl.float32))
    tl.store(out + i, rounded(values, to), mask=lanes)


def add(
    x, y, sx, sy, out, out_scale, n, period, sign,
    of_x: tl.constexpr, of_y: tl.constexpr, to: tl.constexpr, keep: tl.constexpr, same: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    a, b = scale_in(sx), scale_in(sy)
    huge = tl.full([], 1.2676506002282294e30, tl.float64)
    zero = tl.full([], 1.1754943508222875e-38, tl.float64)
    scale = tl.maximum(tl.where(a < huge, a, zero), tl.where(b < huge, b, zero))
    scale = tl.where(scale == zero, tl.maximum(a, b), scale)
    if program == 0:
        tl.store(out_scale, scale.to(tl.float32))
    i = program.to(tl.int64) * block + tl.arange(0, block)
    lanes = i < n
    u = read(x, i, lanes, of_x) * tl.minimum(at_least_smallest(a / scale), huge).to(tl.float32)
    v = read(y, repeated(program, period, block, same), lanes, of_y) * tl.minimum(
        at_least_smallest(b / scale), huge
    ).to(tl.float32)
    v = v * sign
    total = u + v
    made = rounded(total, to)
    if keep:
        # A sum of numbers of one sign is not rounded to 0.
        is_one_sign = ((u >= 0) & (v >= 0)) | ((u <= 0) & (v <= 0))
        is_lost = (total != 0) & (total == total) & is_one_sign
        if to == 2:
            least = tl.where(total < 0, -5.960464477539063e-08, 5.960464477539063e-08).to(tl.float16)
            made = tl.where(is_lost & (made == 0), least, made)
        else:
            made = tl.where(is_lost & ((made & 0x7F) == 0), made | 1, made)
    tl.store(out + i, made, mask=lanes)


def affine_scales(s_base, sa, sb, beta_power, power):
    """The scale of beta base + alpha a b, and the factors of the two payloads."""
    base, product = scale_in(s_base), scale_in(sa) * scale_in(sb)
    own = within(base * beta_power)
    scale = tl.maximum(own, within(product * power))
    return scale, within(base / scale), within(product / scale)


def affine(
    y, base, s_base, sa, sb, out, out_scale, n, period, beta, beta_power, alpha, power,
    of_y: tl.constexpr, of_base: tl.constexpr, to: tl.constexpr, same: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    scale, of_start, of_product = affine_scales(s_base, sa, sb, beta_power, power)
    if program == 0:
        tl.store(out_scale, scale.to(tl.float32))
    i = program.to(tl.int64) * block + tl.arange(0, block)
    lanes = i < n
    product = read(y, i, lanes, of_y) * (alpha * of_product.to(tl.float32))
    start = read(base, repeated(program, period, block, same), lanes, of_base) * (beta * of_start.to(tl.float32))
    tl.store(out + i, rounded(product + start, to), mask=lanes)


def affine_factors(s_base, sa, sb, out_scale, out_base, out_product, beta_power, power):
    scale, of_base, of_product = affine_scales(s_base, sa, sb, beta_power, power)
    tl.store(out_scale, scale.to(tl.float32))
    tl.store(out_base, of_base.to(tl.float32))
    tl.store(out_product, of_product.to(tl.float32))


def measure(y, parts, n, programs, loops, of: tl.constexpr, block: tl.constexpr):
    program = tl.program_id(0)
    largest = tl.zeros([block], tl.float32)
    squares = tl.zeros([block], tl.float64)
    count = tl.zeros([block], tl.int32)
    k = 0
    while k < loops:
        i = (program + k * programs).to(tl.int64) * block + tl.arange(0, block)
        size = tl.abs(read(y, i, i < n, of))
        size = tl.where(size < float("inf"), size, 0.0)
        largest = tl.maximum(largest, size)
        squares += size.to(tl.float64) * size.to(tl.float64)
        count += (size > 0).to(tl.int32)
        k += 1
    tl.store(parts + program, tl.max(largest, axis=0).to(tl.float64))
    tl.store(parts + programs + program, tl.sum(squares, axis=0))
    tl.store(parts + 2 * programs + program, tl.sum(count, axis=0).to(tl.float64))


def power_at(x, add: tl.constexpr):
    """The power of two below a positive number, of whose bits something is added first."""
    x = within(x).to(tl.float32)
    return ((x.to(tl.uint32, bitcast=True) + add) & 0x7F800000).to(tl.float32, bitcast=True)


def level(parts, out, programs, limit, of_zeros, block: tl.constexpr):
    i = tl.arange(0, block)
    lanes = i < programs
    largest = tl.max(tl.load(parts + i, mask=lanes, other=0.0), axis=0)
    squares = tl.sum(tl.load(parts + programs + i, mask=lanes, other=0.0), axis=0)
    count = tl.sum(tl.load(parts + 2 * programs + i, mask=lanes, other=0.0), axis=0)
    one = tl.full([], 1.0, tl.float64)
    nearest = power_at(tl.sqrt(squares / tl.maximum(count, one)), 0x800000 - 0x3504F3)
    needed = power_at(largest / (one * limit), 0x7FFFFF)
    tl.store(out, tl.where(largest > 0, tl.maximum(nearest, needed), of_zeros))


def module_text() -> str:
    """Return the source of a Triton module with all of the kernels."""
    functions: list[Callable[..., object]] = [read, widened, held, to_bfloat16, rounded, sign_bit, repeated]
    functions += [scale_in, within]
    functions += [at_least_smallest, factors_of, product_of, affine_scales, finish, add, affine, affine_factors]
    functions += [measure, power_at, level]
    return module_of(functions, {}, {})
