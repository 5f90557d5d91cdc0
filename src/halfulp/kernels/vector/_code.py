"""Numbers in a function that is being written: Python's operators write LLVM's instructions, on scalars and vectors.

For kernels that branch and count, and so are no straight-line traces. Nothing is optimized here: LLVM folds what is
constant, and keeps variables in registers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._trace import Piece
from ._builder import VectorBuilder, lanes_of, scalar_of
from ._instructions import Instructions
from ._machine_function import Kernel, machine_function

_REVERSED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}


def compile_code(name: str, key: str, arguments: int, write: Callable[..., None]) -> Kernel:
    """Return a compiled function of so many integers of 64 bits, addresses mostly.

    Args:
        name: of the cache entry.
        key: whatever the instructions depend on, short of the sources of `kernels`.
        arguments: how many.
        write: (the code, *arguments as numbers) writes the instructions.

    >>> import numpy as np
    >>> def add_up(code, count, found):
    ...     total = code.variable(0)
    ...     with code.span(0, count) as i, code.when(i & 1 == 1):
    ...         total += i
    ...     code.memory(found, code.i64)[0] = total
    >>> found = np.zeros(1, np.int64)
    >>> compile_code("odd", "of the example", 2, add_up)(10, found.ctypes.data)
    >>> found
    array([25])
    """

    def written(builder: VectorBuilder, *values: Any) -> None:
        code = Code(builder)
        write(code, *(Number(code, value) for value in values))

    return machine_function(name, key, arguments, written)


class Code:
    """The function that is being written, at the place where the next instruction goes.

    Attributes:
        vectors: the builder of vectors.
        b: llvmlite's builder.
        i8, i16, i32, i64, f32, f64: types of memory and variables.
    """

    def __init__(self, vectors: VectorBuilder) -> None:
        self.vectors, self.b = vectors, vectors.b
        self.i8, self.i16, self.i32, self.i64 = (vectors.ir.IntType(bits) for bits in (8, 16, 32, 64))
        self.f32, self.f64 = vectors.f32, vectors.f64

    def number(self, value: Any, kind=None) -> Number:
        """Return a number or a constant; of 64 bits, or of a type."""
        if isinstance(value, Number):
            return value
        return Number(self, self.vectors.constant(self.i64 if kind is None else kind, value))

    def variable(self, start: Any, kind=None) -> Variable:
        """Return a number that can be changed, which starts at another."""
        number = self.number(start, kind)
        variable = Variable(self, self.vectors.allocate(number.kind, 1))
        variable.set(number)
        return variable

    def memory(self, address: Number, kind, row: int = 0) -> Memory:
        """Return the array of a type at an address, in rows of a length where places are pairs."""
        return Memory(self, address, kind, row)

    @contextlib.contextmanager
    def span(self, low: Any, high: Any, step: int = 1) -> Iterator[Number]:
        """Write what is repeated for every number from `low` to below `high`."""
        with self.vectors.loop(self.number(low).value, self.number(high).value, step) as i:
            yield Number(self, i)

    @contextlib.contextmanager
    def when(self, condition: Number) -> Iterator[None]:
        """Write what happens where a condition holds."""
        with self.b.if_then(condition.value):
            yield

    @contextlib.contextmanager
    def either(self, condition: Number) -> Iterator[tuple[Any, Any]]:
        """Write two contexts: what happens where a condition holds, and where it does not."""
        with self.b.if_else(condition.value) as ways:
            yield ways

    def prefetch(self, address: Number) -> None:
        """Ask for the cache line at an address, which need not be one that can be read.

        It comes into the second-level cache (locality 2), whose queue of pending lines is longer than the first's.
        """
        self.vectors.prefetch(address.value, 2)

    def run(self, piece: Piece, *values: Number) -> Number:
        """Return the first result of a recorded device function."""
        return self.run_all(piece, *values)[0]

    def run_all(self, piece: Piece, *values: Number) -> list[Number]:
        """Return the results of a recorded device function."""
        lanes = lanes_of(values[0].kind)
        computed = Instructions(self.b, piece.trace, lanes).run([value.value for value in values])
        return [Number(self, computed[number]) for number in piece.results]


class Number:
    """A number, a vector of numbers, or a mask. Integers of 64 bits have signs; of less bits they have none."""

    def __init__(self, code: Code, value: Any) -> None:
        self.code, self._value = code, value

    @property
    def value(self) -> Any:
        """LLVM's value."""
        return self._value

    @property
    def kind(self) -> Any:
        """LLVM's type."""
        return self.value.type

    @property
    def is_real(self) -> bool:
        """Whether it is a float32 or float64."""
        return scalar_of(self.kind) in (self.code.f32, self.code.f64)

    @property
    def is_signed(self) -> bool:
        """Whether it is an integer of 64 bits."""
        return scalar_of(self.kind) == self.code.i64

    def like(self, other: Any) -> Number:
        """Return another number, or a constant, as this one's type."""
        if not isinstance(other, Number):
            return self.code.number(other, self.kind)
        return other.spread(lanes_of(self.kind)) if lanes_of(other.kind) == 1 else other

    def spread(self, lanes: int) -> Number:
        """Return a vector of copies; a vector of so many lanes as it is."""
        if lanes_of(self.kind) == lanes:
            return self
        return Number(self.code, self.code.vectors.spread(self.value, lanes))

    def operate(self, other: Any, whole: str, real: str = "", turned: bool = False) -> Number:
        """Write an instruction on this and another number."""
        other = self.like(other)
        if lanes_of(other.kind) > lanes_of(self.kind):
            return self.spread(lanes_of(other.kind)).operate(other, whole, real, turned)
        first, second = (other, self) if turned else (self, other)
        return Number(self.code, getattr(self.code.b, real if self.is_real else whole)(first.value, second.value))

    def compare(self, sign: str, other: Any) -> Number:
        """Write a comparison; with NaN all but != are false."""
        other, b = self.like(other), self.code.b
        if lanes_of(other.kind) > lanes_of(self.kind):
            return other.compare(_REVERSED[sign], self)
        if self.is_real:
            found = (b.fcmp_unordered if sign == "!=" else b.fcmp_ordered)(sign, self.value, other.value)
        else:
            found = (b.icmp_signed if self.is_signed else b.icmp_unsigned)(sign, self.value, other.value)
        return Number(self.code, found)

    def __add__(self, other):
        return self.operate(other, "add", "fadd")

    def __sub__(self, other):
        return self.operate(other, "sub", "fsub")

    def __rsub__(self, other):
        return self.operate(other, "sub", "fsub", turned=True)

    def __mul__(self, other):
        return self.operate(other, "mul", "fmul")

    def __truediv__(self, other):
        return self.operate(other, "", "fdiv")

    def __floordiv__(self, other):
        """The whole quotient of integers that are not negative."""
        return self.operate(other, "udiv")

    def __and__(self, other):
        return self.operate(other, "and_")

    def __or__(self, other):
        return self.operate(other, "or_")

    def __xor__(self, other):
        return self.operate(other, "xor")

    def __lshift__(self, other):
        return self.operate(other, "shl")

    def __rlshift__(self, other):
        return self.operate(other, "shl", turned=True)

    def __rshift__(self, other):
        return self.operate(other, "ashr" if self.is_signed else "lshr")

    __radd__, __rmul__, __rand__, __ror__ = __add__, __mul__, __and__, __or__

    def __neg__(self):
        return Number(self.code, self.code.b.fneg(self.value)) if self.is_real else 0 - self

    def __invert__(self):
        """The other bits: of a mask, where it does not hold."""
        return Number(self.code, self.code.b.not_(self.value))

    def __lt__(self, other):
        return self.compare("<", other)

    def __le__(self, other):
        return self.compare("<=", other)

    def __gt__(self, other):
        return self.compare(">", other)

    def __ge__(self, other):
        return self.compare(">=", other)

    def __eq__(self, other):
        return self.compare("==", other)

    def __ne__(self, other):
        return self.compare("!=", other)

    def to(self, kind) -> Number:
        """Return a number as another type, its value kept where that type has it; lanes stay.

        Integers lose high bits or gain zeros, and become the nearest reals; reals are rounded to nearest, and cut to
        integers.
        """
        b, own, kind = self.code.b, scalar_of(self.kind), scalar_of(kind)
        target, reals = self.code.vectors.like(self.value, kind), (self.code.f32, self.code.f64)
        if own == kind:
            return Number(self.code, self.value)
        if self.is_real and kind in reals:
            convert = b.fpext if kind == self.code.f64 else b.fptrunc
        elif self.is_real:
            convert = b.fptosi
        elif kind in reals:
            convert = b.sitofp if self.is_signed else b.uitofp
        else:
            convert = b.zext if kind.width > own.width else b.trunc
        return Number(self.code, convert(self.value, target))

    def bits(self) -> Number:
        """Return a real's bits as an integer of its size."""
        kind = self.code.i64 if scalar_of(self.kind) == self.code.f64 else self.code.i32
        return Number(self.code, self.code.b.bitcast(self.value, self.code.vectors.like(self.value, kind)))

    def real(self) -> Number:
        """Return the real whose bits an integer of 32 or 64 bits has."""
        kind = self.code.f64 if self.is_signed else self.code.f32
        return Number(self.code, self.code.b.bitcast(self.value, self.code.vectors.like(self.value, kind)))

    def folded(self, merge: Callable[[Number, Number], Number]) -> Number:
        """Return a vector's lanes merged to one number, halves at a time."""
        vectors, value = self.code.vectors, self.value
        if lanes_of(value.type) == 1:
            return self
        while half := lanes_of(value.type) // 2:
            low, high = (Number(self.code, vectors.part(value, first, half)) for first in (0, half))
            value = merge(low, high).value
        return Number(self.code, vectors.lane(value, 0))


class Variable(Number):
    """A number that changes: it has one value at each place of the code."""

    @property
    def value(self) -> Any:
        """Its value here."""
        return self.code.b.load(self._value)

    def set(self, value: Any) -> None:
        """Give it another value."""
        self.code.b.store(self.like(value).value, self._value)

    def __iadd__(self, other):
        self.set(self + other)
        return self


class Memory:
    """An array in memory, read and written by place, or by row and place."""

    def __init__(self, code: Code, address: Number, kind: Any, row: int) -> None:
        self.code, self.address, self.kind, self._row = code, address, kind, row

    def _pointer(self, place: Any, kind: Any) -> Any:
        if isinstance(place, tuple):
            place = self.code.number(place[0]) * self._row + place[1]
        return self.code.vectors.pointer(self.address.value, self.code.number(place).value, kind)

    def _align(self) -> int:
        return {self.code.f32: 4, self.code.f64: 8}.get(self.kind) or max(1, self.kind.width // 8)

    def lanes(self, place: Any, lanes: int) -> Number:
        """Return neighbours as a vector, of one lane as a number."""
        kind = self.code.vectors.shape(self.kind, lanes)
        return Number(self.code, self.code.b.load(self._pointer(place, kind), align=self._align()))

    def __getitem__(self, place: Any) -> Number:
        return self.lanes(place, 1)

    def __setitem__(self, place: Any, value: Any) -> None:
        number = self.code.number(value, self.kind)
        self.code.b.store(number.value, self._pointer(place, number.kind), align=self._align())


def choose(condition: Number, x: Any, y: Any) -> Number:
    """Return x where a condition holds, else y; two constants are integers of 64 bits."""
    code = condition.code
    given = [value for value in (x, y) if isinstance(value, Number)]
    lanes = max(lanes_of(value.kind) for value in (condition, *given))
    kind = code.vectors.shape(scalar_of(given[0].kind) if given else code.i64, lanes)
    x, y = (code.number(value, kind).spread(lanes) for value in (x, y))
    return Number(code, code.b.select(condition.value, x.value, y.value))


def lesser(x: Any, y: Any) -> Number:
    """Return the lesser of two numbers; y where one is NaN."""
    return choose(x < y, x, y)


def larger(x: Any, y: Any) -> Number:
    """Return the larger of two numbers; y where one is NaN."""
    return choose(x > y, x, y)


def gathered(
    start: Number, end: Number, lanes: int, begin: Sequence[Number], merges: Sequence[Callable], turn: Callable
) -> list[Number]:
    """Return what elements [start, end) come to.

    Args:
        start, end: their places.
        lanes: elements of a vector.
        begin: what none come to, neutral under `merges`.
        merges: how two parts come to one; in any order the same.
        turn: (place, lanes) -> what the vector there is, for each of `merges`.
    """
    code = start.code
    whole = start + (end - start) // lanes * lanes
    many = [code.variable(value.spread(lanes)) for value in begin]
    few = [code.variable(value) for value in begin]
    for size, held, low, high in ((lanes, many, start, whole), (1, few, whole, end)):
        with code.span(low, high, size) as i:
            for variable, merge, value in zip(held, merges, turn(i, size), strict=True):
                variable.set(merge(value, variable))
    return [merge(wide.folded(merge), one) for merge, wide, one in zip(merges, many, few)]
