"""A trace as machine code: one loop over elements, eight or sixteen at a time, in LLVM's vector types."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .._trace import Trace
from ..scalar._machine_code import machine_code
from ..scalar._processor import has_fused_vectors, vector_bits
from ._instructions import Instructions, hidden_one, size_of

LANES = 16  # neighbours that a broadcast operand repeats: the widest vector of any kernel
_HEADER = 2  # words of the table before the operands: elements per row, elements in all
_WORDS = 3  # words per operand: address, elements from row to row, elements from neighbour to neighbour
_LONG = 3000  # instructions from which calls cost less than the compiler's time for writing all out


def compile_trace(
    name: str, trace: Trace, results: Sequence[int], stored: Sequence[torch.dtype], written: Sequence[torch.dtype]
) -> Callable:
    """A function (first row, last row, table address) that runs a trace on rows of elements.

    Args:
        name: for the cache.
        trace: what to compute per element.
        results: the instructions whose values are written.
        stored: dtype in memory of each input (float16, bfloat16, float32, float64).
        written: dtype in memory of each result; the value must be one of it, or is rounded to nearest.

    The table is an int64 array: row length, element count, then for each input and each result address, row stride and
    neighbour stride (0 or 1). An input with neighbour stride 0 must hold LANES equal values from each row's address.
    """
    key = hashlib.sha256(repr((trace.digest(), tuple(results), tuple(stored), tuple(written))).encode()).hexdigest()
    body = _intrinsic_of(lambda builder: Loop(builder, trace, tuple(results), tuple(stored), tuple(written)))

    def run(first, last, table):
        body(first, last, table)

    return _dispatcher(run, name, key)


def _dispatcher(run: Callable, name: str, key: str) -> Callable:
    import numba

    from ..scalar._pipeline import KernelCompiler

    run.__name__ = run.__qualname__ = f"{name}_{key[:16]}"
    compiler = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, pipeline_class=KernelCompiler)
    dispatcher = compiler(run)
    return machine_code(dispatcher, name, key + _source(), "void(int64, int64, int64)")


@functools.cache
def _source() -> str:
    here = Path(__file__)
    files = (here, here.with_name("_instructions.py"), here.with_name("_half.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _intrinsic_of(loop: Callable) -> Callable:
    from numba.core import types
    from numba.extending import intrinsic

    @intrinsic
    def body(typing, first, last, table):
        def codegen(context, builder, signature, arguments):
            loop(builder).build(*arguments)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return body


def _native_lanes(dtype: torch.dtype) -> int:
    return vector_bits() // (64 if dtype == torch.float64 else 32)


class Loop:
    """Rows, then vectors of neighbours, then what is left one by one."""

    def __init__(self, builder, trace: Trace, results: tuple, stored: tuple, written: tuple) -> None:
        from llvmlite import ir

        self.ir, self.b, self.trace = ir, builder, trace
        self.results, self.stored, self.written = results, stored, written
        self.wide = trace.dtype == torch.float64
        self.real = ir.DoubleType() if self.wide else ir.FloatType()
        self.i64 = ir.IntType(64)
        self.calls = trace.size() > _LONG

    def word(self, value: int):
        return self.ir.Constant(self.i64, value)

    def build(self, first, last, table) -> None:
        b, lanes = self.b, _native_lanes(self.trace.dtype)
        self.hide_ones(lanes)
        words = b.inttoptr(table, self.i64.as_pointer())
        read = lambda k: b.load(b.gep(words, [self.word(k)]))  # noqa: E731
        per_row, total = read(0), read(1)
        operands = []
        for k in range(len(self.stored) + len(self.written)):
            operands.append(tuple(read(_HEADER + _WORDS * k + j) for j in range(_WORDS)))
        with self.loop(first, last, self.word(1)) as row:
            start = b.mul(row, per_row)
            left = b.sub(total, start)
            count = b.select(b.icmp_signed("<", left, per_row), left, per_row)
            bases = [
                b.add(address, b.mul(b.mul(row, step), self.word(size_of(dtype))))
                for (address, step, _), dtype in zip(operands, self.stored + self.written)
            ]
            whole = b.mul(b.sdiv(count, self.word(lanes)), self.word(lanes))
            with self.loop(self.word(0), whole, self.word(lanes)) as i:
                self.element(lanes, [(base, b.mul(i, near)) for base, (_, _, near) in zip(bases, operands)])
            with b.if_then(b.icmp_signed("<", whole, count)):
                self.rest(lanes, bases, [near for _, _, near in operands], whole, count)

    def rest(self, lanes: int, bases: list, nears: list, whole, count) -> None:
        """The last neighbours of a row, fewer than a vector: copied, the last of them repeated, and back."""
        b, last = self.b, self.b.sub(count, self.word(1))
        kinds = [self.ir.IntType(8 * size_of(dtype)) for dtype in self.stored + self.written]
        with b.goto_entry_block():
            copies = [b.alloca(kind, size=self.word(lanes)) for kind in kinds]
        inputs = list(zip(kinds, copies, bases, nears))[: len(self.stored)]
        outputs = list(zip(kinds, copies, bases))[len(self.stored) :]
        with self.loop(self.word(0), self.word(lanes), self.word(1)) as j:
            i = b.add(whole, j)
            i = b.select(b.icmp_signed("<", i, count), i, last)
            for kind, copy, base, near in inputs:
                b.store(b.load(b.gep(b.inttoptr(base, kind.as_pointer()), [b.mul(i, near)])), b.gep(copy, [j]))
        self.element(lanes, [(b.ptrtoint(copy, self.i64), self.word(0)) for copy in copies])
        with self.loop(whole, count, self.word(1)) as i:
            for kind, copy, base in outputs:
                value = b.load(b.gep(copy, [b.sub(i, whole)]))
                b.store(value, b.gep(b.inttoptr(base, kind.as_pointer()), [i]))

    def hide_ones(self, lanes: int) -> None:
        """A hidden 1 for a vector width that has fused operations."""
        self.ones: dict = {}
        kind = self.ir.VectorType(self.real, lanes)
        bits = lanes * (64 if self.wide else 32)
        if has_fused_vectors(bits):
            self.ones[lanes] = hidden_one(self.b, kind)

    def loop(self, low, high, step):
        """A counting loop as a context manager that yields the counter."""
        b = self.b

        @contextlib.contextmanager
        def made():
            before = b.block
            head, body, done = (b.append_basic_block(n) for n in ("head", "body", "done"))
            b.branch(head)
            b.position_at_end(head)
            i = b.phi(self.i64)
            i.add_incoming(low, before)
            b.cbranch(b.icmp_signed("<", i, high), body, done)
            b.position_at_end(body)
            yield i
            i.add_incoming(b.add(i, step), b.block)
            b.branch(head)
            b.position_at_end(done)

        return made()

    def element(self, lanes: int, places: list) -> None:
        """All instructions for `lanes` neighbours."""
        maker = Instructions(self.b, self.trace, lanes, self.ones.get(lanes), self.calls)
        values = maker.run([maker.load(place, dtype) for place, dtype in zip(places, self.stored)])
        for k, (number, dtype) in enumerate(zip(self.results, self.written)):
            maker.store(places[len(self.stored) + k], dtype, values[number])
