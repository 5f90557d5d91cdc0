"""Triton kernels of exact sums: plain functions whose text goes into a generated module.

Elements and limbs are int64; names in capitals become their numbers. Terms are added up in windows of 48 bits, of which
a tile's sum fits an int64, so that no order of programs, tiles or lanes shows in the accumulator.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ...kernels.triton._writer import module_of
from ._accumulator import LIMB, LIMBS, LOW, MINUS, NEGATIVE_ZEROS, PLUS, TERMS, UNIT, WORDS

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # triton.language in the generated module

WINDOW = 48
VECTOR = 16  # elements: where rows begin and end at multiples of it, a lane loads several at a time
LANES = 256  # of an accumulator's words, a power of two
HALF = 26  # bits of the lower half of a float64's mantissa
HEAD = 62  # bits of the leading part that is rounded


def number(pointer, i, lanes, mantissa: tl.constexpr, fields: tl.constexpr, least: tl.constexpr):
    """Sign, mantissa, place above the lowest limb, whether infinite, whether NaN, of elements given by their words."""
    word = tl.load(pointer + i, mask=lanes, other=0).to(tl.int64)
    field = ((word >> mantissa) & fields).to(tl.int32)
    fraction = word & ((1 << mantissa) - 1)
    whole = tl.where(field > 0, fraction | (1 << mantissa), fraction)
    special = field == fields
    return word < 0, whole, tl.maximum(field, 1) + (least - 1), special & (fraction == 0), special & (fraction != 0)


def deposit(to, whole, place, negative):
    """Add the sum of +-whole * 2^(place + UNIT), whole < 2^55, to an accumulator."""
    used = whole != 0
    base = tl.min(tl.where(used, place, 0x7FFFFFF), axis=0)
    end = tl.max(tl.where(used, place, -1), axis=0) + 55
    while base < end:
        shift = place - base
        bits = (whole << tl.minimum(tl.maximum(shift, 0), WINDOW - 1)) >> tl.minimum(tl.maximum(0 - shift, 0), 63)
        bits = tl.where(shift < WINDOW, bits & ((1 << WINDOW) - 1), 0)
        total = tl.sum(tl.where(negative, 0 - bits, bits), axis=0)
        if total != 0:
            size = tl.where(total < 0, 0 - total, total)
            rest = size >> (LIMB - (base % LIMB))
            low, middle, high = (size << (base % LIMB)) & LOW, rest & LOW, rest >> LIMB
            limb = to + base // LIMB
            tl.atomic_add(limb, tl.where(total < 0, 0 - low, low), sem="relaxed")
            tl.atomic_add(limb + 1, tl.where(total < 0, 0 - middle, middle), sem="relaxed")
            tl.atomic_add(limb + 2, tl.where(total < 0, 0 - high, high), sem="relaxed")
        base += WINDOW


def accumulate(
    a,
    b,
    words,
    columns: tl.int64,
    step_a: tl.int64,
    step_b: tl.int64,
    tiles: tl.int64,
    copies: tl.int64,
    mantissa: tl.constexpr,
    fields: tl.constexpr,
    least: tl.constexpr,
    product: tl.constexpr,
    aligned: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add one tile of a row, or of the products of two rows, to one of the row's accumulators."""
    if aligned:
        # Of an argument itself tl.multiple_of says nothing.
        columns = columns // VECTOR * VECTOR
        step_a, step_b = step_a // VECTOR * VECTOR, step_b // VECTOR * VECTOR
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    tile = program - row * tiles
    i = tile * TILE + tl.arange(0, TILE)
    lanes = i < columns
    to = words + (row * copies + tile % copies) * WORDS
    negative, whole, place, infinite, nan = number(a + row * step_a, i, lanes, mantissa, fields, least)
    zero = whole == 0
    if product:
        negative_b, whole_b, place_b, infinite_b, nan_b = number(b + row * step_b, i, lanes, mantissa, fields, least)
        zero_b = whole_b == 0
        nan = nan | nan_b | (infinite & zero_b) | (zero & infinite_b)
        infinite = (infinite | infinite_b) & (nan == 0)
        zero = zero | zero_b
        negative = negative != negative_b
        place = place + place_b
    finite = (nan | infinite) == 0
    whole = tl.where(finite, whole, 0)
    plus = (nan | (infinite & (negative == 0))).to(tl.int64)
    minus = (nan | (infinite & negative)).to(tl.int64)
    zeros = (zero & finite & negative).to(tl.int64)
    counts = tl.sum(plus + (minus << 20) + (zeros << 40), axis=0)
    if counts != 0:
        tl.atomic_add(to + PLUS, counts & 0xFFFFF, sem="relaxed")
        tl.atomic_add(to + MINUS, (counts >> 20) & 0xFFFFF, sem="relaxed")
        tl.atomic_add(to + NEGATIVE_ZEROS, counts >> 40, sem="relaxed")
    place = place - UNIT
    if product:
        if mantissa > 23:
            high_a, low_a = whole >> HALF, whole & ((1 << HALF) - 1)
            high_b, low_b = whole_b >> HALF, whole_b & ((1 << HALF) - 1)
            deposit(to, low_a * low_b, place, negative)
            deposit(to, high_a * low_b + low_a * high_b, place + HALF, negative)
            deposit(to, high_a * high_b, place + 2 * HALF, negative)
        else:
            deposit(to, whole * whole_b, place, negative)
    else:
        deposit(to, whole, place, negative)


def before(x, lane):
    """The value of the lane before; 0 for the first."""
    return tl.where(lane > 0, tl.gather(x, tl.maximum(lane - 1, 0), 0), 0)


def chained(first, second):
    """Two functions from a carry into one limb to that out of the next, as one; see `carried`."""
    lowest = (second >> (2 * (first & 3))) & 3
    middle = (second >> (2 * ((first >> 2) & 3))) & 3
    highest = (second >> (2 * ((first >> 4) & 3))) & 3
    return lowest | (middle << 2) | (highest << 4)


def carried(limbs, lane):
    """Pass carries on until every limb but the last is in [0, 2^32)."""
    inner = lane < LIMBS - 1
    for _ in tl.static_range(2):
        limbs = tl.where(inner, limbs & LOW, limbs) + before(tl.where(inner, limbs >> LIMB, 0), lane)
    # Now every limb but the last lies in [-1, 2^32]. A carry of -1, 0 or 1 into one gives one of these out of it, which
    # is a function of three values, two bits each.
    out = ((limbs - 1) >> LIMB) + 1 + ((((limbs >> LIMB) + 1) << 2) + ((((limbs + 1) >> LIMB) + 1) << 4))
    out = tl.associative_scan(tl.where(inner, out, 0x24).to(tl.int32), 0, chained)
    limbs = limbs + before(((out >> 2) & 3) - 1, lane)
    return tl.where(inner, limbs & LOW, tl.where(lane < LIMBS, limbs, 0))


def at(values, lane, place):
    """The value of one lane; 0 where there is none such."""
    return tl.sum(tl.where(lane == place, values, 0), axis=0)


def nearest(digits, lane, mantissa: tl.constexpr, fields: tl.constexpr, lowest: tl.constexpr):
    """The bits of the float nearest to settled limbs that are not negative, and whether they are all 0."""
    top = tl.max(tl.where(digits != 0, lane, -1), axis=0)
    zero = top < 0
    first = tl.where(zero, 1, at(digits, lane, top))
    second, third = at(digits, lane, top - 1), at(digits, lane, top - 2)
    lower = tl.max(tl.where(lane < top - 2, digits, 0), axis=0)
    length = (first.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022
    one = tl.full([], 1, tl.int64)
    spread = second << (HEAD - LIMB)
    lost = (spread & ((one << length) - 1)) | (third & ((one << (length + 2)) - 1)) | lower
    # Below 62 bits it matters only whether there is anything.
    head = (first << (HEAD - length)) + (spread >> length) + (third >> (length + 2))
    head = head | (lost != 0).to(tl.int64)
    exponent = top * LIMB + UNIT + length - 1
    drop = HEAD - (mantissa + 1) + tl.minimum(tl.maximum(lowest - exponent, 0), mantissa + 2)
    kept, rest, half = head >> drop, head & ((one << drop) - 1), one << (drop - 1)
    kept += ((rest > half) | ((rest == half) & ((kept & 1) == 1))).to(tl.int64)
    # A mantissa's leading bit, or one that a carry made, adds 1 to the exponent field.
    field = tl.maximum(exponent - lowest, 0)
    bits = tl.where(field > fields - 2, fields << mantissa, kept + (tl.minimum(field, fields - 2) << mantissa))
    return tl.where(zero, 0, bits), zero


def settle(
    words,
    out,
    terms: tl.int64,
    width: tl.constexpr,
    mantissa: tl.constexpr,
    fields: tl.constexpr,
    lowest: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Add up a row's accumulators and write their sum, carries passed on; or, of a width in bits, the nearest float."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    copy = tl.arange(0, COPIES)[:, None]
    held = tl.load(words + (row * COPIES + copy) * WORDS + lane[None, :], mask=lane[None, :] < WORDS, other=0)
    total = tl.sum(held, axis=0)
    total = tl.where(lane == TERMS, total + terms, total)
    digits = carried(tl.where(lane < LIMBS, total, 0), lane)
    if width == 0:
        tl.store(out + row * WORDS + lane, tl.where(lane < LIMBS, digits, total), mask=lane < WORDS)
    else:
        negative = at(digits, lane, LIMBS - 1) < 0
        bits, zero = nearest(carried(tl.where(negative, 0 - digits, digits), lane), lane, mantissa, fields, lowest)
        plus, minus = at(total, lane, PLUS) != 0, at(total, lane, MINUS) != 0
        counted, zeros = at(total, lane, TERMS), at(total, lane, NEGATIVE_ZEROS)
        negative = tl.where(zero, (counted > 0) & (counted == zeros), negative)
        infinity = tl.full([], fields << mantissa, tl.int64)
        bits = tl.where(plus | minus, infinity, bits)
        negative = tl.where(plus | minus, minus, negative)
        bits = bits | (negative.to(tl.int64) << (width - 1))
        bits = tl.where(plus & minus, infinity | (1 << (mantissa - 1)), bits)
        if width == 16:
            tl.store(out + row, bits.to(tl.int16))
        elif width == 32:
            tl.store(out + row, bits.to(tl.int32))
        else:
            tl.store(out + row, bits)


@functools.cache
def module_text() -> str:
    """Return the source of a Triton module with the kernels `accumulate` and `settle`."""
    constants = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int)}
    functions = [number, deposit, before, chained, carried, at, nearest]
    kernels = {accumulate: ("columns", "step_a", "step_b", "tiles", "copies"), settle: ("terms",)}
    return module_of(functions, kernels, constants)
