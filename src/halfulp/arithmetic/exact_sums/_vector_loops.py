"""Loops over a block's elements in LLVM's vector types: how far they range, and their sum without a rounding error."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kernels import VectorBuilder, lanes_of, scalar_of, vector_bits

_PLACES = 3  # where sums begin in a block's record


def _lanes() -> int:
    """Elements per turn: four vectors of float64 side by side, so that no addition waits for the one before."""
    return 4 * vector_bits() // 64


class BlockLoops(VectorBuilder):
    """Loops over a block's elements, each over vectors and then over the remaining elements one by one."""

    def __init__(self, builder, dtype: torch.dtype, product: bool) -> None:
        super().__init__(builder)
        self.dtype, self.product, self.wide = dtype, product, dtype == torch.float64
        self.stored = self.memory_type(dtype)

    def ranges(self, a, b, count, record) -> None:
        """Write six int64 to the address `record`.

        Of the terms' words without their signs: the largest; the smallest but zero, less 1 (-1 where there is none).
        How many terms are -0. The bits of the terms' sum in float64, exact where the range allows. For products the
        second figure of a, and of b. Terms are the elements at a, or their products with those at b, in float64.
        """
        word = self.i64 if self.product else self.stored
        kinds = [word, word, word, self.f64, *([self.stored] * 2 if self.product else [])]
        starts = [0, -1, 0, 0.0, -1, -1][: len(kinds)]
        finals = self.both(a, b, count, kinds, starts, self.seen)
        merges = [self.largest, self.smallest, self.b.add, self.b.fadd, self.smallest, self.smallest]
        for k, (merge, (many, one)) in enumerate(zip(merges, finals)):
            value = merge(self.folded(merge, many), one)
            if value.type is self.f64:
                value = self.b.bitcast(value, self.i64)
            elif value.type.width < 64:
                value = (self.b.sext if merge == self.smallest else self.b.zext)(value, self.i64)
            self.store_word(record, k, value)

    def seen(self, lanes: int, a, b, i, carried: list) -> list:
        words = self.load_bits(a, i, self.dtype, lanes)
        value = self.reals(words, self.dtype, self.f64)
        factors = []
        if self.product:
            factors = [words, self.load_bits(b, i, self.dtype, lanes)]
            value = self.b.fmul(value, self.reals(factors[1], self.dtype, self.f64))
            words = self.b.bitcast(value, self.shape(self.i64, lanes))
        sign = 1 << (self.width(words) - 1)
        negative_zero = self.b.icmp_signed("==", words, self.constant(words.type, -sign))
        return [
            self.largest(carried[0], self.size(words)),
            self.smallest(carried[1], self.below(words)),
            self.b.sub(carried[2], self.b.sext(negative_zero, words.type)),
            carried[3] if self.wide else self.b.fadd(carried[3], value),
            *(self.smallest(old, self.below(factor)) for old, factor in zip(carried[4:], factors)),
        ]

    def width(self, words) -> int:
        return scalar_of(words.type).width

    def size(self, words):
        """Words without their signs."""
        return self.b.and_(words, self.constant(words.type, (1 << (self.width(words) - 1)) - 1))

    def below(self, words):
        """Words without their signs, less 1: zero becomes the largest."""
        return self.b.sub(self.size(words), self.constant(words.type, 1))

    def extracted(self, a, b, count, record, first, second) -> None:
        """Write the terms' sum as float64 summands from word 3 of `record` on.

        first, second: bits of 1.5 * 2^k, to which terms are added and so are cut at the last place of 2^k, their rests
        being exact; the summands are the cut parts' sums and that of the last rests. Products of float64, each the
        rounded product and its error, are cut twice, all others once.
        """
        twice = self.product and self.wide
        cuts = [self.b.bitcast(bits, self.f64) for bits in ((first, second) if twice else (first,))]
        starts = [*cuts, self.ir.Constant(self.f64, 0.0)]
        finals = self.both(a, b, count, [self.f64] * len(starts), starts, self.cut)
        for k, (many, one) in enumerate(finals):
            if k < len(cuts):
                many = self.b.fsub(many, self.spread(cuts[k], lanes_of(many.type)))
                one = self.b.fsub(one, cuts[k])
            value = self.b.fadd(self.folded(self.b.fadd, many), one)
            self.store_word(record, _PLACES + k, self.b.bitcast(value, self.i64))

    def cut(self, lanes: int, a, b, i, carried: list) -> list:
        left = self.term(a, i, lanes)
        rests = [left]
        if self.product:
            right = self.term(b, i, lanes)
            rests = [self.b.fmul(left, right)]
        sums = list(carried)
        for k in range(len(carried) - 1):
            if k == 1:
                rests.append(self.product_error(left, right, self.b.fmul(left, right)))
            for j, rest in enumerate(rests):
                grown = self.b.fadd(sums[k], rest)
                rests[j] = self.b.fsub(rest, self.b.fsub(grown, sums[k]))
                sums[k] = grown
        for rest in rests:
            sums[-1] = self.b.fadd(sums[-1], rest)
        return sums

    def unfolded(self, a, b, count, terms) -> None:
        """Write the terms as float64.

        A product of float64 becomes two, the rounded one and its error; the errors stand from place `count` on.
        """
        errors = self.b.add(terms, self.b.mul(count, self.word(8)))

        def body(lanes: int, a, b, i, carried: list) -> list:
            value = self.term(a, i, lanes)
            if self.product:
                left, right = value, self.term(b, i, lanes)
                value = self.b.fmul(left, right)
                if self.wide:
                    self.store(errors, i, torch.float64, self.product_error(left, right, value))
            self.store(terms, i, torch.float64, value)
            return []

        self.both(a, b, count, [], [], body)

    def peeled(self, terms, count, cut, found) -> None:
        """Add float64 terms to a number and leave the rests in their places.

        Write the cut parts' sum to word 0 at the address `found`, and the largest word of a rest, without its sign, to
        word 1.
        """
        cut = self.b.bitcast(cut, self.f64)

        def body(lanes: int, a, b, i, carried: list) -> list:
            term = self.load(a, i, torch.float64, self.shape(self.f64, lanes))
            grown = self.b.fadd(carried[0], term)
            rest = self.b.fsub(term, self.b.fsub(grown, carried[0]))
            self.store(a, i, torch.float64, rest)
            return [grown, self.largest(carried[1], self.size(self.b.bitcast(rest, self.shape(self.i64, lanes))))]

        (sums, last_sum), (most, last_most) = self.both(terms, None, count, [self.f64, self.i64], [cut, 0], body)
        sums = self.b.fsub(sums, self.spread(cut, lanes_of(sums.type)))
        total = self.b.fadd(self.folded(self.b.fadd, sums), self.b.fsub(last_sum, cut))
        self.store_word(found, 0, self.b.bitcast(total, self.i64))
        self.store_word(found, 1, self.largest(self.folded(self.largest, most), last_most))

    def keeps_subnormals(self, bits):
        """Return whether the processor's mode keeps half of 2^-1022, given by its bits, or makes it zero.

        The bits must not be known to the compiler, which would answer for a mode of its own.
        """
        half = self.b.fmul(self.b.bitcast(bits, self.f64), self.constant(self.f64, 0.5))
        return self.b.fcmp_unordered("!=", half, self.constant(self.f64, 0.0))

    def product_error(self, x, y, p):
        return self.intrinsic("fma", x, y, self.b.fneg(p))

    def both(self, a, b, count, kinds: list, starts: list, body: Callable) -> list[tuple]:
        """Run a body on all elements; return the values carried by the vector loop and by the remainder loop."""
        lanes, finals = _lanes(), []
        whole = self.b.mul(self.b.udiv(count, self.word(lanes)), self.word(lanes))
        for size, low, high in ((lanes, self.word(0), whole), (1, whole, count)):
            values = [self.start(kind, start, size) for kind, start in zip(kinds, starts)]
            with self.loop(low, high, size, values) as i:
                values[:] = body(size, a, b, i, values)
            finals.append(values)
        return list(zip(*finals))

    def start(self, kind, start, lanes: int):
        """A number or a scalar value in all lanes."""
        if isinstance(start, int | float):
            return self.constant(self.shape(kind, lanes), start)
        return self.spread(start, lanes)

    def term(self, address, i, lanes: int):
        """Elements as float64."""
        return self.load(address, i, self.dtype, self.shape(self.f64, lanes))

    def largest(self, x, y):
        return self.b.select(self.b.icmp_unsigned(">", x, y), x, y)

    def smallest(self, x, y):
        return self.b.select(self.b.icmp_unsigned("<", x, y), x, y)

    def folded(self, merge: Callable, vector):
        """All lanes merged, halves at a time."""
        while half := lanes_of(vector.type) // 2:
            vector = merge(self.part(vector, 0, half), self.part(vector, half, half))
        return self.lane(vector, 0)
