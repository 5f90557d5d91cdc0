"""Rows of matrices reduced column by column, as machine code: blocks of rows in registers, then what they came to."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .._trace import Trace, record
from ._instructions import Instructions, size_of
from ._loop import Loop, _dispatcher, _intrinsic_of, _native_lanes

ACROSS = 32  # lanes that the rows of a matrix with fewer columns are dealt to, whatever the processor's vectors
BLOCK = 16  # rows that a step takes up one after another before they are joined to what came before


@dataclass(frozen=True)
class Fold:
    """A reduction in pieces, functions of float64 values.

    Attributes:
        step: a block's state and a row's components -> the state from there on.
        join: what is held and a block's state -> what is held from there on.
        merge: what two lanes hold -> what one holds from there on.
        close: what is held in the end, and a number of the table -> the result's components.
        held: how many values are held, and in a state.
        start: the first of both before the first row; the others are zero.
    """

    step: Callable
    join: Callable
    merge: Callable
    close: Callable
    held: int
    start: float


def compile_fold(
    name: str, fold: Fold, stored: Sequence[torch.dtype], written: Sequence[torch.dtype], shape: str
) -> Callable:
    """A function (first segment, last segment, table address) that reduces segments of rows of matrices.

    Args:
        name: for the cache.
        fold: the pieces.
        stored: dtype in memory of each of a row's components.
        written: of each of the result's.
        shape: of the matrices: "line" (one column), "narrow" (fewer than ACROSS), "wide" (at least as many).

    The table is an int64 array: rows and columns of a matrix, rows of a segment, segments of a matrix, rows that lie
    side by side in the lanes of a narrow matrix (at most ACROSS / columns; ACROSS of a line), elements in all, the
    number for `close`; then the addresses of the matrices' components, which lie one after another without gaps, and of
    the results', one row for each segment.
    """
    held = fold.held
    pieces = tuple(
        record(piece, torch.float64, inputs)
        for piece, inputs in (
            (fold.step, held + len(stored)),
            (fold.join, 2 * held),
            (fold.merge, 2 * held),
            (fold.close, held + 1),
        )
    )
    pieces = tuple((trace, [_number(trace, value) for value in values]) for trace, values in pieces)
    told = [(trace.digest(), numbers) for trace, numbers in pieces]
    key = hashlib.sha256(repr((told, fold.start, tuple(stored), tuple(written), shape)).encode()).hexdigest()
    loop = {"line": _Line, "narrow": _Narrow, "wide": _Wide}[shape]
    body = _intrinsic_of(lambda builder: loop(builder, pieces, fold.start, tuple(stored), tuple(written)))

    def run(first, last, table):
        body(first, last, table)

    return _dispatcher(run, name, key + _own_source())


@functools.cache
def _own_source() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _number(trace: Trace, value: object) -> int:
    return value.number if hasattr(value, "number") else trace.emit("add", (value, 0.0)).number


class _Reduction(Loop):
    """What both shapes of matrices share."""

    def __init__(self, builder, pieces: tuple, start: float, stored: tuple, written: tuple) -> None:
        self.step, self.join, self.merge, self.close = pieces
        super().__init__(builder, self.step[0], tuple(self.step[1]), stored, written)
        self.begin = [start] + [0.0] * (len(self.join[1]) - 1)

    def build(self, first, last, table) -> None:
        b = self.b
        words = b.inttoptr(table, self.i64.as_pointer())
        read = lambda k: b.load(b.gep(words, [self.word(k)]))  # noqa: E731
        self.rows, self.columns, per_segment, segments, self.several, self.total = (read(k) for k in range(6))
        self.number = b.sitofp(read(6), self.real)
        addresses = [read(7 + k) for k in range(len(self.stored) + len(self.written))]
        self.sources, self.targets = addresses[: len(self.stored)], addresses[len(self.stored) :]
        self.prepare()
        with self.loop(first, last, self.word(1)) as segment:
            matrix = b.sdiv(segment, segments)
            top = b.mul(b.sub(segment, b.mul(matrix, segments)), per_segment)
            start = b.mul(b.add(b.mul(matrix, self.rows), top), self.columns)
            self.segment(start, self.lesser(b.sub(self.rows, top), per_segment), b.mul(segment, self.columns))

    def prepare(self) -> None:
        """What is made once."""

    def segment(self, start, rows, out) -> None:
        """The rows from element `start` on into the row of results at element `out`."""
        raise NotImplementedError

    def lesser(self, x, y):
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def run(self, piece: tuple, lanes: int, values: list) -> list:
        """A piece's results."""
        made = Instructions(self.b, piece[0], lanes).run(values)
        return [made[number] for number in piece[1]]

    def spread(self, value, lanes: int):
        """A scalar in all lanes."""
        if lanes == 1:
            return value
        b, nothing = self.b, self.ir.Constant(self.ir.VectorType(value.type, lanes), self.ir.Undefined)
        return b.shuffle_vector(
            b.insert_element(nothing, value, self.ir.Constant(self.ir.IntType(32), 0)),
            nothing,
            self.places([0] * lanes),
        )

    def places(self, numbers: list):
        """Lanes, for a shuffle."""
        return self.ir.Constant(self.ir.VectorType(self.ir.IntType(32), len(numbers)), numbers)

    def carried(self, low, high, step: int, begin: list, body: Callable) -> list:
        """What values become in a counting loop, in which body(counter, values) gives the next ones."""
        b, before = self.b, self.b.block
        head, inner, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(self.i64)
        values = [b.phi(value.type) for value in begin]
        for phi, value in zip((i, *values), (low, *begin)):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", i, high), inner, done)
        b.position_at_end(inner)
        after = (b.add(i, self.word(step)), *body(i, values))
        for phi, value in zip((i, *values), after):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(done)
        return values

    def reduce(self, lanes: int, turns, load: Callable) -> list:
        """What the vectors load(0) ... load(turns - 1) come to."""
        maker = Instructions(self.b, self.trace, lanes)
        begin = [maker.constant(maker.real, value) for value in self.begin]

        def block(first, held: list) -> list:
            last = self.lesser(self.b.add(first, self.word(BLOCK)), turns)
            row = lambda turn, state: self.run(self.step, lanes, [*state, *load(turn)])  # noqa: E731
            state = self.carried(first, last, 1, begin, row)
            return self.run(self.join, lanes, [*held, *state])

        return self.carried(self.word(0), turns, BLOCK, begin, block)

    def finish(self, lanes: int, held: list, at) -> None:
        """Close and store from element `at` on."""
        maker = Instructions(self.b, self.trace, lanes)
        values = self.run(self.close, lanes, [*held, self.spread(self.number, lanes)])
        for target, dtype, value in zip(self.targets, self.written, values):
            maker.store((target, at), dtype, value)


class _Wide(_Reduction):
    """Columns in vectors, the last of which overlap the ones before."""

    def segment(self, start, rows, out) -> None:
        b = self.b
        # Four native vectors at once hide the latency of the chain of sums.
        lanes = 4 * _native_lanes(torch.float64)
        maker = Instructions(self.b, self.trace, lanes)
        with self.loop(self.word(0), self.columns, self.word(lanes)) as i:
            i = self.lesser(i, b.sub(self.columns, self.word(lanes)))
            top = b.add(start, i)

            def load(row) -> list:
                at = b.add(top, b.mul(row, self.columns))
                return [maker.load((source, at), dtype) for source, dtype in zip(self.sources, self.stored)]

            self.finish(lanes, self.reduce(lanes, rows, load), b.add(out, i))


class _Narrow(_Reduction):
    """Several rows in a vector, and in the end the lanes of a column joined by halves."""

    def prepare(self) -> None:
        b = self.b
        self.width = b.mul(self.several, self.columns)
        kinds = [neutral.type for neutral in self.neutral()]
        with b.goto_entry_block():
            self.copies = [b.alloca(kind, size=self.word(ACROSS)) for kind in kinds]
            # Twice as many, since a vector is read from any lane on.
            self.scratch = [b.alloca(self.ir.DoubleType(), size=self.word(2 * ACROSS)) for _ in self.begin]
        leading = b.ctlz(b.sub(self.several, self.word(1)), self.ir.Constant(self.ir.IntType(1), 0))
        self.levels = b.sub(self.word(64), leading)

    def segment(self, start, rows, out) -> None:
        b = self.b
        count = b.mul(rows, self.columns)
        turns = b.sdiv(b.add(count, b.sub(self.width, self.word(1))), self.width)
        self.conclude(self.reduce(ACROSS, turns, lambda turn: self.vector(start, count, b.mul(turn, self.width))), out)

    def conclude(self, held: list, out) -> None:
        """Join the lanes of each column, and write the results."""
        b = self.b
        self.keep(self.merged(held))
        with self.loop(self.word(0), self.columns, self.word(1)) as column:
            self.finish(1, [b.load(b.gep(part, [column])) for part in self.scratch], b.add(out, column))

    def vector(self, start, count, offset) -> list:
        """The components of `width` elements from an offset on; where memory or the segment ends before, of a copy."""
        b, maker = self.b, Instructions(self.b, self.trace, ACROSS)
        at, left = b.add(start, offset), b.sub(count, offset)
        whole = b.icmp_signed("<=", self.width, left)
        readable = b.icmp_signed("<=", b.add(at, self.word(ACROSS)), self.total)
        direct = b.and_(whole, readable)
        with b.if_then(b.not_(direct), likely=False), b.if_else(readable) as (near, far):
            with near:
                self.copy_vector(at, self.lesser(self.width, left))
            with far:
                self.copy(at, self.lesser(self.width, left))
        first, found = self.word(0), []
        for source, copy, dtype in zip(self.sources, self.copies, self.stored):
            base = b.add(source, b.mul(at, self.word(size_of(dtype))))
            base = b.select(direct, base, b.ptrtoint(copy, self.i64))
            found.append(maker.load((base, first), dtype))
        return found

    def copy_vector(self, at, count) -> None:
        """`count` elements of a whole vector, and in its other lanes what changes nothing."""
        b, wanted = self.b, self.lanes_below(count)
        for source, copy, neutral, dtype in zip(self.sources, self.copies, self.neutral(), self.stored):
            kind, size = self.ir.VectorType(neutral.type, ACROSS), size_of(dtype)
            elements = b.inttoptr(b.add(source, b.mul(at, self.word(size))), kind.as_pointer())
            value = b.select(wanted, b.load(elements, align=size), self.ir.Constant(kind, [neutral.constant] * ACROSS))
            b.store(value, b.bitcast(copy, kind.as_pointer()), align=size)

    def copy(self, at, count) -> None:
        """The same where a vector would end beyond memory."""
        b = self.b
        for source, copy, neutral in zip(self.sources, self.copies, self.neutral()):
            elements = b.gep(b.inttoptr(source, neutral.type.as_pointer()), [at])
            with self.loop(self.word(0), self.word(ACROSS), self.word(1)) as k:
                b.store(neutral, b.gep(copy, [k]))
            with self.loop(self.word(0), count, self.word(1)) as k:
                b.store(b.load(b.gep(elements, [k])), b.gep(copy, [k]))

    def neutral(self) -> list:
        """Components that change nothing, as words in memory."""
        found = []
        for k, dtype in enumerate(self.stored):
            value = torch.tensor(0.0 if k else self.begin[0], dtype=dtype, device="cpu")
            bits = 8 * size_of(dtype)
            found.append(self.ir.Constant(self.ir.IntType(bits), value.view(getattr(torch, f"int{bits}")).item()))
        return found

    def lanes_below(self, count):
        """Which lanes come before one."""
        lanes = self.ir.Constant(self.ir.VectorType(self.i64, ACROSS), list(range(ACROSS)))
        return self.b.icmp_signed("<", lanes, self.spread(count, ACROSS))

    def merged(self, held: list) -> list:
        """Merge the rows in the lanes into one row: the second half into the first, and so on."""
        b, maker = self.b, Instructions(self.b, self.trace, ACROSS)

        def halve(_, values: list) -> list:
            rows, *held = values
            half = b.lshr(b.add(rows, self.word(1)), self.word(1))
            self.keep(held)
            base = [b.ptrtoint(b.gep(part, [b.mul(half, self.columns)]), self.i64) for part in self.scratch]
            other = [maker.load((address, self.word(0)), torch.float64) for address in base]
            mask = self.lanes_below(b.mul(b.sub(rows, half), self.columns))
            pairs = self.run(self.merge, ACROSS, [*held, *other])
            return [half, *(b.select(mask, new, old) for new, old in zip(pairs, held))]

        return self.carried(self.word(0), self.levels, 1, [self.several, *held], halve)[1:]

    def keep(self, held: list) -> None:
        """Write lanes to memory."""
        maker = Instructions(self.b, self.trace, ACROSS)
        for part, value in zip(self.scratch, held):
            maker.store((self.b.ptrtoint(part, self.i64), self.word(0)), torch.float64, value)


class _Line(_Narrow):
    """One column: the halves lie in registers."""

    def conclude(self, held: list, out) -> None:
        half = ACROSS
        while half > 1:
            half //= 2
            low, high = ([self.part(value, first, half) for value in held] for first in (0, half))
            held = self.run(self.merge, half, [*low, *high])
        self.finish(1, held, out)

    def part(self, value, first: int, lanes: int):
        """Some lanes of a vector; one of them as a scalar."""
        if lanes == 1:
            return self.b.extract_element(value, self.ir.Constant(self.ir.IntType(32), first))
        return self.b.shuffle_vector(value, value, self.places(list(range(first, first + lanes))))
