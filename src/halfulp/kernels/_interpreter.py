"""A recorded device function on whole tensors: the reference of compiled kernels, on any device.

Words are signed integers of their width, whose sums and products wrap around; numbers stay Python's until they meet a
tensor, whose dtype they take.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from . import _trace
from ._canary import has_float64, to_float64
from ._threads import keeping_subnormals
from ._trace import Trace

_DTYPE_BY_KIND = {"f32": torch.float32, "f64": torch.float64, "w32": torch.int32, "w64": torch.int64}
_STORAGE_DTYPE_BY_BITS = {4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_LEAST_SIGNED_WORD_BY_KIND = {"w32": -(1 << 31), "w64": -(1 << 63)}
_UNSIGNED_COMPARISONS = ("word_lt", "word_gt", "word_le", "word_ge")
_TORCH_OPERATOR_BY_OPERATION: dict[str, Callable[..., Any]] = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_},
    **{"lt": operator.lt, "gt": operator.gt, "le": operator.le, "ge": operator.ge, "eq": operator.eq},
    **{"ne": operator.ne, "xor": operator.xor, "neg": operator.neg, "abs": torch.abs, "not": operator.invert},
    **{"shl": torch.bitwise_left_shift, "sar": torch.bitwise_right_shift},
    **{"rint": torch.round, "floor": torch.floor, "div": torch.div},
}


def _multiply_packed_high16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    high = (a.to(torch.int64) >> 16 & 0xFFFF) * (b.to(torch.int64) >> 16 & 0xFFFF) & 0xFFFF0000
    return (high | (a & 0xFFFF).to(torch.int64) * (b & 0xFFFF) >> 16).to(torch.int32)


# Which torch has for tensors alone: a quotient by a number would be a product with its inverse on CUDA.
_TENSOR_FUNCTION_BY_OPERATION: dict[str, Callable[..., torch.Tensor]] = {
    "sqrt": _trace.square_root,
    "product_error": _trace.product_error,
    "to_float64": to_float64,
    "to_float32": lambda x: x.to(torch.float32),
    "low_word": lambda x: x.to(torch.int32),
    "high_word": lambda x: (x >> 32).to(torch.int32),
    "widen": lambda x: x.to(torch.int64) & 0xFFFFFFFF,
    "to_real": lambda x: x.to(torch.float32),
    "div": torch.div,
    "multiply_add": lambda a, b, c: a * b + c,
    "word_mulh16": _multiply_packed_high16,
}


@keeping_subnormals()
def run_trace_on_tensors(
    trace: Trace,
    arrays: Mapping[int, torch.Tensor] | Sequence[torch.Tensor],
    inputs: Mapping[Any, torch.Tensor | float] | None = None,
    results: Sequence[int] = (),
    block: int | None = None,
) -> tuple[list[torch.Tensor], list[float]]:
    """Run a trace on all elements at once: what it stores is written, in place.

    `arrays` are the tensors at its addresses, by column, whose elements are counted in logical order, and `inputs` by
    name tensors of one value per element, or numbers for all; words are the signed integers of their bits. Returned are
    the values of the instructions `results`, in the shape of the first tensor that has a value per element, and what
    the trace sums up or finds the largest of, in order.
    """
    given = dict(inputs or {})
    arrays = dict(enumerate(arrays)) if isinstance(arrays, Sequence) else arrays
    plan = _plan_execution(trace, tuple(results))
    elements = [arrays[plan.column_by_line[address]] for address in plan.per_element_address_lines]
    like = next(x for x in [*elements, *given.values()] if isinstance(x, torch.Tensor))
    held = {k: arrays[column] for k, column in plan.column_by_line.items() if column in arrays}
    run = _TraceInterpreter(trace, held, given, like, block)
    values = run.run_instructions(plan)
    for (address, bits, per_block), number in trace.stores.items():
        run.store_words(run.arrays[address], bits, per_block, values[number], trace.kinds[number])
    for address, place, word, _ in trace.counter_additions:
        run.add_to_counters(run.arrays[address], *(run.restore_shape(values[k], trace.kinds[k]) for k in (place, word)))
    found = [run.restore_shape(values[number], trace.kinds[number]) for number in results]
    return found, run.compute_totals(values)


class _ExecutionPlan(NamedTuple):
    """The order in which a trace runs, which is the same for all tensors."""

    column_by_line: dict[int, int]  # of the addresses, by instruction
    per_element_address_lines: tuple[int, ...]  # of arrays with a value per element
    constant_by_line: dict[int, float]  # by instruction
    # The other instructions that are needed: number, operands, and the values that nothing needs afterwards.
    steps: list[tuple[int, tuple[int, ...], tuple[int, ...]]]


@functools.lru_cache(1024)
def _plan_execution(trace: Trace, results: tuple[int, ...]) -> _ExecutionPlan:
    lines, end = trace.lines, len(trace.lines)
    last = dict.fromkeys([*results, *trace.find_output_instructions()], end)
    for number in reversed(range(end)):
        if number in last:
            for operand in lines[number][1]:
                last.setdefault(operand, number)
    dead: dict[int, list[int]] = {}
    for operand, number in last.items():
        dead.setdefault(number, []).append(operand)
    numbers: dict[int, float] = {k: to_signed_integer(*lines[k][2]) for k in last if lines[k][0] == "word"}
    reals = {k: lines[k][2] for k in last if lines[k][0] == "constant"}
    numbers |= {k: float.fromhex(x if isinstance(x, str) else x[0]) for k, x in reals.items()}
    steps = [(k, lines[k][1], tuple(dead.get(k, ()))) for k in sorted(last.keys() - numbers.keys())]
    places = [(x[1][0], *x[2]) for x in lines if x[0] == "load"] + list(trace.stores)
    columns = {k: extra for k, (name, _, extra) in enumerate(lines) if name == "address"}
    elements = tuple(address for address, bits, one in places if not one and bits > 4)
    return _ExecutionPlan(columns, elements, numbers, steps)


@dataclass
class _TraceInterpreter:
    """The values of a trace's instructions on given tensors."""

    trace: Trace
    arrays: Mapping[int, torch.Tensor]  # by the instruction of their address
    inputs: Mapping[Any, Any]  # by name
    per_element_tensor: torch.Tensor  # one with a value per element
    block: int | None
    is_called_by_trace: bool = False  # by another trace, whose values are laid out already

    def __post_init__(self) -> None:
        self.device, self.element_count = self.per_element_tensor.device, self.per_element_tensor.numel()
        self.keeps_float64_on_cpu = not has_float64(self.device)  # float64 then lies on the CPU
        blocks = -(-self.element_count // self.block) if self.block else 0
        self.shape = (blocks, self.block) if self.block else (self.element_count,)
        self.stored_addresses = {address for address, *_ in self.trace.stores}

    def run_instructions(self, plan: _ExecutionPlan) -> dict[int, Any]:
        """Return the values that are results, stored or summed up."""
        values: dict[int, Any] = dict(plan.constant_by_line)
        trace = self.trace
        for number, operands, dead in plan.steps:
            operation, _, extra = trace.lines[number]
            given = [values[k] for k in operands]
            values[number] = self.compute_instruction(operation, trace.kinds[number], extra, operands, given)
            for k in dead:
                del values[k]
        return values

    def compute_instruction(
        self, operation: str, kind: str, extra: Any, operands: tuple[int, ...], given: list[Any]
    ) -> Any:
        """Compute one instruction."""
        if operation in ("address", "index", "block"):
            return None
        if operation == "input":
            return self.lay_out_blocks(self.inputs[extra])
        if operation == "load":
            return self.load_words(operands[0], *extra)
        if operation == "part":
            return given[0][extra]
        kinds = [self.trace.kinds[k] for k in operands]
        if self.keeps_float64_on_cpu and any(isinstance(x, torch.Tensor) and x.device != self.device for x in given):
            given = [x.cpu() if isinstance(x, torch.Tensor) else x for x in given]
        if operation == "call":
            return self.run_called_trace(extra, [self.to_tensor(x, one) for x, one in zip(given, kinds)])
        if not any(isinstance(x, torch.Tensor) for x in given) or operation in _TENSOR_FUNCTION_BY_OPERATION:
            given = [self.to_tensor(x, one) for x, one in zip(given, kinds)]
        if operation in _TENSOR_FUNCTION_BY_OPERATION:
            return _TENSOR_FUNCTION_BY_OPERATION[operation](*given)
        if operation in _UNSIGNED_COMPARISONS:
            given = [x ^ _LEAST_SIGNED_WORD_BY_KIND[kinds[0]] for x in given]
        name = operation.removeprefix("word_").removeprefix("mask_")
        if name in _TORCH_OPERATOR_BY_OPERATION:
            return _TORCH_OPERATOR_BY_OPERATION[name](*given)
        if operation == "bits":
            x = given[0]
            if kind[0] == "w" and x.device.type not in ("cpu", "meta"):
                # A GPU's own NaN has all low bits set, which the encoders do not allow.
                x = torch.where(x == x, x, torch.nan)
            return x.view(_DTYPE_BY_KIND[kind])
        if operation == "select":
            condition, a, b = given
            return torch.where(condition, a if isinstance(b, torch.Tensor) else self.to_tensor(a, kind), b)
        if operation == "word_shr":
            return _shift_right_logical(given[0], given[1], 32 if kind == "w32" else 64)
        if operation == "to_word":
            word = given[0].to(torch.int32)
            return word if kind == "w32" else word.to(torch.int64) & 0xFFFFFFFF
        if operation == "gather":
            return _trace.gather(self.trace.tables[extra], given[0])
        assert operation == "block_largest", f"an operation that tensors lack: {operation}"
        return (given[0] ^ _LEAST_SIGNED_WORD_BY_KIND[kind]).amax(1, keepdim=True) ^ _LEAST_SIGNED_WORD_BY_KIND[kind]

    def to_tensor(self, x: Any, kind: str) -> torch.Tensor:
        """Return a value as a tensor, of no dimension for a number."""
        if isinstance(x, torch.Tensor):
            return x
        # Filled in, not copied from the CPU, for which an accelerator would be waited for.
        device = torch.device("cpu") if kind == "f64" and self.keeps_float64_on_cpu else self.device
        return torch.full((), x, dtype=_DTYPE_BY_KIND[kind], device=device)

    def lay_out_blocks(self, x: Any, per_block: bool = False) -> Any:
        """Return a tensor with its blocks as rows, the last one filled up with zeros; without blocks it is one row."""
        if self.is_called_by_trace or not isinstance(x, torch.Tensor):
            return x
        if not self.block:
            return x.reshape(-1)
        if per_block:
            return x.reshape(-1, 1)
        padding = prod(self.shape) - self.element_count
        flat = torch.nn.functional.pad(x.reshape(-1), (0, padding)) if padding else x.reshape(-1)
        return flat.reshape(self.shape)

    def load_words(self, address: int, bits: int, per_block: bool) -> torch.Tensor:
        """Return the words of an array's elements."""
        codes = self.arrays[address].detach().view(_STORAGE_DTYPE_BY_BITS[bits])
        codes = torch.stack((codes & 15, codes >> 4), -1) if bits == 4 else codes
        words = self.lay_out_blocks(codes, per_block)
        if bits >= 32:
            return words.clone() if address in self.stored_addresses else words
        words = words.to(torch.int32)
        return words & 0xFFFF if bits == 16 else words

    def store_words(self, array: torch.Tensor, bits: int, per_block: bool, value: Any, kind: str) -> None:
        """Write the low bits of words to an array."""
        words = self.to_tensor(value, kind)
        if per_block:
            words = words.expand(self.shape)[:, 0] if words.dim() else words.expand(array.numel())
        else:
            words = words.expand(self.shape).reshape(-1)[: self.element_count]
        if bits <= 8:
            words = words & ((1 << bits) - 1)
        if bits == 4:
            words = words[::2] | words[1::2] << 4
        array.detach().view(_STORAGE_DTYPE_BY_BITS[bits]).copy_(words.reshape(array.shape))

    def add_to_counters(self, counters: torch.Tensor, places: torch.Tensor, words: torch.Tensor) -> None:
        """Add each element's word to its counter; row r of the counters takes the r-th equal part of the elements."""
        rows = counters.reshape(-1, counters.shape[-1])
        first = torch.arange(len(rows), dtype=torch.int64, device=self.device).mul_(rows.shape[1])
        places = places.reshape(len(rows), -1).to(torch.int64) + first[:, None]
        counters.view(-1).index_add_(0, places.reshape(-1), words.reshape(-1))

    def restore_shape(self, value: Any, kind: str) -> torch.Tensor:
        """Return a result in the shape of the tensors."""
        flat = self.to_tensor(value, kind).expand(self.shape).reshape(-1)[: self.element_count]
        return flat.reshape(self.per_element_tensor.shape)

    def compute_totals(self, values: Mapping[int, Any]) -> list[float]:
        """Return the sums, counts and largest values that the trace gathers, as floats."""
        found, widest = [], torch.float32 if self.keeps_float64_on_cpu else torch.float64
        for how, number in self.trace.sums:
            every = self.restore_shape(values[number], self.trace.kinds[number])
            if how == "max":
                total = every.amax() if every.numel() else every.new_zeros(())
                if every.dtype != torch.float64:  # these words are bits of numbers that are not negative
                    total = total.view(torch.float32).to(widest)
            else:
                total = every.sum(dtype=widest if how == "count" else None)
            found.append(total)
        return torch.stack(found).tolist() if found else []

    def run_called_trace(self, number: int, given: list[torch.Tensor]) -> list[Any]:
        """Return the results of a device function that the trace calls."""
        piece = self.trace.functions[number]
        inner = _TraceInterpreter(
            piece.trace, {}, dict(enumerate(given)), self.per_element_tensor, self.block, is_called_by_trace=True
        )
        values = inner.run_instructions(_plan_execution(piece.trace, piece.results))
        return [values[k] for k in piece.results]


def to_signed_integer(word: int, width: int) -> int:
    """Return the signed integer with a word's bits.

    >>> to_signed_integer(0xFFFFFFFF, 32)
    -1
    """
    half = 1 << width - 1
    return ((word & (2 * half - 1)) ^ half) - half


def _shift_right_logical(x: Any, n: Any, width: int) -> Any:
    """x >> n of a word, zeros coming in."""
    if isinstance(n, int):
        return torch.bitwise_right_shift(x, n) & ((1 << width - n) - 1) if n else x
    mask = ~torch.bitwise_left_shift(torch.bitwise_left_shift(torch.full_like(n, -1), width - 1 - n), 1)
    return torch.bitwise_right_shift(x, n) & mask
