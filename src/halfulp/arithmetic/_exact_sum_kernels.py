"""The accumulator of an exact sum, integer words, and the device functions that fill it and round it.

A window holds 16 bits of the accumulator as an int64, so that many words are added before a carry must be passed on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import formats
from ..formats import Format
from ..kernels import _operations as o
from ..kernels import product_error, select
from ..kernels._device_function import ElementTraceBuilder, PointerTableFunction
from ..kernels._trace import block_largest
from ..rounding._device_functions import widen_float16

LIMB_BITS = 32  # bits of a limb; an int64 holds 2^31 of them added up before it could overflow
LIMB_MASK = (1 << LIMB_BITS) - 1
MIN_EXPONENT = -68 * LIMB_BITS  # exponent of limb 0: below 2^-2148, the smallest product of two float64
LIMB_COUNT = 134  # up to 2^2112: 2^63 products of the two largest float64
# Behind the limbs: how many terms are plus infinity, minus infinity (a NaN counts as both), -0, and how many there are.
WORD_COUNT = LIMB_COUNT + 4
# The formats of elements, and the integer types of their widths.
FORMAT_BY_ELEMENT_DTYPE = {
    dtype: formats.get(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
WORD_DTYPE_BY_BITS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
WINDOW_BITS = 16
_MOST_LIMBS_OPTIMIZED = 32  # those of float64 would take LLVM 5 to 30 s, and run up to a quarter faster
_LEADING_BITS = 62  # bits of the leading part that is rounded
_EXPONENT_OFFSET = 4096  # added to exponents, so that they are words
_LOADS_BY_BITS: dict[int, Any] = {16: o.load16, 32: o.load32, 64: o.load64}
_STORES_BY_BITS: dict[int, Any] = {16: o.store16, 32: o.store32, 64: o.store64}
_WORD_ONE, _WORD_ZERO = np.uint64(1), np.uint64(0)


def _get_all_ones_exponent_field(layout: Format) -> int:
    """Return the largest exponent field, that of infinities and NaNs."""
    return 2 * layout.bias + 1


def _find_least_exponent(dtype: torch.dtype, product: bool) -> int:
    """Return the exponent of the smallest subnormal number, or of its square."""
    return (1 + product) * (FORMAT_BY_ELEMENT_DTYPE[dtype].emin - FORMAT_BY_ELEMENT_DTYPE[dtype].mantissa_bits)


@dataclass(frozen=True)
class LimbRange:
    """The limbs that sums of some terms need."""

    first: int = 0  # the lowest, counted from the accumulator's
    limbs: int = LIMB_COUNT  # how many; the highest has the sign
    windows: bool = False  # whether there are two windows for each limb, rather than the limb itself

    @property
    def counter_count(self) -> int:
        """The number of words: limbs or windows, then those of infinite terms and of terms that are -0."""
        return 2 * self.limbs + 2 if self.windows else self.limbs + 3

    @property
    def lowest_exponent(self) -> int:
        """Exponent of the lowest bit."""
        return MIN_EXPONENT + LIMB_BITS * self.first

    @classmethod
    @functools.cache
    def for_terms(cls, dtype: torch.dtype, product: bool) -> LimbRange:
        """Return the limbs of terms of a dtype, or of their products, and the float64 parts of blocks of them."""
        least = _find_least_exponent(dtype, product)
        first = (min(least, max(least, -1074) - 53) - MIN_EXPONENT) // LIMB_BITS
        top = ((1 + product) * (FORMAT_BY_ELEMENT_DTYPE[dtype].bias + 1) + 64 - MIN_EXPONENT) // LIMB_BITS
        return cls(first, min(LIMB_COUNT, top + 1) - first, windows=True)


class _IntegerTerm(NamedTuple):
    """A term as +-integer * 2^(shift + least exponent), of a 64-bit word and one of 32 bits, or no number."""

    negative: Any
    integer: Any
    shift: Any
    infinite: Any
    nan: Any


def _load_term(layout: Format, array: Any, index: Any) -> _IntegerTerm:
    word = _LOADS_BY_BITS[layout.bits](array, index)
    top = o.high_word(word) if layout.bits == 64 else word
    width = min(layout.bits, 32)
    field = o.bit_and(o.shr(top, width - 1 - layout.exponent_bits), _get_all_ones_exponent_field(layout))
    normal = field != 0
    wide = word if layout.bits == 64 else o.widen(word)
    fraction = o.bit_and(wide, (1 << layout.mantissa_bits) - 1)
    return _IntegerTerm(
        negative=top >= 1 << (width - 1),
        integer=o.bit_or(fraction, select(normal, np.uint64(1 << layout.mantissa_bits), _WORD_ZERO)),
        shift=o.sub(field, select(normal, np.uint32(1), np.uint32(0))),
        infinite=(field == _get_all_ones_exponent_field(layout)) & (fraction == 0),
        nan=(field == _get_all_ones_exponent_field(layout)) & (fraction != 0),
    )


def _multiply_terms(layout: Format, a: _IntegerTerm, b: _IntegerTerm) -> tuple[_IntegerTerm, list[tuple[Any, int]]]:
    """Return the product, and parts of its integer of at most 29 bits with their places above its own."""
    zero = (a.integer == 0) | (b.integer == 0)
    nan = a.nan | b.nan | ((a.infinite | b.infinite) & zero)
    product = _IntegerTerm(
        negative=(a.negative & ~b.negative) | (b.negative & ~a.negative),
        integer=select(zero, _WORD_ZERO, _WORD_ONE),
        shift=o.add(a.shift, b.shift),
        infinite=(a.infinite | b.infinite) & ~nan,
        nan=nan,
    )
    if layout.bits < 64:
        return product, _split_integer(o.mul(a.integer, b.integer), 24, 1 if layout.bits == 16 else 2)
    low = (1 << 26) - 1
    (high_a, low_a), (high_b, low_b) = ((o.shr(x.integer, 26), o.bit_and(x.integer, low)) for x in (a, b))
    lowest = o.mul(low_a, low_b)
    middle = o.add(o.add(o.mul(high_a, low_b), o.mul(low_a, high_b)), o.shr(lowest, 26))
    highest = o.add(o.mul(high_a, high_b), o.shr(middle, 26))
    top = [(part, place + 52) for part, place in _split_integer(highest, 26, 2)]
    return product, [(o.bit_and(lowest, low), 0), (o.bit_and(middle, low), 26), *top]


def _split_integer(whole: Any, bits: int, count: int) -> list[tuple[Any, int]]:
    """Split an integer after every so many bits."""
    found = [(o.shr(whole, bits * k) if k else whole, bits * k) for k in range(count)]
    return [(o.bit_and(part, (1 << bits) - 1), place) for part, place in found[:-1]] + found[-1:]


@functools.cache
def make_term_adding_kernel(
    dtype: torch.dtype, product: bool, reach: LimbRange, apart: int = 0
) -> PointerTableFunction:
    """Return the kernel that adds terms to the counters of a row.

    Columns: the elements, for products those of the other factor, then int64 (copies, counters) `apart` words apart.
    The last two count +infinity (and, times 2^32, -infinity; NaN as both) and terms that are -0.
    """
    layout, element = FORMAT_BY_ELEMENT_DTYPE[dtype], ElementTraceBuilder(3 if product else 2)
    *arrays, counters = element.arrays
    term, *other = (_load_term(layout, array, element.index) for array in arrays)
    parts = _split_integer(term.integer, 26, 2 if layout.bits == 64 else 1)
    if other:
        term, parts = _multiply_terms(layout, term, other[0])
    special, minus_zero = term.infinite | term.nan, (term.integer == 0) & term.negative
    least = _find_least_exponent(dtype, product) - reach.lowest_exponent
    coded = o.bit_or(
        select(term.nan | (term.infinite & ~term.negative), _WORD_ONE, _WORD_ZERO),
        select(term.nan | (term.infinite & term.negative), np.uint64(1 << 32), _WORD_ZERO),
    )
    for k, (part, above) in enumerate(parts):
        place = o.add(term.shift, least + above)
        if least < 0:  # parts of narrower terms, of which only zeros lie below the windows
            place = select(term.integer == 0, np.uint32(0), place)
        shifted = o.shl(part, o.widen(o.bit_and(place, WINDOW_BITS - 1)))
        word = select(special, _WORD_ZERO, select(term.negative, o.sub(_WORD_ZERO, shifted), shifted))
        window = o.shr(place, 4)
        if k == 0:
            last = 2 * reach.limbs
            word = select(special, coded, select(minus_zero, _WORD_ONE, word))
            window = select(special, np.uint32(last), select(minus_zero, np.uint32(last + 1), window))
        o.add_to_counter64(counters, window, word, apart)
    return PointerTableFunction(element.trace, len(element.arrays))


# blocks ------------------------------------------------------------------------------------------------------


def count_block_elements(dtype: torch.dtype, product: bool) -> int:
    """Return the number of neighbours that become float64 parts together; of products with 106 bits fewer."""
    return 512 if product and dtype == torch.float64 else 2048


def get_near_and_far_cut_counts(dtype: torch.dtype, product: bool) -> tuple[int, int]:
    """Return how often terms are cut that are near each other, and how often those that are not."""
    return (2, 5) if product and dtype == torch.float64 else (1, 4)


@functools.cache
def make_block_summing_kernel(
    dtype: torch.dtype, product: bool, cuts: int, partial: bool = False
) -> PointerTableFunction:
    """Return the kernel that sums a block into `cuts` + 1 float64 (or NaN), and counts its terms that are -0."""
    element = ElementTraceBuilder(1 + product)
    words = [_LOADS_BY_BITS[FORMAT_BY_ELEMENT_DTYPE[dtype].bits](array, element.index) for array in element.arrays]
    carries = count_block_elements(dtype, product).bit_length() - 1
    *parts, minus_zero = _split_term(dtype, product, cuts, carries, words)
    for part in parts:
        element.trace.emit_total("sum", part)
    element.trace.emit_total("count", minus_zero)
    return PointerTableFunction(
        element.trace, len(element.arrays), block_size=count_block_elements(dtype, product), has_partial_blocks=partial
    )


def _split_term(dtype: torch.dtype, product: bool, cuts: int, carries: int, words: list) -> list:
    """Return a term's parts, or those of a product of two factors, and whether it is -0; 2^carries are summed.

    Each term is cut at some place: q = (s + x) - s, r = x - q (Rump, Ogita, Oishi). With s = 1.5 * 2^k the q are
    multiples of 2^(k - 52), whose sum is exact while it is below 2^(k - 1); the rests, at most 2^(k - 53) each, are cut
    again, or summed up, exactly while they are multiples of a unit of which their sum has at most 2^53. A product of
    float64 is the rounded product and, from the second cut on, its error. Where the sums would not be exact, as
    exponents are too far apart, or terms no finite numbers, the parts are NaN.
    """
    layout, wide = FORMAT_BY_ELEMENT_DTYPE[dtype], dtype == torch.float64
    # Of the term's own word, or of float64, the part with the exponent.
    own = not product and not wide
    values = [_convert_to_float64(dtype, word) for word in words]
    rests = values[:1]
    if product:
        whole = values[0] * values[1]
        rests = [whole, product_error(values[0], values[1], whole)] if wide else [whole]
    bits = words[0] if own else o.word(rests[0])
    size = o.bit_and(bits if own else o.high_word(bits), (1 << (layout.bits if own else 32) - 1) - 1)
    least = size
    if not own:
        zero = np.float64(0.0)
        nonzero = (values[0] != zero) & (values[1] != zero) if product else values[0] != zero
        least = o.bit_or(size, select(nonzero, np.uint32(1), np.uint32(0)))
    fields, bias, shift = (
        (_get_all_ones_exponent_field(layout), layout.bias, layout.mantissa_bits) if own else (2047, 1023, 20)
    )
    high = o.shr(block_largest(size), shift)
    # The smallest but 0 is the largest of the negatives.
    smallest = o.sub(0, block_largest(o.sub(0, least)))
    low = o.shr(smallest, shift)
    high_one, low_one = (select(field == 0, np.uint32(1), field) for field in (high, low))
    # The last bit of a product is at 2^(e - below) or above, its first one at 2^e.
    below = 2 * layout.mantissa_bits + 1 if product else layout.mantissa_bits
    doubled = product and wide
    places = [2 + carries + k * (carries - 52 + doubled) for k in range(cuts)]
    most = 106 - places[-1] - carries - doubled - below
    lost = (high == fields) | (o.add(high_one, places[0] + 1023 - bias) > 2043) | (high_one > o.add(low_one, most))
    if not own:
        # Below it the error of a product, or the product itself, may not be a number of float64.
        lost = lost | ((smallest != 0) & (low < (64 if wide else 2))) if product else lost
    starts = []
    for place in places:
        # Where there is nothing left to cut, any number does.
        above = place + 1023 - bias
        exponent = o.add(high_one, above)
        exponent = select(high_one > -above, exponent, np.uint32(1)) if above < 0 else exponent
        starts.append(o.real(select(lost, np.uint64(0x7FF8 << 48), o.bit_or(o.shl(o.widen(exponent), 52), 1 << 51))))
    sums = []
    for k, start in enumerate(starts):
        parts = [(start + rest) - start for rest in (rests if k else rests[:1])]
        sums.append(sum(parts[1:], parts[0]))
        rests = [rest - part for rest, part in zip(rests, parts)] + rests[len(parts) :]
    return [*sums, sum(rests[1:], rests[0]), bits == 1 << (63 if not own else layout.bits - 1)]


def _convert_to_float64(dtype: torch.dtype, word: Any) -> Any:
    """Return an element as a float64."""
    if dtype == torch.float64:
        return o.real(word)
    single = widen_float16(word) if dtype == torch.float16 else o.shl(word, 16) if dtype == torch.bfloat16 else word
    return word.trace.emit("to_float64", (o.real(single),), None, "f64")


# rounding ----------------------------------------------------------------------------------------------------


@functools.cache
def make_carry_and_rounding_kernel(reach: LimbRange, dtype: torch.dtype | None) -> PointerTableFunction:
    """Return the kernel that passes carries on within an accumulator, and with a dtype rounds its value, ties to even.

    Columns: int64 of each counter; with a dtype how many terms there are, then the floats; without one int64 of each
    limb, of which all but the last are in [0, 2^32).
    """
    element = ElementTraceBuilder(reach.counter_count + (2 if dtype else reach.limbs))
    read = [o.load64(array, element.index) for array in element.arrays[: reach.counter_count + bool(dtype)]]
    digits = _propagate_carries(reach, read)
    if dtype is None:
        for array, digit in zip(element.arrays[reach.counter_count :], digits):
            o.store64(array, element.index, digit)
    else:
        layout, (*specials, zeros, terms) = FORMAT_BY_ELEMENT_DTYPE[dtype], read[(1 + reach.windows) * reach.limbs :]
        if reach.windows:
            specials = [o.bit_and(specials[0], LIMB_MASK), o.shr(specials[0], 32)]
        bits = _round_accumulator(
            reach, layout, digits, [word != 0 for word in specials], (terms != 0) & (terms == zeros)
        )
        _STORES_BY_BITS[layout.bits](element.arrays[-1], element.index, bits if layout.bits == 64 else o.low_word(bits))
    is_long = reach.limbs > _MOST_LIMBS_OPTIMIZED
    return PointerTableFunction(element.trace, len(element.arrays), skips_compiler_optimization=is_long)


def _propagate_carries(reach: LimbRange, counters: list) -> list:
    """Return the limbs of sums of limbs, or windows, with carries passed on."""
    carry, digits = None, []
    for k in range(reach.limbs):
        even, odd = counters[2 * k : 2 * k + 2] if reach.windows else (counters[k], None)
        is_last = k == reach.limbs - 1
        value = even if is_last else o.bit_and(even, LIMB_MASK)
        if odd is not None:
            value = o.add(value, o.shl(odd if is_last else o.bit_and(odd, 0xFFFF), WINDOW_BITS))
        value = value if carry is None else o.add(value, carry)
        digits.append(value if is_last else o.bit_and(value, LIMB_MASK))
        carry = o.add(o.sar(value, LIMB_BITS), o.sar(even, LIMB_BITS))
        carry = carry if odd is None else o.add(carry, o.sar(odd, WINDOW_BITS))
    return digits


def _round_accumulator(reach: LimbRange, layout: Format, digits: list, specials: list, all_minus_zero: Any) -> Any:
    """Return the bits of the nearest float, in a word of 64 bits."""
    negative = digits[-1] >= 1 << 63
    flip, carry = select(negative, np.uint64(LIMB_MASK), _WORD_ZERO), select(negative, _WORD_ONE, _WORD_ZERO)
    first, second, third, rest, top = _WORD_ONE, _WORD_ZERO, _WORD_ZERO, _WORD_ZERO, _WORD_ZERO
    before, under = [_WORD_ZERO, _WORD_ZERO], _WORD_ZERO
    for k, digit in enumerate(digits):
        size = o.add(o.bit_xor(digit, flip), carry)
        size, carry = o.bit_and(size, LIMB_MASK), o.shr(size, LIMB_BITS)
        used = size != 0
        first, second, third = (
            select(used, new, old) for new, old in zip((size, *before), (first, second, third), strict=True)
        )
        rest, top = select(used, under, rest), select(used, np.uint64(k), top)
        if k > 1:
            under = o.bit_or(before[1], under)
        before = [size, before[0]]
    zero = (first == 1) & (top == 0) & (digits[0] == 0)
    # A float64 of an integer shows its length in its exponent.
    length = o.sub(o.shr(o.word(o.real(o.bit_or(first, 1075 << 52)) - np.float64(2.0**52)), 52), 1022)
    spread, beyond = o.shl(second, _LEADING_BITS - LIMB_BITS), o.add(length, 2)
    head = o.shl(first, o.sub(np.uint64(_LEADING_BITS), length))
    head = o.add(head, o.add(o.shr(spread, length), o.shr(third, beyond)))
    lost = o.bit_or(o.bit_and(spread, _make_low_mask(length)), o.bit_or(o.bit_and(third, _make_low_mask(beyond)), rest))
    # Below 62 bits it matters only whether there is anything.
    head = o.bit_or(head, select(lost != 0, _WORD_ONE, _WORD_ZERO))
    exponent = o.add(o.add(o.shl(top, 5), length), reach.lowest_exponent - 1 + _EXPONENT_OFFSET)
    infinity = np.uint64(_get_all_ones_exponent_field(layout) << layout.mantissa_bits)
    bits = _round_leading_bits(layout, head, exponent)
    plus, minus = specials
    special = plus | minus
    bits = select(special, infinity, select(zero, _WORD_ZERO, bits))
    negative = (special & minus) | (~special & ((zero & all_minus_zero) | (negative & ~zero)))
    bits = o.bit_or(bits, select(negative, np.uint64(1 << (layout.bits - 1)), _WORD_ZERO))
    nan = np.uint64(_get_all_ones_exponent_field(layout) << layout.mantissa_bits | 1 << (layout.mantissa_bits - 1))
    return select(plus & minus, nan, bits)


def _round_leading_bits(layout: Format, head: Any, exponent: Any) -> Any:
    """Return the bits of the number nearest to head * 2^(exponent - _EXPONENT_OFFSET - 61); the head has 62 bits."""
    lowest = np.uint64(layout.emin + _EXPONENT_OFFSET)
    under_normal = select(exponent < lowest, o.sub(lowest, exponent), _WORD_ZERO)
    under_normal = select(under_normal > layout.precision + 1, np.uint64(layout.precision + 1), under_normal)
    drop = o.add(under_normal, _LEADING_BITS - layout.precision)
    kept, cut, half = o.shr(head, drop), o.bit_and(head, _make_low_mask(drop)), o.shl(_WORD_ONE, o.sub(drop, 1))
    up = (cut > half) | ((cut == half) & (o.bit_and(kept, 1) == 1))
    kept = o.add(kept, select(up, _WORD_ONE, _WORD_ZERO))
    # A mantissa's leading bit, or one that a carry made, adds 1 to the exponent field.
    field = select(exponent > lowest, o.sub(exponent, lowest), _WORD_ZERO)
    infinity = np.uint64(_get_all_ones_exponent_field(layout) << layout.mantissa_bits)
    return select(
        field > _get_all_ones_exponent_field(layout) - 2, infinity, o.add(kept, o.shl(field, layout.mantissa_bits))
    )


def _make_low_mask(count: Any) -> Any:
    """Return a word whose lowest bits, so many, are ones."""
    return o.sub(o.shl(_WORD_ONE, count), 1)
