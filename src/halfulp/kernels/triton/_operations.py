"""Operations of the kernel language on Triton blocks: plain functions whose text goes into generated modules.

`lanes` is the mask of the elements that exist, and `aligned` says that addresses and indices are multiples of 16. Words
are uint32 blocks and reals float32 blocks; names that end in 64 are of uint64 and float64 blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # triton.language in a generated module


def low_word(index):
    return index.to(tl.uint32)


def high_word(index):
    return (index >> 32).to(tl.uint32)


def word(x):
    # A GPU's own NaN has all low bits set, which the encoders do not allow.
    return tl.where(x == x, x.to(tl.uint32, bitcast=True), tl.full([], 0x7FC00000, tl.uint32))


def word64(x):
    return tl.where(x == x, x.to(tl.uint64, bitcast=True), tl.full([], 0x7FF8000000000000, tl.uint64))


def real(w):
    return w.to(tl.float32, bitcast=True)


def real64(w):
    return w.to(tl.float64, bitcast=True)


def widen(w):
    return w.to(tl.uint64)


def to_real(w):
    return w.to(tl.int32, bitcast=True).to(tl.float32)


def to_word(x):
    return x.to(tl.int32).to(tl.uint32, bitcast=True)


def to_word64(x):
    return x.to(tl.int32).to(tl.uint32, bitcast=True).to(tl.uint64)


def divide(a, b):
    return tl.div_rn(a, b)


def divide64(a, b):
    return a / b  # of float64 correctly rounded, and div_rn takes float32 alone


def sqrt(a):
    return tl.sqrt_rn(a)


def sqrt64(a):
    return tl.sqrt(a)  # of float64 correctly rounded


def negative(x):
    # Triton's own minus is 0 - x, which loses the sign of a zero.
    return (x.to(tl.uint32, bitcast=True) ^ tl.full([], 0x80000000, tl.uint32)).to(tl.float32, bitcast=True)


def negative64(x):
    return (x.to(tl.uint64, bitcast=True) ^ tl.full([], 0x8000000000000000, tl.uint64)).to(tl.float64, bitcast=True)


def absolute(x):
    return (x.to(tl.uint32, bitcast=True) & tl.full([], 0x7FFFFFFF, tl.uint32)).to(tl.float32, bitcast=True)


def absolute64(x):
    return (x.to(tl.uint64, bitcast=True) & tl.full([], 0x7FFFFFFFFFFFFFFF, tl.uint64)).to(tl.float64, bitcast=True)


def double(x):
    return x.to(tl.float64)


def shift_signed(w, n):
    return (w.to(tl.int64, bitcast=True) >> n.to(tl.int64)).to(tl.uint64, bitcast=True)


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
    """The largest word of each row of a tile."""
    tl.debug_barrier()  # every warp has read the old scales before one writes new ones
    return tl.max(words, axis=1, keep_dims=True)


def load8(address, i, lanes, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint8))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + i, mask=lanes, other=0).to(tl.uint32)


def load16(address, i, lanes, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint16))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + i, mask=lanes, other=0).to(tl.uint32)


def load32(address, i, lanes, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint32))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + i, mask=lanes, other=0)


def load64(address, i, lanes, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint64))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + i, mask=lanes, other=0)


def load8_of_block(address, b):
    return tl.load(address.to(tl.pointer_type(tl.uint8)) + b).to(tl.uint32)[:, None]


def load16_of_block(address, b):
    return tl.load(address.to(tl.pointer_type(tl.uint16)) + b).to(tl.uint32)[:, None]


def load32_of_block(address, b):
    return tl.load(address.to(tl.pointer_type(tl.uint32)) + b)[:, None]


def store8(address, i, w, lanes, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint8))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(pointer + i, w.to(tl.uint8), mask=lanes)


def store16(address, i, w, lanes, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint16))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(pointer + i, w.to(tl.uint16), mask=lanes)


def store32(address, i, w, lanes, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint32))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(pointer + i, w, mask=lanes)


def store64(address, i, w, lanes, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint64))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(pointer + i, w, mask=lanes)
