"""The builder of LLVM loops: vector lanes, types, memory of every dtype, float16, choices by class of number.

VFIXUPIMM replaces a number by a constant where another one is of some classes. It takes the place of a difference, a
comparison and a masked move in x where w - w == 0, else 0, which device functions write for finite numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .._device_function import STREAMING_STORE_ALIGNMENT_BYTES
from .._trace import Trace
from ._processor import has_cpu_features

# Four bits per class, from the lowest: quiet NaN, signaling NaN, zero, 1, -infinity, infinity, negative, positive.
# 0 keeps the number, 1 takes the one that is classified; 7 and 8 are -0 and 0.
_FIXUP_NOT_FINITE, _FIXUP_ZERO, _FIXUP_TAKE_FINITE = 0x00110011, 0x00000100, 0x11001100
_FIXUP_RESPONSE_BY_CONSTANT = {(0.0).hex(): 8, (-0.0).hex(): 7}


def match_select_to_fixup(trace: Trace, number: int) -> tuple[int, int, int] | None:
    """Return a select's kept and classified instruction and VFIXUPIMM's table; None if it does not choose by class."""
    lines, (condition, x, y) = trace.lines, trace.lines[number][1]
    if lines[condition][0] == "and":  # with a mask that is true, as it compares a word with itself
        left = [k for k in lines[condition][1] if lines[k][0] != "word_eq" or len({*lines[k][1]}) > 1]
        condition = left[0] if len(left) == 1 else condition
    if lines[condition][0] != "eq" or trace.kinds[lines[condition][1][0]] != "f32":
        return None
    first, second = lines[condition][1]
    name, operands, _ = lines[first]
    if name == "sub" and operands[0] == operands[1] and (first == second or _find_fixup_response(trace, second)):
        classified, classes, kept, other = operands[0], _FIXUP_NOT_FINITE, x, y
    elif _find_fixup_response(trace, second):
        classified, classes, kept, other = first, _FIXUP_ZERO, y, x
    else:
        return None
    response = _find_fixup_response(trace, other)
    if response is None:
        return (y, classified, _FIXUP_TAKE_FINITE) if classes == _FIXUP_NOT_FINITE and x == classified else None
    return kept, classified, classes * response


def has_fixup_instruction(lanes: int) -> bool:
    """Return whether the processor has the instruction for so many float32."""
    return (lanes == 16 and has_cpu_features("avx512f")) or (lanes == 8 and has_cpu_features("avx512f", "avx512vl"))


def write_fixup_instruction(b: Any, kept: Any, classified: Any, table: int) -> Any:
    """Write the instruction; `kept` are reals or words."""
    ir = b.ir
    lanes, i32, reals = kept.type.count, b.i32, classified.type
    mask = ir.IntType(lanes)
    given = [reals, reals, b.make_vector_type(i32, lanes), i32, mask, *([i32] if lanes == 16 else [])]
    name = f"llvm.x86.avx512.mask.fixupimm.ps.{32 * lanes}"
    function = b.b.module.globals.get(name) or ir.Function(b.b.module, ir.FunctionType(reals, given), name)
    values = [b.b.bitcast(kept, reals), classified, b.constant(given[2], table), ir.Constant(i32, 0)]
    values.append(ir.Constant(mask, (1 << lanes) - 1))
    current_rounding = [ir.Constant(i32, 4)] if lanes == 16 else []
    return b.b.bitcast(b.b.call(function, values + current_rounding), kept.type)


def _find_fixup_response(trace: Trace, number: int) -> int | None:
    """Return the response that gives a constant; None where there is none."""
    operation, _, extra = trace.lines[number]
    if operation == "word" and extra == (0, 32):
        return 8
    return _FIXUP_RESPONSE_BY_CONSTANT.get(extra) if operation == "constant" and isinstance(extra, str) else None


class VectorBuilder:
    """Writes LLVM instructions on scalars and vectors by llvmlite's builder; a value's type tells its lanes."""

    arguments_address: Any  # the address of a whole function's arguments, words of 64 bits

    def __init__(self, builder) -> None:
        from llvmlite import ir

        self.ir, self.b = ir, builder
        self.i16, self.i32, self.i64 = (ir.IntType(bits) for bits in (16, 32, 64))
        self.f16, self.f32, self.f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

    def make_vector_type(self, scalar, lanes: int):
        """Return the type of so many lanes of a scalar type; of one lane it is the scalar type."""
        return scalar if lanes == 1 else self.ir.VectorType(scalar, lanes)

    def make_type_of_kind(self, kind: str, lanes: int):
        """Return the type of so many lanes of a kind of values, as traces name kinds."""
        scalars = {"f32": self.f32, "f64": self.f64, "w32": self.i32, "w64": self.i64, "mask": self.ir.IntType(1)}
        return self.make_vector_type(scalars[kind], lanes)

    def make_type_like(self, value, scalar):
        """Return the type of a value's lanes with another scalar type."""
        return self.make_vector_type(scalar, count_lanes(value.type))

    def constant(self, kind, value):
        """Return a constant in all lanes of a type."""
        return self.ir.Constant(kind, [value] * kind.count if isinstance(kind, self.ir.VectorType) else value)

    def int64(self, value: int):
        """Return a constant of 64 bits."""
        return self.ir.Constant(self.i64, value)

    def make_undefined_vector(self, kind):
        """Return an undefined vector, to be filled lane by lane."""
        return self.ir.Constant(kind, self.ir.Undefined)

    def make_shuffle_mask(self, numbers: list[int]):
        """Return a constant vector of lane numbers, for a shuffle."""
        return self.ir.Constant(self.ir.VectorType(self.i32, len(numbers)), numbers)

    def splat(self, value, lanes: int):
        """Return a vector with a scalar in all lanes."""
        if lanes == 1:
            return value
        nothing = self.make_undefined_vector(self.make_vector_type(value.type, lanes))
        one = self.b.insert_element(nothing, value, self.ir.Constant(self.i32, 0))
        return self.b.shuffle_vector(one, nothing, self.make_shuffle_mask([0] * lanes))

    def extract_lanes(self, vector, first: int, lanes: int):
        """Extract some lanes of a vector, as a vector; a single one as a scalar."""
        if lanes == 1:
            return self.extract_lane(vector, first)
        return self.b.shuffle_vector(vector, vector, self.make_shuffle_mask(list(range(first, first + lanes))))

    def extract_lane(self, vector, k: int):
        """Extract one lane of a vector, as a scalar."""
        return self.b.extract_element(vector, self.ir.Constant(self.i32, k))

    def select_lesser(self, x, y):
        """Return the lesser of two signed integers."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def call_intrinsic(self, name: str, *values):
        """Return a function of reals that LLVM has an instruction for, such as "fma"."""
        kind = values[0].type
        lanes, suffix = count_lanes(kind), "f64" if get_lane_type(kind) == self.f64 else "f32"
        name = f"llvm.{name}.{suffix if lanes == 1 else f'v{lanes}{suffix}'}"
        declared = self.b.module.declare_intrinsic(name, fnty=self.ir.FunctionType(kind, [kind] * len(values)))
        return self.b.call(declared, values)

    @contextlib.contextmanager
    def loop(self, low, high, step: int, values: list | None = None) -> Iterator:
        """Return a counting loop over [low, high) as a context that yields the counter; `values` are carried.

        In the loop the list holds a turn's, what the body puts there is the next turn's, and behind it are the last.
        """
        b, before, values = self.b, self.b.block, [] if values is None else values
        head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(self.i64)
        phis = [b.phi(value.type) for value in values]
        for phi, value in zip((i, *phis), (low, *values)):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", i, high), body, done)
        b.position_at_end(body)
        values[:] = phis
        yield i
        for phi, value in zip((i, *phis), (b.add(i, self.int64(step)), *values), strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(done)
        values[:] = phis

    def allocate_stack(self, kind, count: int):
        """Allocate stack memory in the function's entry block for the whole call."""
        with self.b.goto_entry_block():
            memory = self.b.alloca(kind, size=self.int64(count))
        memory.align = STREAMING_STORE_ALIGNMENT_BYTES  # no vector lies in two cache lines
        return memory

    def prefetch_line(self, address, locality: int = 3) -> None:
        """Ask for the cache line at an address, which need not be one that can be read."""
        ir, module, name = self.ir, self.b.module, "llvm.prefetch.p0"
        byte = ir.IntType(8).as_pointer()
        takes = ir.FunctionType(ir.VoidType(), [byte, self.i32, self.i32, self.i32])
        function = module.globals.get(name) or ir.Function(module, takes, name)
        to_read, near, of_data = (ir.Constant(self.i32, value) for value in (0, locality, 1))
        self.b.call(function, [self.b.inttoptr(address, byte), to_read, near, of_data])

    def get_memory_type(self, dtype: torch.dtype):
        """Return the integer type of an element's size."""
        return self.ir.IntType(8 * get_element_bytes(dtype))

    def pointer(self, address, i, kind):
        """Return a pointer to element i of an array at an address, of a scalar or a vector type."""
        at = self.b.gep(self.b.inttoptr(address, get_lane_type(kind).as_pointer()), [i])
        return self.b.bitcast(at, kind.as_pointer())

    def load_word(self, address, k: int):
        """Load word k of a table of 64-bit integers."""
        return self.b.load(self.pointer(address, self.int64(k), self.i64))

    def load_bits(self, address, i, dtype: torch.dtype, lanes: int):
        """Load elements from index i of an array, as integers of their size."""
        kind = self.make_vector_type(self.get_memory_type(dtype), lanes)
        return self.b.load(self.pointer(address, i, kind), align=get_element_bytes(dtype))

    def load_reals(self, address, i, dtype: torch.dtype, kind):
        """Load elements from index i of an array as a type of float32 or float64, which tells how many."""
        return self.convert_to_reals(self.load_bits(address, i, dtype, count_lanes(kind)), dtype, get_lane_type(kind))

    def convert_to_reals(self, bits, dtype: torch.dtype, scalar):
        """Convert integers of a dtype's size to the float32 or float64 values that they encode."""
        b, own = self.b, self.f64 if dtype == torch.float64 else self.f32
        if dtype == torch.bfloat16:
            words = self.make_type_like(bits, self.i32)
            bits = b.shl(b.zext(bits, words), self.constant(words, 16))
        value = b.bitcast(bits, self.make_type_like(bits, self.f16 if dtype == torch.float16 else own))
        if dtype == torch.float16:  # exact; a NaN becomes a quiet one
            value = b.fpext(value, self.make_type_like(bits, own))
        if own == scalar:
            return value
        return (b.fptrunc if own == self.f64 else b.fpext)(value, self.make_type_like(bits, scalar))

    def store_reals(self, address, i, dtype: torch.dtype, value, exact: bool = False) -> None:
        """Write reals from place i of an array on, rounded to nearest; `exact` ones are numbers of the dtype."""
        wide = get_lane_type(value.type) == self.f64
        if dtype != torch.float64 and wide:
            value = self._to_float32(value, to_odd=dtype != torch.float32 and not exact)
        elif dtype == torch.float64 and not wide:
            value = self.b.fpext(value, self.make_type_like(value, self.f64))
        if dtype == torch.bfloat16:
            value = self._to_bfloat16_bits(value, exact)
        elif dtype == torch.float16:
            value = self.convert_to_float16_bits(value)
        self.b.store(value, self.pointer(address, i, value.type), align=get_element_bytes(dtype))

    def convert_to_float16_bits(self, value):
        """Round float32 to nearest, ties to even, as words of 16 bits that hold float16."""
        half = self.b.fptrunc(value, self.make_type_like(value, self.f16))
        return self.b.bitcast(half, self.make_type_like(value, self.i16))

    def _to_float32(self, value, to_odd: bool):
        """Convert float64 to float32, to nearest, or to odd if another rounding follows."""
        b = self.b
        near = b.fptrunc(value, self.make_type_like(value, self.f32))
        if not to_odd:
            return near
        words = self.make_type_like(value, self.i32)
        back, bits = b.fpext(near, value.type), b.bitcast(near, words)
        beyond = b.fcmp_ordered(">", self.call_intrinsic("fabs", back), self.call_intrinsic("fabs", value))
        below = b.sub(bits, b.zext(beyond, words))
        odd = b.or_(below, b.zext(b.fcmp_ordered("!=", back, value), words))
        return b.bitcast(odd, near.type)

    def _to_bfloat16_bits(self, value, exact: bool):
        b, words = self.b, self.make_type_like(value, self.i32)
        bits = b.bitcast(value, words)
        shown = b.lshr(bits, self.constant(words, 16))
        if exact:
            return b.trunc(shown, self.make_type_like(value, self.i16))
        half = b.add(b.and_(shown, self.constant(words, 1)), self.constant(words, 0x7FFF))
        high = b.lshr(b.add(bits, half), self.constant(words, 16))
        # A NaN whose payload lies in the lower half would become an infinity, and one of ones a zero.
        quiet = b.or_(shown, self.constant(words, 64))
        high = b.select(b.fcmp_unordered("uno", value, value), quiet, high)
        return b.trunc(high, self.make_type_like(value, self.i16))


def count_lanes(kind) -> int:
    """Return the number of lanes of a type."""
    return getattr(kind, "count", 1)


def get_lane_type(kind):
    """Return the type of a lane."""
    return getattr(kind, "element", kind)


def get_element_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of an element in memory."""
    return {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}.get(dtype, 8)
