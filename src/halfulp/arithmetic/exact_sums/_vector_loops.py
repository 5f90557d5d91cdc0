"""Loops over a block's elements in LLVM's vector types: how far they range, and their sum without a rounding error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from ...kernels import half_to_float, vector_bits
from ._accumulator import LAYOUTS

_PLACES = 3  # where sums begin in a block's record


def ranges(dtype: torch.dtype, product: bool) -> Callable:
    """Numba intrinsic (a, b, count, record): writes into six int64 at the address `record`.

    Of the terms' words without their signs: the largest; the smallest but zero, less 1 (-1 where there is none). How
    many terms are -0. The bits of the terms' sum in float64, exact where the range allows. For products the second
    figure of a, and of b. Terms are the elements at a, or their products with those at b, in float64.
    """
    return _intrinsic(lambda builder, values: _Block(builder, dtype, product).ranges(*values), 4)


def extracted(dtype: torch.dtype, product: bool) -> Callable:
    """Numba intrinsic (a, b, count, record, first, second): writes the terms' sum as float64 summands from word 3 on.

    first, second: bits of 1.5 * 2^k, to which terms are added and so are cut at the last place of 2^k, their rests
    being exact; the summands are the cut parts' sums and that of the last rests. Products of float64, each the rounded
    product and its error, are cut twice, all others once.
    """
    return _intrinsic(lambda builder, values: _Block(builder, dtype, product).extracted(*values), 6)


def unfolded(dtype: torch.dtype, product: bool) -> Callable:
    """Numba intrinsic (a, b, count, terms): writes the terms as float64.

    A product of float64 becomes two, the rounded one and its error; the errors stand from place `count` on.
    """
    return _intrinsic(lambda builder, values: _Block(builder, dtype, product).unfolded(*values), 4)


def peeled() -> Callable:
    """Numba intrinsic (terms, count, cut, found): adds float64 terms to a number and leaves the rests in their places.

    Writes the cut parts' sum to word 0 at the address `found`, and the largest word of a rest, without its sign, to 1.
    """
    return _intrinsic(lambda builder, values: _Block(builder, torch.float64, False).peeled(*values), 4)


def keeps_subnormals() -> Callable:
    """Numba intrinsic (bits of 2^-1022) -> 1 where the processor's mode keeps half of it, 0 where it makes it zero.

    The bits must not be known to the compiler, which would answer for a mode of its own.
    """

    def emit(builder, values):
        from llvmlite import ir

        number = builder.bitcast(values[0], ir.DoubleType())
        half = builder.fmul(number, ir.Constant(number.type, 0.5))
        return builder.zext(builder.fcmp_unordered("!=", half, ir.Constant(number.type, 0.0)), ir.IntType(64))

    return _intrinsic(emit, 1)


def _intrinsic(emit: Callable, count: int) -> Callable:
    """An intrinsic of int64 arguments; its result is an int64, what `emit` returns or 0."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def codegen(context, builder, signature, values):
        value = emit(builder, values)
        return ir.Constant(ir.IntType(64), 0) if value is None else value

    result = types.int64(*[types.int64] * count)
    makers = {
        1: lambda typing, a: (result, codegen),
        4: lambda typing, a, b, c, d: (result, codegen),
        6: lambda typing, a, b, c, d, e, f: (result, codegen),
    }
    return intrinsic(makers[count])


def _lanes() -> int:
    """Elements per turn: four vectors of float64 side by side, so that no addition waits for the one before."""
    return 4 * vector_bits() // 64


class _Block:
    """The two loops, each over vectors and then over what is left one by one."""

    def __init__(self, builder, dtype: torch.dtype, product: bool) -> None:
        from llvmlite import ir

        self.ir, self.b, self.product = ir, builder, product
        self.layout = LAYOUTS[dtype]
        self.wide = dtype == torch.float64
        self.dtype = dtype
        self.stored = ir.IntType(self.layout.width)
        self.i64, self.f64 = ir.IntType(64), ir.DoubleType()

    def ranges(self, a, b, count, record) -> None:
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
            self.store(record, k, value)

    def seen(self, lanes: int, a, b, i, carried: list) -> list:
        words = self.load(a, i, lanes)
        value = self.real(words, lanes)
        factors = []
        if self.product:
            factors = [words, self.load(b, i, lanes)]
            value = self.b.fmul(value, self.real(factors[1], lanes))
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
        return getattr(words.type, "element", words.type).width

    def size(self, words):
        """Words without their signs."""
        return self.b.and_(words, self.constant(words.type, (1 << (self.width(words) - 1)) - 1))

    def below(self, words):
        """Words without their signs, less 1: zero becomes the largest."""
        return self.b.sub(self.size(words), self.constant(words.type, 1))

    def extracted(self, a, b, count, record, first, second) -> None:
        twice = self.product and self.wide
        cuts = [self.b.bitcast(bits, self.f64) for bits in ((first, second) if twice else (first,))]
        starts = [*cuts, self.ir.Constant(self.f64, 0.0)]
        finals = self.both(a, b, count, [self.f64] * len(starts), starts, self.cut)
        for k, (many, one) in enumerate(finals):
            if k < len(cuts):
                many = self.b.fsub(many, self.splat(cuts[k], many.type.count))
                one = self.b.fsub(one, cuts[k])
            value = self.b.fadd(self.folded(self.b.fadd, many), one)
            self.store(record, _PLACES + k, self.b.bitcast(value, self.i64))

    def cut(self, lanes: int, a, b, i, carried: list) -> list:
        left = self.real(self.load(a, i, lanes), lanes)
        rests = [left]
        if self.product:
            right = self.real(self.load(b, i, lanes), lanes)
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
        errors = self.b.add(terms, self.b.mul(count, self.word(8)))

        def body(lanes: int, a, b, i, carried: list) -> list:
            value = self.real(self.load(a, i, lanes), lanes)
            if self.product:
                left, right = value, self.real(self.load(b, i, lanes), lanes)
                value = self.b.fmul(left, right)
                if self.wide:
                    self.put(errors, i, self.product_error(left, right, value))
            self.put(terms, i, value)
            return []

        self.both(a, b, count, [], [], body)

    def peeled(self, terms, count, cut, found) -> None:
        cut = self.b.bitcast(cut, self.f64)

        def body(lanes: int, a, b, i, carried: list) -> list:
            term = self.real(self.load(a, i, lanes), lanes)
            grown = self.b.fadd(carried[0], term)
            rest = self.b.fsub(term, self.b.fsub(grown, carried[0]))
            self.put(a, i, rest)
            return [grown, self.largest(carried[1], self.size(self.b.bitcast(rest, self.shape(self.i64, lanes))))]

        (sums, last_sum), (most, last_most) = self.both(terms, None, count, [self.f64, self.i64], [cut, 0], body)
        sums = self.b.fsub(sums, self.splat(cut, sums.type.count))
        total = self.b.fadd(self.folded(self.b.fadd, sums), self.b.fsub(last_sum, cut))
        self.store(found, 0, self.b.bitcast(total, self.i64))
        self.store(found, 1, self.largest(self.folded(self.largest, most), last_most))

    def product_error(self, x, y, p):
        name = "llvm.fma.f64" if x.type is self.f64 else f"llvm.fma.v{x.type.count}f64"
        function = self.b.module.globals.get(name)
        if function is None:
            function = self.ir.Function(self.b.module, self.ir.FunctionType(x.type, [x.type] * 3), name)
        return self.b.call(function, [x, y, self.b.fneg(p)])

    def both(self, a, b, count, kinds: list, starts: list, body: Callable) -> list[tuple]:
        """Run a body on all elements; what the vectors carried and what the rest carried."""
        lanes, finals = _lanes(), []
        whole = self.b.mul(self.b.udiv(count, self.word(lanes)), self.word(lanes))
        for size, low, high in ((lanes, self.word(0), whole), (1, whole, count)):
            first = [self.spread(kind, start, size) for kind, start in zip(kinds, starts)]
            with self.loop(low, high, size, first) as (i, carried, turn):
                turn.extend(body(size, a, b, i, carried))
            finals.append(carried)
        return list(zip(*finals))

    @contextlib.contextmanager
    def loop(self, low, high, step: int, first: list) -> Iterator:
        """A counting loop: yields the counter, the carried values, and a list for what they become."""
        b = self.b
        before = b.block
        head, body, done = (b.append_basic_block(n) for n in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(self.i64)
        i.add_incoming(low, before)
        carried = [b.phi(value.type) for value in first]
        for phi, value in zip(carried, first):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", i, high), body, done)
        b.position_at_end(body)
        turn: list = []
        yield i, carried, turn
        i.add_incoming(b.add(i, self.word(step)), b.block)
        for phi, value in zip(carried, turn, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(done)

    def load(self, address, i, lanes: int):
        pointer = self.b.gep(self.b.inttoptr(address, self.stored.as_pointer()), [i])
        pointer = self.b.bitcast(pointer, self.shape(self.stored, lanes).as_pointer())
        return self.b.load(pointer, align=self.layout.width // 8)

    def real(self, words, lanes: int):
        """The elements as float64."""
        ir, b = self.ir, self.b
        if self.dtype == torch.bfloat16:
            i32 = self.shape(ir.IntType(32), lanes)
            words = b.shl(b.zext(words, i32), self.constant(i32, 16))
        if self.dtype == torch.float16:
            value = half_to_float(b, words, lambda kind: self.shape(kind, lanes))
        else:
            value = b.bitcast(words, self.shape(self.f64 if self.wide else ir.FloatType(), lanes))
        return value if self.wide else b.fpext(value, self.shape(self.f64, lanes))

    def put(self, terms, i, value) -> None:
        pointer = self.b.gep(self.b.inttoptr(terms, self.f64.as_pointer()), [i])
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=8)

    def store(self, record, k: int, value) -> None:
        pointer = self.b.inttoptr(record, self.i64.as_pointer())
        self.b.store(value, self.b.gep(pointer, [self.word(k)]), align=8)

    def largest(self, x, y):
        return self.b.select(self.b.icmp_unsigned(">", x, y), x, y)

    def smallest(self, x, y):
        return self.b.select(self.b.icmp_unsigned("<", x, y), x, y)

    def folded(self, merge: Callable, vector):
        """All lanes merged, halves at a time."""
        while vector.type.count > 1:
            half = vector.type.count // 2
            parts = []
            for start in (0, half):
                mask = self.ir.Constant(self.ir.VectorType(self.ir.IntType(32), half), list(range(start, start + half)))
                parts.append(self.b.shuffle_vector(vector, self.ir.Constant(vector.type, self.ir.Undefined), mask))
            vector = merge(*parts)
        return self.b.extract_element(vector, self.ir.Constant(self.ir.IntType(32), 0))

    def spread(self, kind, start, lanes: int):
        if isinstance(start, int | float):
            return self.constant(self.shape(kind, lanes), start)
        return start if lanes == 1 else self.splat(start, lanes)

    def splat(self, value, lanes: int):
        kind, i32 = self.ir.VectorType(value.type, lanes), self.ir.IntType(32)
        one = self.b.insert_element(self.ir.Constant(kind, self.ir.Undefined), value, self.ir.Constant(i32, 0))
        mask = self.ir.Constant(self.ir.VectorType(i32, lanes), [0] * lanes)
        return self.b.shuffle_vector(one, self.ir.Constant(kind, self.ir.Undefined), mask)

    def shape(self, scalar, lanes: int):
        return scalar if lanes == 1 else self.ir.VectorType(scalar, lanes)

    def constant(self, kind, value):
        return self.ir.Constant(kind, [value] * kind.count if isinstance(kind, self.ir.VectorType) else value)

    def word(self, value: int):
        return self.ir.Constant(self.i64, value)
