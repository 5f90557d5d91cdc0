"""Two tensors compared element by element, in machine code: one pass over the memory of both."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path

from ...kernels import Code, Number, choose, compile_code, gathered, larger, lesser, source_digest

# Words of a setup. SAME_FORMAT is 1 where equal codes are equal numbers, 2 where they also count ulps.
NUMEL, SHARE, SAME_FORMAT, A, B, ULP = 0, 1, 2, 3, 9, 15
# Of a layout, from A or B on: bits of the mantissa, bias, mask of the magnitude, first code that is no finite number,
# code of infinity (-1 without one), code of the largest number.
MANTISSA, BIAS, MAGNITUDE, SPECIAL, INFINITY, TOP = range(6)
SETUP = ULP + 4  # mantissa bits and lowest exponent of both formats
# What is counted; from A_NAN on first of A, then of B.
SAME, FINITE, A_NAN, A_INFINITE, A_ZEROS, A_TOP, A_VARIES, B_NAN, B_INFINITE, B_ZEROS, B_TOP, B_VARIES = range(12)
COUNTS = 12
# Changes in ulps by binade, from 2^LOWEST on, and by the first FINE bits of their fraction.
FINE, LOWEST, BINADES = 5, -192, 512
# Changes of fewer ulps, where they are whole, are counted by their number.
SMALL = 64
BLOCK = 1024  # with at most 2^52 steps each, their sum is below 2^63


@functools.cache
def comparison_kernel(a_bytes: int, b_bytes: int) -> Callable[..., None]:
    """A function (first share, last share, a, b, setup, counts, table, small, sums) for elements of some sizes.

    All but the first two are addresses; of the last four, each share has a row: int64 (COUNTS,), changes by size
    (BINADES << FINE,), whole changes (SMALL,), and the sum and the largest in float64.
    """
    name = f"compare_{a_bytes}_{b_bytes}"
    key = f"{name} {source_digest(Path(__file__).parent)}"
    return compile_code(
        name, key, 9, lambda code, *values: _Comparison(code, a_bytes, b_bytes, *values[2:]).write(*values[:2])
    )


class _Comparison:
    """The code that compares."""

    def __init__(self, code: Code, a_bytes: int, b_bytes: int, a, b, setup, counts, table, small, sums) -> None:
        self.code = code
        kinds = {1: code.i8, 2: code.i16, 4: code.i32, 8: code.i64}
        self.a, self.b = code.memory(a, kinds[a_bytes]), code.memory(b, kinds[b_bytes])
        self.word = code.i64 if 8 in (a_bytes, b_bytes) else code.i32
        self.setup, self.counts = code.memory(setup, code.i64), code.memory(counts, code.i64, COUNTS)
        self.table, self.small = code.memory(table, code.i64, BINADES << FINE), code.memory(small, code.i64, SMALL)
        self.sums = code.memory(sums, code.f64, 2)
        self.known: list[Number] = []

    def write(self, first, last) -> None:
        """Write the loop over shares and blocks."""
        code, setup = self.code, self.setup
        with code.span(first, last) as share:
            begin = share * setup[SHARE]
            end = lesser(begin + setup[SHARE], setup[NUMEL])
            with code.span(begin, end, BLOCK) as low:
                self.block(low, lesser(low + BLOCK, end), share)

    def block(self, low: Number, high: Number, share: Number) -> None:
        """Count what needs no branch first, then the elements that changed."""
        code, counts, setup = self.code, self.counts, self.setup
        masks, specials, tops = (
            [setup[which + part].to(self.word) for which in (A, B)] for part in (MAGNITUDE, SPECIAL, TOP)
        )
        firsts = [array[0].to(self.word) for array in (self.a, self.b)]

        def turn(i: Number, lanes: int) -> list[Number]:
            codes = [array.lanes(i, lanes).to(self.word) for array in (self.a, self.b)]
            (p, q), (x, y) = (code & mask for code, mask in zip(codes, masks)), codes
            found = [x == y, (p >= specials[0]) | (q >= specials[1]), p == 0, q == 0, p == tops[0], q == tops[1]]
            return [*(mask.to(self.word) for mask in found), x ^ firsts[0], y ^ firsts[1]]

        begin = [code.number(0, self.word) for _ in range(8)]
        merges = [operator.add] * 6 + [operator.or_] * 2
        found = [number.to(code.i64) for number in gathered(low, high, 16, begin, merges, turn)]
        equal, special, *rest = found
        for which, number in zip((A_ZEROS, B_ZEROS, A_TOP, B_TOP), rest):
            counts[share, which] += number
        for which, number in zip((A_VARIES, B_VARIES), rest[4:]):
            counts[share, which] |= (number != 0).to(code.i64)
        all_equal = (setup[SAME_FORMAT] != 0) & (special == 0) & (equal == high - low)
        with code.either(all_equal) as (same, changed):
            with same:
                counts[share, SAME] += equal
                counts[share, FINITE] += equal
            with changed:
                self.changed(low, high, share)

    def changed(self, low: Number, high: Number, share: Number) -> None:
        """Count the elements of a block of which some changed, or are NaN or infinite."""
        code, small, counts = self.code, self.small, self.counts
        # Read once: for all that LLVM knows, counting changes them.
        setup = self.known = [self.setup[k] for k in range(SETUP)]
        mask_a, special_a, mask_b, special_b = (setup[x + part] for x in (A, B) for part in (MAGNITUDE, SPECIAL))
        same, finite, top, sum_of_steps = (code.variable(0) for _ in range(4))
        total, largest = code.variable(0.0, code.f64), code.variable(self.sums[share, 1])
        still = small[share, 0]
        with code.span(low, high) as i:
            x, y = self.a[i].to(code.i64), self.b[i].to(code.i64)
            p, q = x & mask_a, y & mask_b
            with code.either((p >= special_a) | (q >= special_b)) as (special, known):
                with special:
                    same += self.special(x, y, p, q, share)
                with known:
                    finite += 1
                    # In one binade and of one sign codes count ulps; to ask for equal ones first costs more than to
                    # count them.
                    in_steps = (setup[SAME_FORMAT] == 2) & ((x ^ y) >> setup[A + MANTISSA] == 0)
                    with code.either(in_steps) as (near, far):
                        with near:
                            steps = larger(p - q, q - p)
                            sum_of_steps += steps
                            top.set(larger(top, steps))
                            with code.either(steps < SMALL) as (few, many):
                                with few:
                                    small[share, steps] += 1
                                with many:
                                    self.count(steps.to(code.f64).bits(), 0, share)
                        with far:
                            u, v = self.value(x, p, A), self.value(y, q, B)
                            with code.either(u == v) as (equal, changed):
                                with equal:
                                    same += 1
                                with changed:
                                    size = self.change(u, v, share)
                                    total += size
                                    largest.set(larger(size, largest))
        counts[share, SAME] += same + small[share, 0] - still
        counts[share, FINITE] += finite
        self.sums[share, 0] += total + sum_of_steps.to(code.f64)
        self.sums[share, 1] = larger(largest, top.to(code.f64))

    def change(self, u: Number, v: Number, share: Number) -> Number:
        """Count a change by its size, and return that in ulps: never more than the largest float64."""
        code, setup = self.code, self.known
        u, v, halved = code.variable(u), code.variable(v), code.variable(0)
        with code.when((v - u).size() > 1.7976931348623157e308):
            halved.set(1)
            u.set(0.5 * u)
            v.set(0.5 * v)
        change = v - u
        # What rounding the difference took away (Knuth's two-sum): the binade is that of the exact change.
        back = change - v
        rest = (v - (change - back)) + (-u - back)
        bits, raised = code.variable(change.size().bits()), code.variable(0)
        with code.when((rest != 0.0) & ((rest < 0.0) != (change < 0.0))):
            bits += -1
        with code.when(bits >> 52 == 0):
            raised.set(54)
            bits.set((bits.real() * 18014398509481984.0).bits())
        binade = (u.size().bits() >> 52) - 1023 + halved
        own, other = (larger(binade, setup[ULP + k + 1]) - setup[ULP + k] for k in (0, 2))
        power = (bits >> 52) - 1023 - raised + halved - larger(own, other)
        self.count(bits, power - ((bits >> 52) - 1023), share)
        # The change with its exponent replaced by that of its size in ulps.
        return ((bits & 0xFFFFFFFFFFFFF) | (lesser(larger(power + 1023, 1), 2046) << 52)).real()

    def count(self, bits: Number, moved: Number | int, share: Number) -> None:
        """Count a size in ulps: the bits of a float64, to be multiplied by 2^moved."""
        slot = lesser(larger((bits >> 52) - 1023 + moved - LOWEST, 0), BINADES - 1)
        self.table[share, (slot << FINE) + ((bits >> (52 - FINE)) & ((1 << FINE) - 1))] += 1

    def value(self, codes: Number, size: Number, which: int) -> Number:
        """Return the value of a finite code, of which `size` is the part without the sign.

        Bits are chosen, not reals: a processor does that without a branch.
        """
        mantissa, bias = self.known[which + MANTISSA], self.known[which + BIAS]
        power, fraction = size >> mantissa, size & ((1 << mantissa) - 1)
        small = fraction.to(self.code.f64) * ((1024 - bias - mantissa) << 52).real()
        normal = ((power - bias + 1023) << 52) | (fraction << (52 - mantissa))
        bits = choose(mantissa == 52, size, choose(power == 0, small.bits(), normal))
        return (bits | choose(codes == size, 0, -(1 << 63))).real()

    def special(self, x: Number, y: Number, p: Number, q: Number, share: Number) -> Number:
        """Count NaN and infinities of two codes, and return 1 where both stand for the same, else 0."""
        code, setup, kinds = self.code, self.known, []
        for which, size, infinite, nan in ((A, p, A_INFINITE, A_NAN), (B, q, B_INFINITE, B_NAN)):
            kind = code.variable(0)
            with code.when(size >= setup[which + SPECIAL]):
                kind.set(choose(size == setup[which + INFINITY], 2, 1))
                self.counts[share, choose(kind == 2, infinite, nan)] += 1
            kinds.append(kind)
        alike = (kinds[0] == 1) | ((x == p) == (y == q))
        return ((kinds[0] == kinds[1]) & alike).to(code.i64)
