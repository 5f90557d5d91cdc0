"""The accumulator of an exact sum in machine code: adding terms, passing carries on, rounding once."""

from __future__ import annotations

from typing import Any

from ...kernels import Code, Memory, Number, Variable, choose, larger, lesser
from ._accumulator import LIMB, LIMBS, LOW, MINUS, NEGATIVE_ZEROS, PLUS, TERMS, UNIT, WORDS

# Words of a setup: what is added up, then how a result is laid out.
A, B, A_STEP, B_STEP, COLUMNS, PER_ROW, SIZE, BLOCKS, SHARE = range(9)
ITEMS, PER_ITEM, ITEMS_PER_ROW, ITEM_SHARE, ROUNDED = range(9, 14)
WIDTH, MANTISSA, FIELDS, LEAST, SMALLEST = range(14, 19)
OUT_WIDTH, OUT_MANTISSA, OUT_FIELDS, OUT_LOWEST, SETUP = range(19, 24)
RECORD = 19  # words of a block's record: how many summands, a free one, how many terms are -0, the summands
ONE_BY_ONE = -1  # in place of how many summands: the elements themselves must be added
_HALF = 26
_HEAD = 62


def sum_items(code: Code, first, last, setup, records, words, out) -> None:
    """For the shares [first, last) of items: records and elements -> a rounded value in `out`, or `words`.

    The others are addresses: int64 (SETUP,), (blocks, RECORD), (shares or items, WORDS) of zeros, and (items,).
    """
    asked, results = code.memory(setup, code.i64), code.memory(out, code.i64)
    with code.span(first, last) as share:
        stop = lesser((share + 1) * asked[ITEM_SHARE], asked[ITEMS])
        with code.span(share * asked[ITEM_SHARE], stop) as item:
            rounding = asked[ROUNDED] != 0
            sum_ = _Sum(code, words, choose(rounding, share, item))
            sum_.gather(asked, code.memory(records, code.i64, RECORD), item)
            end, sign = sum_.settle(sum_.low, sum_.high)
            with code.either(rounding) as (rounded, kept):
                with rounded:
                    results[item] = sum_.rounded(sum_.low, end, sign, asked)
                    with code.span(sum_.low, end) as i:
                        sum_.words[i] = 0
                    with code.span(PLUS, TERMS + 1) as i:
                        sum_.words[i] = 0
                with kept, code.when((sign < 0) & (end < LIMBS)):
                    with code.span(end, LIMBS - 1) as i:
                        sum_.words[i] = LOW
                    sum_.words[LIMBS - 1] = -1


def round_items(code: Code, first, last, setup, words, out) -> None:
    """For the shares [first, last) of accumulators, each any sum of others: carries passed on; rounded, if asked for.

    What is rounded is used up.
    """
    asked, results = code.memory(setup, code.i64), code.memory(out, code.i64)
    with code.span(first, last) as share:
        stop = lesser((share + 1) * asked[ITEM_SHARE], asked[ITEMS])
        with code.span(share * asked[ITEM_SHARE], stop) as item:
            sum_ = _Sum(code, words, item)
            end, sign = sum_.settle(code.number(0), code.number(LIMBS - 1))
            with code.when(asked[ROUNDED] != 0):
                results[item] = sum_.rounded(code.number(0), end, sign, asked)


class _Sum:
    """The code that works on one accumulator.

    Attributes:
        words: its words.
        low, high: the first and the last limb that were touched.
    """

    def __init__(self, code: Code, words: Number, slot: Number) -> None:
        self.code = code
        self.words: Memory = code.memory(words + 8 * WORDS * slot, code.i64)
        self.low: Variable = code.variable(LIMBS)
        self.high: Variable = code.variable(-1)

    def gather(self, setup: Memory, records: Memory, item: Number) -> None:
        """Add an item's blocks to an accumulator of zeros."""
        code, words = self.code, self.words
        row = item // setup[ITEMS_PER_ROW]
        begin = (item - row * setup[ITEMS_PER_ROW]) * setup[PER_ITEM]
        end = lesser(begin + setup[PER_ITEM], setup[PER_ROW])
        size = setup[SIZE]
        with code.span(begin, end) as block:
            record = row * setup[PER_ROW] + block
            count = records[record, 0]
            with code.either(count == ONE_BY_ONE) as (singly, together):
                with singly, code.span(block * size, lesser((block + 1) * size, setup[COLUMNS])) as i:
                    self.add_term(setup, row, i)
                with together:
                    words[NEGATIVE_ZEROS] += records[record, 2]
                    with code.span(0, count) as k:
                        self.add_real(records[record, 3 + k])
        words[TERMS] += lesser(end * size, setup[COLUMNS]) - begin * size

    def add_term(self, setup: Memory, row: Number, i: Number) -> None:
        """Add one element, or the exact product of two, to the accumulator."""
        code, words = self.code, self.words
        layout = setup[WIDTH], setup[MANTISSA], setup[FIELDS], setup[LEAST]
        number = [code.variable(x) for x in _number(code, setup[A] + row * setup[A_STEP], i, layout)]
        negative, m, exponent, kind = number
        n, zero = code.variable(1), code.variable(m == 0)
        with code.when(setup[B] != 0):
            negative_b, n_b, exponent_b, kind_b = _number(code, setup[B] + row * setup[B_STEP], i, layout)
            n.set(n_b)
            zero.set((m == 0) | (n == 0))
            negative.set(negative ^ negative_b)
            exponent.set(exponent + exponent_b)
            kind.set(choose(zero & (kind + kind_b > 0), 2, larger(kind, kind_b)))
        with code.either(kind > 0) as (special, finite):
            with special:
                words[PLUS] += ((kind == 2) | (negative == 0)).to(code.i64)
                words[MINUS] += ((kind == 2) | (negative == 1)).to(code.i64)
            with finite, code.either(zero) as (nothing, something):
                with nothing:
                    words[NEGATIVE_ZEROS] += negative
                with something:
                    self.add_product(m, n, exponent, negative, (setup[MANTISSA] < 24) | (n == 1))

    def add_product(self, m: Number, n: Number, exponent: Number, negative: Number, short: Number) -> None:
        """Add m * n * 2^exponent, as one integer where it is short, else as three."""
        code = self.code
        with code.either(short) as (at_once, in_parts):
            with at_once:
                self.add_integer(m * n, exponent, negative)
            with in_parts:
                mask = (1 << _HALF) - 1
                high_m, low_m, high_n, low_n = m >> _HALF, m & mask, n >> _HALF, n & mask
                middle = high_m * low_n + low_m * high_n
                self.add_integer(low_m * low_n, exponent, negative)
                self.add_integer(middle, exponent + _HALF, negative)
                self.add_integer(high_m * high_n, exponent + 2 * _HALF, negative)

    def add_real(self, word: Number) -> None:
        """Add a finite float64 given by its bits."""
        field = (word >> 52) & 2047
        mantissa = (word & ((1 << 52) - 1)) | ((field > 0).to(self.code.i64) << 52)
        with self.code.when(mantissa != 0):
            self.add_integer(mantissa, larger(field, 1) - 1075, (word >> 63) & 1)

    def add_integer(self, value: Number, exponent: Number, negative: Number) -> None:
        """Add +-value * 2^exponent, value < 2^55, to three neighbouring limbs."""
        words, place = self.words, exponent - UNIT
        limb, shift = place >> 5, place & 31
        rest = value >> (LIMB - shift)
        words[limb] += (((value << shift) & LOW) ^ -negative) + negative
        words[limb + 1] += ((rest & LOW) ^ -negative) + negative
        words[limb + 2] += ((rest >> LIMB) ^ -negative) + negative
        self.low.set(lesser(self.low, limb))
        self.high.set(larger(self.high, limb + 2))

    def settle(self, low: Number, high: Number) -> tuple[Number, Number]:
        """Pass carries on: limbs lie in [0, 2^32); return where that ends, and -1 if the limbs from there on owe 1."""
        end = lesser(high + 3, LIMBS)
        return end, self._carry(low, end, lambda value, carry: value + carry)

    def negate(self, low: Number, end: Number) -> None:
        """Change the sign of an accumulator whose carries were passed on and that is negative."""
        self._carry(low, end, lambda value, carry: carry - value)

    def _carry(self, low: Number, end: Number, make: Any) -> Number:
        """Make every limb anew of what it was and the carry, and pass on what does not fit."""
        carry = self.code.variable(0)
        with self.code.span(low, end) as i:
            value, last = make(self.words[i], carry), i == LIMBS - 1
            self.words[i] = choose(last, value, value & LOW)
            carry.set(choose(last, value >> 63, value >> LIMB))
        return carry

    def rounded(self, low: Number, end: Number, sign: Number, setup: Memory) -> Number:
        """Return the bits of the float nearest to a settled accumulator, ties to even."""
        code, words = self.code, self.words
        infinity = setup[OUT_FIELDS] << setup[OUT_MANTISSA]
        minus_sign = 1 << (setup[OUT_WIDTH] - 1)
        plus, minus = words[PLUS] != 0, words[MINUS] != 0
        signed = choose(plus, infinity, infinity | minus_sign)
        bits = code.variable(choose(plus & minus, infinity | (1 << (setup[OUT_MANTISSA] - 1)), signed))
        with code.when(~(plus | minus)):
            with code.when(sign < 0):
                self.negate(low, end)
            top = code.variable(end - 1)
            with code.repeat(lambda: (top >= low) & (words[larger(top, 0)] == 0)):
                top += -1
            with code.either(top < low) as (zero, value):
                with zero:
                    all_negative = (words[TERMS] > 0) & (words[TERMS] == words[NEGATIVE_ZEROS])
                    bits.set(choose(all_negative, minus_sign, 0))
                with value:
                    bits.set(self.nearest(low, top, setup) | choose(sign < 0, minus_sign, 0))
        return bits

    def nearest(self, low: Number, top: Number, setup: Memory) -> Number:
        """Return the bits of the float nearest to a positive value."""
        code, words = self.code, self.words
        first = words[top]
        second = choose(top > low, words[larger(top - 1, 0)], 0)
        third = choose(top - 1 > low, words[larger(top - 2, 0)], 0)
        length = (first.to(code.f64).bits() >> 52) - 1022
        spread = second << (_HEAD - LIMB)
        head = (first << (_HEAD - length)) + (spread >> length) + (third >> (length + 2))
        lost = code.variable((spread & ((1 << length) - 1)) | (third & ((1 << (length + 2)) - 1)))
        i = code.variable(top - 3)
        with code.repeat(lambda: (lost == 0) & (i >= low)):
            lost.set(words[i])
            i += -1
        # Below 62 bits it matters only whether there is anything.
        head = head | (lost != 0).to(code.i64)
        exponent = top * LIMB + (UNIT - 1) + length
        precision = setup[OUT_MANTISSA] + 1
        drop = _HEAD - precision + lesser(larger(setup[OUT_LOWEST] - exponent, 0), precision + 1)
        kept, rest, half = head >> drop, head & ((1 << drop) - 1), 1 << (drop - 1)
        kept = kept + ((rest > half) | ((rest == half) & (kept & 1 == 1))).to(code.i64)
        # A mantissa's leading bit, or one that a carry made, adds 1 to the exponent field.
        field = larger(exponent - setup[OUT_LOWEST], 0)
        infinity = setup[OUT_FIELDS] << setup[OUT_MANTISSA]
        return choose(field > setup[OUT_FIELDS] - 2, infinity, kept + (field << setup[OUT_MANTISSA]))


def _number(code: Code, address: Number, i: Number, layout: tuple[Number, ...]) -> tuple[Number, ...]:
    """Sign, mantissa, exponent and kind (0 finite, 1 infinite, 2 NaN) of an element: +-mantissa * 2^exponent.

    An infinity's mantissa is not 0, so that a zero factor beside it can be told.
    """
    width, mantissa, fields, least = layout
    word = code.variable(0)
    for bits, kind in ((16, code.i16), (32, code.i32), (64, code.i64)):
        with code.when(width == bits):
            word.set(code.memory(address, kind)[i].to(code.i64))
    field = (word >> mantissa) & fields
    fraction = word & ((1 << mantissa) - 1)
    special = field == fields
    kind = special.to(code.i64) + (special & (fraction != 0)).to(code.i64)
    implicit = (field > 0).to(code.i64) << mantissa
    return (word >> (width - 1)) & 1, fraction | implicit, larger(field, 1) - 1 + least, kind
