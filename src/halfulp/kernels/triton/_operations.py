"""Operations on Triton blocks that take more than an expression: plain functions whose text goes into modules.

`lanes` is the mask of the elements that exist, and `aligned` says that addresses and indices are multiples of 16. Words
are blocks of uint32 or uint64, and reals of float32 or float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # triton.language in a generated module


def bits(x):
    if x.dtype == tl.float64:
        return x.to(tl.uint64, bitcast=True)
    else:
        return x.to(tl.uint32, bitcast=True)


def real(w):
    if w.dtype == tl.uint64:
        return w.to(tl.float64, bitcast=True)
    else:
        return w.to(tl.float32, bitcast=True)


def canonical_bits(x):
    # A GPU's own NaN has all low bits set, which the encoders do not allow.
    if x.dtype == tl.float64:
        return tl.where(x == x, bits(x), tl.full([], 0x7FF8000000000000, tl.uint64))
    else:
        return tl.where(x == x, bits(x), tl.full([], 0x7FC00000, tl.uint32))


def sign_bit_mask(w):
    return tl.full([], 1, w.dtype) << (w.dtype.primitive_bitwidth - 1)


def neg(x):
    # Triton's own minus is 0 - x, which loses the sign of a zero.
    return real(bits(x) ^ sign_bit_mask(bits(x)))


def abs(x):
    return real(bits(x) & (sign_bit_mask(bits(x)) - 1))


def product_error(a, b, p):
    return tl.fma(a, b, neg(p))


def rint(x):
    # The sum rounds to a whole number, which larger ones nearly are; the sign of what becomes zero stays.
    if x.dtype == tl.float64:
        least_without_fraction = tl.full([], 2251799813685248.0, tl.float64)
    else:
        least_without_fraction = tl.full([], 4194304.0, tl.float32)
    summand = least_without_fraction * 3.0
    whole = tl.where(tl.abs(x) < least_without_fraction, (x + summand) - summand, x)
    return real(bits(whole) | (bits(x) & sign_bit_mask(bits(x))))


def div(a, b):
    if a.dtype == tl.float64:
        return a / b  # correctly rounded, and div_rn takes float32 alone
    else:
        return tl.div_rn(a, b)


def sqrt(x):
    if x.dtype == tl.float64:
        return tl.sqrt(x)  # correctly rounded, and sqrt_rn takes float32 alone
    else:
        return tl.sqrt_rn(x)


def add_to_counter64(address, places, words, lanes):
    """Add words to counters: those of one place together, and then at once."""
    counters = address.to(tl.pointer_type(tl.int64))
    numbers = words.to(tl.int64, bitcast=True)
    left = tl.where(lanes & (numbers != 0), places.to(tl.int64), 0x7FFFFFFF)
    place = tl.min(left)
    while place < 0x7FFFFFFF:
        here = left == place
        tl.atomic_add(counters + place, tl.sum(tl.where(here, numbers, 0)), sem="relaxed")
        left = tl.where(here, 0x7FFFFFFF, left)
        place = tl.min(left)


def block_largest(words):
    """Return the largest word of each row of a tile."""
    tl.debug_barrier()  # every warp has read the old scales before one writes new ones
    return tl.max(words, axis=1, keep_dims=True)


def read(at, lanes):
    return tl.load(at, mask=lanes, other=0)


def read_in_loop(at, lanes):
    """`read` in a loop of one turn, which LLVM removes.

    For each access by pointers that an operation computes, Triton's coalescing walks from instruction to instruction
    through all that depends on each other: a minute for a thousand instructions and a hundred accesses. Pointers that
    a loop carries are not computed.
    """
    found = tl.zeros(at.shape, at.dtype.element_ty)
    turn = 0
    while turn < 1:
        found = tl.load(at, mask=lanes, other=0)
        at += 16  # which is a multiple of a vector
        turn += 1
    return found


def write(at, x, lanes):
    tl.store(at, x, mask=lanes)


def write_in_loop(at, x, lanes):
    turn = 0
    while turn < 1:
        tl.store(at, x, mask=lanes)
        at += 16
        turn += 1


def element_pointer(address, kind: tl.constexpr, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(kind))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def packed_byte_pointers(address, b, i, aligned: tl.constexpr):
    """Return where the bytes of blocks lie, each of two elements of i."""
    columns: tl.constexpr = i.shape[1] // 2
    return element_pointer(address, tl.uint8, aligned) + b[:, None] * columns + tl.arange(0, columns)[None, :]


def load4(address, b, i, lanes, aligned: tl.constexpr):
    byte = read(packed_byte_pointers(address, b, i, aligned), lanes).to(tl.uint32)
    return tl.interleave(byte & 15, byte >> 4)


def store4(address, b, i, w, lanes, aligned: tl.constexpr):
    low, high = tl.split(tl.reshape(w & 15, [i.shape[0], i.shape[1] // 2, 2]))
    write(packed_byte_pointers(address, b, i, aligned), (low | (high << 4)).to(tl.uint8), lanes)


def gather(table, index, last: tl.constexpr):
    # An index beyond the table, or NaN, reads its nearest end, or its first value.
    inside = tl.where(index > 0, index, 0.0)
    inside = tl.where(inside < last, inside, last * 1.0)
    return read(table + inside.to(tl.int32), tl.full(index.shape, True, tl.int1)).to(index.dtype)


def round_to_type(x, kind: tl.constexpr):
    """Return a real rounded to a type in memory, to nearest; of 16 bits by way of float32, in which it is exact."""
    if kind == tl.bfloat16:
        # By words, as Triton's interpreter converts subnormal numbers to others.
        w = bits(x.to(tl.float32))
        nearest = (w + tl.full([], 0x7FFF, tl.uint32) + ((w >> 16) & 1)) >> 16
        nearest = tl.where(x == x, nearest, tl.full([], 0x7FC0, tl.uint32))
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif kind == tl.float16:
        return x.to(tl.float32).to(tl.float16)
    else:
        return x.to(kind)
