"""The accumulator of an exact sum in machine code: adding terms, passing carries on, rounding once."""

from __future__ import annotations

from numpy import float64, int64

from ...kernels.scalar._operations import load16, load32, load64, word64
from ._accumulator import LIMB, LIMBS, LOW, MINUS, NEGATIVE_ZEROS, PLUS, TERMS, UNIT

# Words of a setup: what is added up, then how a result is laid out.
A, B, A_STEP, B_STEP, COLUMNS, PER_ROW, SIZE, BLOCKS, SHARE = range(9)
ITEMS, PER_ITEM, ITEMS_PER_ROW, ITEM_SHARE, ROUNDED = range(9, 14)
WIDTH, MANTISSA, FIELDS, LEAST, SMALLEST = range(14, 19)
OUT_WIDTH, OUT_MANTISSA, OUT_FIELDS, OUT_LOWEST, SETUP = range(19, 24)
RECORD = 19  # words of a block's record: how many summands, a free one, how many terms are -0, the summands
ONE_BY_ONE = -1  # in place of how many summands: the elements themselves must be added
_HALF = 26
_HEAD = 62


def sum_items(first, last, setup, records, words, out):
    """For the shares [first, last) of items: records and elements -> a rounded value in `out`, or `words`."""
    for share in range(first, last):
        stop = min((share + 1) * setup[ITEM_SHARE], setup[ITEMS])
        for item in range(share * setup[ITEM_SHARE], stop):
            slot = share if setup[ROUNDED] else item
            low, high = gathered(setup, records, words, slot, item)
            end, sign = settled(words, slot, low, high)
            if setup[ROUNDED]:
                out[item] = rounded(words, slot, low, end, sign, setup)
                for i in range(low, end):
                    words[slot, i] = 0
                for i in range(PLUS, TERMS + 1):
                    words[slot, i] = 0
            elif sign < 0 and end < LIMBS:
                for i in range(end, LIMBS - 1):
                    words[slot, i] = LOW
                words[slot, LIMBS - 1] = -1


def round_items(first, last, setup, words, out):
    """For the shares [first, last) of accumulators, each any sum of others: carries passed on; rounded, if asked for.

    What is rounded is used up.
    """
    for share in range(first, last):
        stop = min((share + 1) * setup[ITEM_SHARE], setup[ITEMS])
        for item in range(share * setup[ITEM_SHARE], stop):
            end, sign = settled(words, item, 0, LIMBS - 1)
            if setup[ROUNDED]:
                out[item] = rounded(words, item, 0, end, sign, setup)


def gathered(setup, records, words, slot, item):
    """Add an item's blocks to an accumulator of zeros; the first and the last limb that were touched."""
    row = item // setup[ITEMS_PER_ROW]
    begin = (item - row * setup[ITEMS_PER_ROW]) * setup[PER_ITEM]
    end = min(begin + setup[PER_ITEM], setup[PER_ROW])
    size = setup[SIZE]
    low, high = LIMBS, -1
    for block in range(begin, end):
        record = row * setup[PER_ROW] + block
        count = records[record, 0]
        if count == ONE_BY_ONE:
            for i in range(block * size, min((block + 1) * size, setup[COLUMNS])):
                low, high = with_term(setup, words, slot, row, i, low, high)
        else:
            words[slot, NEGATIVE_ZEROS] += records[record, 2]
            for k in range(count):
                low, high = with_real(words, slot, records[record, 3 + k], low, high)
    words[slot, TERMS] += min(end * size, setup[COLUMNS]) - begin * size
    return low, high


def with_term(setup, words, slot, row, i, low, high):
    """Add one element, or the exact product of two, to the accumulator."""
    layout = setup[WIDTH], setup[MANTISSA], setup[FIELDS], setup[LEAST]
    negative, m, exponent, kind = number(setup[A] + row * setup[A_STEP], i, layout)
    if setup[B] == 0:
        n, zero = 1, m == 0
    else:
        negative_b, n, exponent_b, kind_b = number(setup[B] + row * setup[B_STEP], i, layout)
        zero = m == 0 or n == 0
        negative, exponent = negative ^ negative_b, exponent + exponent_b
        kind = 2 if zero and kind + kind_b > 0 else max(kind, kind_b)
    if kind > 0:
        words[slot, PLUS] += int64(kind == 2 or negative == 0)
        words[slot, MINUS] += int64(kind == 2 or negative == 1)
    elif zero:
        words[slot, NEGATIVE_ZEROS] += negative
    elif setup[MANTISSA] < 24 or n == 1:
        low, high = with_integer(words, slot, m * n, exponent, negative, low, high)
    else:
        mask = (1 << _HALF) - 1
        high_m, low_m, high_n, low_n = m >> _HALF, m & mask, n >> _HALF, n & mask
        middle = high_m * low_n + low_m * high_n
        low, high = with_integer(words, slot, low_m * low_n, exponent, negative, low, high)
        low, high = with_integer(words, slot, middle, exponent + _HALF, negative, low, high)
        low, high = with_integer(words, slot, high_m * high_n, exponent + 2 * _HALF, negative, low, high)
    return low, high


def number(address, i, layout):
    """Sign, mantissa, exponent and kind (0 finite, 1 infinite, 2 NaN) of an element: +-mantissa * 2^exponent.

    An infinity's mantissa is not 0, so that a zero factor beside it can be told.
    """
    width, mantissa, fields, least = layout
    if width == 64:
        word = int64(load64(address, i))
    elif width == 32:
        word = int64(load32(address, i))
    else:
        word = int64(load16(address, i))
    field = (word >> mantissa) & fields
    fraction = word & ((1 << mantissa) - 1)
    kind = int64(field == fields) + int64(field == fields and fraction != 0)
    implicit = int64(field > 0) << mantissa
    return (word >> (width - 1)) & 1, fraction | implicit, max(field, 1) - 1 + least, kind


def with_real(words, slot, word, low, high):
    """Add a finite float64 given by its bits."""
    field = (word >> 52) & 2047
    mantissa = (word & ((1 << 52) - 1)) | (int64(field > 0) << 52)
    if mantissa == 0:
        return low, high
    return with_integer(words, slot, mantissa, max(field, 1) - 1075, (word >> 63) & 1, low, high)


def with_integer(words, slot, value, exponent, negative, low, high):
    """Add +-value * 2^exponent, value < 2^55, to three neighbouring limbs."""
    place = exponent - UNIT
    limb, shift = place >> 5, place & 31
    rest = value >> (LIMB - shift)
    words[slot, limb] += (((value << shift) & LOW) ^ -negative) + negative
    words[slot, limb + 1] += ((rest & LOW) ^ -negative) + negative
    words[slot, limb + 2] += ((rest >> LIMB) ^ -negative) + negative
    return min(low, limb), max(high, limb + 2)


def settled(words, slot, low, high):
    """Pass carries on, so that limbs lie in [0, 2^32); where that ends, and -1 if the limbs from there on owe 1."""
    carry = 0
    end = min(high + 3, LIMBS)
    for i in range(low, end):
        value = words[slot, i] + carry
        if i == LIMBS - 1:
            words[slot, i] = value
            carry = value >> 63
        else:
            words[slot, i] = value & LOW
            carry = value >> LIMB
    return end, carry


def negated(words, slot, low, end):
    """Change the sign of an accumulator whose carries were passed on and that is negative."""
    carry = 0
    for i in range(low, end):
        value = carry - words[slot, i]
        words[slot, i] = value if i == LIMBS - 1 else value & LOW
        carry = value >> LIMB


def rounded(words, slot, low, end, sign, setup):
    """The bits of the float nearest to a settled accumulator, ties to even."""
    infinity = setup[OUT_FIELDS] << setup[OUT_MANTISSA]
    minus_sign = 1 << (setup[OUT_WIDTH] - 1)
    plus, minus = words[slot, PLUS], words[slot, MINUS]
    if plus != 0 and minus != 0:
        return infinity | (1 << (setup[OUT_MANTISSA] - 1))
    if plus != 0:
        return infinity
    if minus != 0:
        return infinity | minus_sign
    if sign < 0:
        negated(words, slot, low, end)
    top = end - 1
    while top >= low and words[slot, top] == 0:
        top -= 1
    if top < low:
        return minus_sign if 0 < words[slot, TERMS] == words[slot, NEGATIVE_ZEROS] else 0
    bits = nearest(words, slot, low, top, setup)
    return bits | (minus_sign if sign < 0 else 0)


def nearest(words, slot, low, top, setup):
    """The bits of the float nearest to a positive value."""
    first = words[slot, top]
    second = words[slot, top - 1] if top > low else 0
    third = words[slot, top - 2] if top - 1 > low else 0
    length = (int64(word64(float64(first))) >> 52) - 1022
    spread = second << (_HEAD - LIMB)
    head = (first << (_HEAD - length)) + (spread >> length) + (third >> (length + 2))
    lost = (spread & ((1 << length) - 1)) | (third & ((1 << (length + 2)) - 1))
    i = top - 3
    while lost == 0 and i >= low:
        lost = words[slot, i]
        i -= 1
    # Below 62 bits it matters only whether there is anything.
    head |= int64(lost != 0)
    exponent = top * LIMB + UNIT + length - 1
    precision = setup[OUT_MANTISSA] + 1
    drop = _HEAD - precision + min(max(setup[OUT_LOWEST] - exponent, 0), precision + 1)
    kept, rest, half = head >> drop, head & ((1 << drop) - 1), 1 << (drop - 1)
    kept += int64(rest > half or (rest == half and kept & 1 == 1))
    # A mantissa's leading bit, or one that a carry made, adds 1 to the exponent field.
    field = max(exponent - setup[OUT_LOWEST], 0)
    if field > setup[OUT_FIELDS] - 2:
        return setup[OUT_FIELDS] << setup[OUT_MANTISSA]
    return kept + (field << setup[OUT_MANTISSA])
