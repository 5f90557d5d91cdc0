"""The code that counts a sample in a block format."""

from __future__ import annotations

import operator
from collections.abc import Callable

from ...kernels import Code, Number, Variable, choose, gathered, larger, lesser
from ._candidates import (
    BLOCK,
    BLOCK_NUMBERS,
    FIRST,
    GREATEST,
    HAS_TENSOR_SCALE,
    INFINITY,
    LARGEST,
    NONZERO,
    NORMAL,
    POWERS,
    RAISES,
    SCALE_BITS,
    SCALE_EMIN,
    SCALE_MAX,
    SCALE_TINY,
    SECOND,
    SMALLEST,
)
from ._neighbours import FIELD, LANES, NORMALS, sizes

HALF, UPPER = 0xFFFF, 1 << 16
HALF_EVEN = 6755399441055744.0  # added and taken off, rounds a float64 below 2^51 to an integer, ties to even
SMALLEST_NORMAL = 2.0**-126


class BlockCounts:
    """The code on one sample in one block format.

    Args:
        code: what is written to.
        sample: the address of float32 numbers.
        taken: how many they are.
        blocks: the address of `Candidates.block_numbers`.
        k: row of the format.
    """

    def __init__(self, code: Code, sample: Number, taken: Number, blocks: Number, k: Number) -> None:
        self.code, self.sample, self.taken = code, sample, taken
        self.numbers, self.k = code.memory(blocks, code.f64, BLOCK_NUMBERS), k
        self.size = self.integer(BLOCK)
        self.found: list[Variable] = [code.variable(0) for _ in range(4)]

    def real(self, column: int) -> Number:
        """Return a number of the format."""
        return self.numbers[self.k, column]

    def integer(self, column: int) -> Number:
        """Return a number of the format that is an integer."""
        return self.real(column).to(self.code.i64)

    def counts(self) -> list[Variable]:
        """Return elements of finite blocks, those that become zero or subnormal, and zeros where the largest stays."""
        with self.code.either(self.real(POWERS) > 0) as (powers, scales):
            with powers:
                self.under_powers()
            with scales:
                self.under_scales()
        return self.found

    def under_powers(self) -> None:
        """Count under scales that are powers of two.

        The thresholds are then as exact as the payloads, and one word tells whether an element is below.
        """
        z, n = self.real(NONZERO), self.real(NORMAL)

        def one(start: Number, end: Number, top: Number) -> tuple[Number, Number]:
            power = _power_of_two(self.exponent_of_scale(top))
            nonzero, normal = (self.word_from(x * power) & 0x7FFFFFFF for x in (z, n))
            found = self.tally(start, end, lambda a: (a < nonzero, a < normal))
            return found, top >= nonzero

        self.each_block(one)

    def under_scales(self) -> None:
        """Count under any scale, by quotients rounded to float32."""
        code, f32 = self.code, self.code.f32
        z, n = self.real(NONZERO).to(f32), self.real(NORMAL).to(f32)
        unit, tensor = code.variable(self.real(LARGEST).to(f32)), code.variable(1.0, f32)
        with code.when(self.real(HAS_TENSOR_SCALE) > 0):
            tensor.set(self.tensor_scale())
            unit.set(tensor * unit)

        def one(start: Number, end: Number, top: Number) -> tuple[Number, Number]:
            scale = self.rounded_scale((top.real() / unit).to(code.f64)).to(f32) * tensor

            def under(a: Number) -> tuple[Number, Number]:
                quotient = a.real() / scale
                return quotient < z, quotient < n

            return self.tally(start, end, under), top.real() / scale >= z

        self.each_block(one)

    def each_block(self, one: Callable[[Number, Number, Number], tuple[Number, Number]]) -> None:
        """Count (start, end, largest word) -> (zeros and 2^16 times subnormal numbers, whether the largest stays)."""
        code = self.code
        counted, zeros, subnormal, hidden = self.found

        def count(start: Number, end: Number, top: Number) -> None:
            found, stays = one(start, end, top)
            under = (found & HALF).to(code.i64)
            counted.set(counted + (end - start))
            zeros.set(zeros + under)
            subnormal.set(subnormal + (found >> 16).to(code.i64))
            hidden.set(hidden + choose(stays, under, 0))

        self.each_finite(count)

    def each_finite(self, take: Callable[[Number, Number, Number], None]) -> None:
        """Write what is done with the start, end and largest word of every block whose elements are all finite."""
        code = self.code
        blocks = (self.taken + self.size - 1) // self.size
        with code.span(0, blocks) as block:
            start = block * self.size
            end = lesser(start + self.size, self.taken)
            top = self.top(start, end)
            with code.when(top < INFINITY):
                take(start, end, top)

    def top(self, start: Number, end: Number) -> Number:
        """Return the largest magnitude of a block as a word, among which NaN is the largest."""
        begin = [self.code.number(0, self.code.i32)]
        (found,) = gathered(start, end, LANES, begin, (larger,), lambda i, lanes: [sizes(self.sample, i, lanes)])
        return found

    def tally(self, start: Number, end: Number, under: Callable[[Number], tuple[Number, Number]]) -> Number:
        """Count a block's nonzero elements under a first limit, and times 2^16 those from there to under a second."""

        def turn(i: Number, lanes: int) -> list[Number]:
            a = sizes(self.sample, i, lanes)
            none, (gone, small) = a.like(0), under(a)
            return [choose(gone, choose(a > 0, 1, none), choose(small, UPPER, none))]

        (found,) = gathered(start, end, LANES, [self.code.number(0, self.code.i32)], (operator.add,), turn)
        return found

    def word_from(self, x: Number) -> Number:
        """Return the word of the smallest float32 that is at least a positive float64; above all, infinity's."""
        near = x.to(self.code.f32)
        return near.bits() + (near.to(self.code.f64) < x).to(self.code.i32)

    def tensor_scale(self) -> Number:
        """Return float32's amax / (largest element x largest scale) over finite blocks, at least 2^-126."""
        best = self.code.variable(0, self.code.i32)
        self.each_finite(lambda start, end, top: best.set(larger(top, best)))
        unit = (self.real(LARGEST) * self.real(SCALE_MAX)).to(self.code.f32)
        return larger(best.real() / unit, SMALLEST_NORMAL)

    def exponent_of_scale(self, top: Number) -> Number:
        """Return the exponent of a block's power-of-two scale: e - shift + (f >= second) for amax = 2^e (1 + f)."""
        code = self.code
        small = top < NORMALS
        # A subnormal number's digits are those of the integer that it is as a word.
        word = choose(small, top.to(code.f32).bits(), top)
        e = (word >> FIELD).to(code.i64) - 127 - choose(small, 149, 0)
        f = (word & (NORMALS - 1)).to(code.i64)
        e = e - self.integer(FIRST) + (f >= self.integer(SECOND)).to(code.i64)
        lowest = self.integer(SMALLEST)
        return choose(top == 0, lowest, lesser(larger(e, lowest), self.integer(GREATEST)))

    def rounded_scale(self, q: Number) -> Number:
        """Return a positive quotient rounded to the scales' format, within its range."""
        e = ((q.bits() >> 52) & 0x7FF) - 1023
        step = larger(e, self.integer(SCALE_EMIN)) - self.integer(SCALE_BITS)
        units = q * _power_of_two(-step)
        near = (units + HALF_EVEN) - HALF_EVEN
        up = choose(near < units, near + 1.0, choose(near - 1.0 >= units, near - 1.0, near))
        whole = choose(self.real(RAISES) > 0, up, near)
        return lesser(larger(whole * _power_of_two(step), self.real(SCALE_TINY)), self.real(SCALE_MAX))


def _power_of_two(e: Number) -> Number:
    """2^e in float64, for a normal result."""
    return ((e + 1023) << 52).real()
