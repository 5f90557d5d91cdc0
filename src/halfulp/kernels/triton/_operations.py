"""Operations on Triton blocks that take more than an expression: plain functions whose text goes into modules.

`lanes` is the mask of the elements that exist, and `aligned` says that addresses and indices are multiples of 16. Words
are uint32 blocks and reals float32 blocks. Functions with a name in `WIDTHLESS_FUNCTIONS` are written for blocks of 64
bits too, under names that end in 64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # triton.language in a generated module


WIDTHLESS_FUNCTIONS = ("word", "real", "negative", "absolute", "product_error", "rint")
# Constants of the functions below as they are for reals of 32 and of 64 bits.
NAN, SIGN, MAGNITUDE = (0x7FC00000, 0x7FF8 << 48), (1 << 31, 1 << 63), ((1 << 31) - 1, (1 << 63) - 1)
ROUNDING_SUMMAND, LEAST_WITHOUT_FRACTION = (1.5 * 2.0**23, 1.5 * 2.0**52), (2.0**22, 2.0**51)


def word(x):
    # A GPU's own NaN has all low bits set, which the encoders do not allow.
    return tl.where(x == x, x.to(tl.uint32, bitcast=True), tl.full([], NAN, tl.uint32))


def real(w):
    return w.to(tl.float32, bitcast=True)


def negative(x):
    # Triton's own minus is 0 - x, which loses the sign of a zero.
    return real(x.to(tl.uint32, bitcast=True) ^ tl.full([], SIGN, tl.uint32))


def absolute(x):
    return real(x.to(tl.uint32, bitcast=True) & tl.full([], MAGNITUDE, tl.uint32))


def product_error(a, b, p):
    return tl.fma(a, b, negative(p))


def rint(x):
    # The sum rounds to a whole number, which larger ones nearly are; the sign of what becomes zero stays.
    summand = tl.full([], ROUNDING_SUMMAND, tl.float32)
    whole = tl.where(tl.abs(x) < tl.full([], LEAST_WITHOUT_FRACTION, tl.float32), (x + summand) - summand, x)
    sign = x.to(tl.uint32, bitcast=True) & tl.full([], SIGN, tl.uint32)
    return real(whole.to(tl.uint32, bitcast=True) | sign)


def divide64(a, b):
    return a / b  # of float64 correctly rounded, and div_rn takes float32 alone


def deposit64(address, places, words, lanes):
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


def elements(address, kind: tl.constexpr, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(kind))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def halves(address, b, i, aligned: tl.constexpr):
    """Return where the bytes of blocks lie, each of two elements of i."""
    columns: tl.constexpr = i.shape[1] // 2
    return elements(address, tl.uint8, aligned) + b[:, None] * columns + tl.arange(0, columns)[None, :]


def load4(address, b, i, lanes, aligned: tl.constexpr):
    byte = read(halves(address, b, i, aligned), lanes).to(tl.uint32)
    return tl.interleave(byte & 15, byte >> 4)


def store4(address, b, i, w, lanes, aligned: tl.constexpr):
    low, high = tl.split(tl.reshape(w & 15, [i.shape[0], i.shape[1] // 2, 2]))
    write(halves(address, b, i, aligned), (low | (high << 4)).to(tl.uint8), lanes)


def gather(table, index, last: tl.constexpr):
    # An index beyond the table, or NaN, reads its nearest end, or its first value.
    inside = tl.where(index > 0, index, 0.0)
    inside = tl.where(inside < last, inside, last * 1.0)
    return read(table + inside.to(tl.int32), tl.full(index.shape, True, tl.int1)).to(index.dtype)


def to_bfloat16(x):
    # By words, as Triton's interpreter converts subnormal numbers to others.
    w = x.to(tl.uint32, bitcast=True)
    nearest = (w + tl.full([], 0x7FFF, tl.uint32) + ((w >> 16) & 1)) >> 16
    nearest = tl.where(x == x, nearest, tl.full([], 0x7FC0, tl.uint32))
    return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
