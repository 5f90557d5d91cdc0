"""Device functions under what their names stand for, recorded as traces, and the arrays that they read and write."""

from __future__ import annotations

import linecache
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from . import _operations
from ._trace import RecordedFunction, Trace, Traced

# Columns of a chunk: row of the pointers, first element, elements, global index of the first.
CHUNK_FIELD_COUNT = 4
# Bytes, those of the widest vector: what streams begins at multiples of it.
STREAMING_STORE_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class PointerTableFunction:
    """A traced device function with the layout of the table of pointers that it reads and writes."""

    trace: Trace  # what is computed per element, of inputs ("constant", k) and those of `RANDOM_STREAM_INPUT_NAMES`
    column_count: int  # of the table of pointers
    constant_count: int = 0  # numbers per row, of 32 or 64 bits as the inputs are
    # (low and high half of a row's key, global index) -> an element's `RANDOM_STREAM_INPUT_NAMES`, if it draws
    random_stream_function: RecordedFunction | None = None
    random_counter_step: int = 0  # by which the counters of neighbours differ
    block_size: int | None = None  # elements of a block, if there are any
    has_partial_blocks: bool = False  # whether a chunk's last block may be shorter; then no array has one per block
    exceeds_caches: bool = False  # whether arrays lie in no cache: lines even of a few are asked for, further ahead
    # Whether what is stored goes past the caches, which then need not read its old contents first. Arrays begin at
    # multiples of `STREAMING_STORE_ALIGNMENT_BYTES`, and none is read and stored.
    uses_nontemporal_stores: bool = False
    # Whether the kernel is so long that the compiler's time counts more than the kernel's.
    skips_compiler_optimization: bool = False

    @property
    def sum_column_count(self) -> int:
        """Columns of the sums of chunks."""
        return max(CHUNK_FIELD_COUNT, len(self.trace.sums))

    def make_cache_key(self) -> str:
        """Return a key of the instructions, which omits the processor and the sources of `kernels`."""
        start = self.random_stream_function
        stream = start and (start.trace.digest(), start.results)
        rest = {name: value for name, value in vars(self).items() if name not in ("trace", "random_stream_function")}
        return repr((self.trace.digest(), sorted(self.trace.rare_masks), stream, rest))


def bind_free_variables(function: Callable, values: Mapping[str, object]) -> Callable:
    """Return a device function in which free names, and those of functions that it calls, have the given values.

    >>> def scaled(x):
    ...     return x * FACTOR
    >>> bind_free_variables(scaled, {"FACTOR": 3})(2)
    6
    """
    return _copy_with_free_variables(function, values, {})


def _copy_with_free_variables(
    function: Callable, values: Mapping[str, object], copy_by_function: dict[Callable, Callable]
) -> Callable:
    if function not in copy_by_function:
        assert isinstance(function, types.FunctionType)
        namespace = dict(function.__globals__)
        cells = tuple(types.CellType() for _ in function.__code__.co_freevars)
        copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__ = function.__kwdefaults__
        copy_by_function[function] = copy
        for name in function.__code__.co_names:
            value = values.get(name, namespace.get(name))
            if _is_device_function(value):
                namespace[name] = _copy_with_free_variables(value, values, copy_by_function)
            elif name in values:
                namespace[name] = value
        for name, cell, held in zip(function.__code__.co_freevars, cells, function.__closure__ or ()):
            value = values.get(name, held.cell_contents)
            cell.cell_contents = (
                _copy_with_free_variables(value, values, copy_by_function) if _is_device_function(value) else value
            )
    return copy_by_function[function]


def _is_device_function(value: object) -> TypeGuard[types.FunctionType]:
    """Return whether what a name stands for is a device function, rather than an operation, a number or a recorder."""
    return isinstance(value, types.FunctionType) and value.__module__ not in (Trace.__module__, _operations.__name__)


_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
_LANGUAGE_RULES_TEXT = (
    "a device function is written once for every processor, in + - * / and comparisons of values, & | ~ of masks, and "
    "select, floor, sqrt, divide, maximum and sign_of of halfulp.kernels; what torch or math compute comes in as its "
    "constants"
)


def call_users_function(function: Callable, *arguments: Any) -> Any:
    """Call a device function that a user wrote with traced values; a TypeError over what it lacks names the line."""
    try:
        return function(*arguments)
    except (TypeError, AttributeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames[1:] if not frame.filename.startswith(_PACKAGE_FOLDER)]
        if not own:
            raise  # a function of the library itself
        line = linecache.getline(own[-1].filename, own[-1].lineno or 0).strip()
        where = f"{own[-1].filename}, line {own[-1].lineno}" + (f", {line!r}" if line else "")
        raise TypeError(f"{where}: {error}; {_LANGUAGE_RULES_TEXT}") from error


# Inputs of whoever draws: what the start of a stream of random words gives.
RANDOM_STREAM_INPUT_NAMES = (("counter", 0), ("own", 0))


class ElementTraceBuilder:
    """The trace of one element of a table of pointers, and the values that a device function takes."""

    def __init__(self, column_count: int, constant_count: int = 0, constant_kind: str = "f32") -> None:
        self.trace = Trace(torch.float32)
        emit = self.trace.emit
        self.index = emit("index", (), None, "index")
        self.arrays = [emit("address", (), j, "address") for j in range(column_count)]
        self.constants = [emit("input", (), ("constant", k), constant_kind) for k in range(constant_count)]

    def emit_block_index(self) -> Traced:
        """Return the index of the element's block."""
        return self.trace.emit("block", (), None, "block")

    @property
    def random_stream_inputs(self) -> tuple[Traced, Traced]:
        """Return the element's counter in its stream of random words, and the stream's own word."""
        counter, own = (self.trace.emit("input", (), name, "w32") for name in RANDOM_STREAM_INPUT_NAMES)
        return counter, own

    def add_input(self, name: str, kind: str = "f32") -> Traced:
        """Return an input by a name of its own."""
        return self.trace.emit("input", (), name, kind)


def record_word_function(function: Callable, *kinds: str) -> RecordedFunction:
    """Return a device function of words ("w32", "w64") with one result, or several, recorded."""
    trace = Trace(torch.float32)
    found = function(*(trace.emit("input", (), k, kind) for k, kind in enumerate(kinds)))
    results = found if isinstance(found, tuple) else (found,)
    return RecordedFunction(trace, tuple(result.number for result in results))
