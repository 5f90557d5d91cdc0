"""Triton kernels over a table of pointers or whole tensors, and what every launch shares: the device, the first use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._canary import check_bits
from .._device_function import STREAM_INPUTS, Table
from .._engine import note_and_warn_once, note_fallback, use_reference_in_thread
from .._index_map import CHUNK_ELEMENTS
from .._operator import is_under_transform
from .._trace import Trace
from ._writer import COMPILE_OPTIONS, element_source, find_live_lines, load_module, module_source, word_function_source

_checked_kernels: dict[Hashable, Any] = {}


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a kernel runs on a device: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a table to a device without waiting for it: from pageable memory torch would synchronise the stream."""
    table = torch.from_numpy(array)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def find_checked_kernel(
    key: Hashable,
    name: str,
    device: torch.device,
    build: Callable[[], Any],
    run: Callable[[Any, torch.device], list[torch.Tensor]],
    reference: Callable[[], list[torch.Tensor]],
) -> Any:
    """Return a kernel, compared with the reference before its first use; None, counted, if it cannot be used.

    Args:
        key: of the kernel.
        name: of what it computes, for messages.
        device: where it is to run.
        build: makes it.
        run: (kernel, device) -> what it writes for fixed elements, on the CPU.
        reference: what is to be written, by plain torch on the CPU.
    """
    known = _checked_kernels.get((key, device), _NOT_TRIED)
    if known is _NOT_TRIED:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The comparison reads results back, which no capture allows: a call outside of one makes it.
            note_fallback("engine", f"{name} by plain torch operations: its first call was captured into a CUDA graph")
            return None
        if is_under_transform():
            note_fallback(
                "engine", f"{name} by plain torch operations: its first call was under a transform of torch.func"
            )
            return None  # which would take the comparison for its own
        known = _checked_kernels[key, device] = _try_kernel(name, device, build, run, reference)
    if known is None:
        note_fallback("engine", f"no Triton kernel for {name} on {device.type}: plain torch instead")
    return known


_NOT_TRIED = object()


def _try_kernel(name: str, device: torch.device, build: Any, run: Any, reference: Any) -> Any:
    try:
        kernel = build()
        with use_reference_in_thread():  # an engine that was asked for may not run what the CPU does on the way
            check_bits(name, lambda: run(kernel, device), lambda: list(reference()))
    except torch.OutOfMemoryError:
        raise  # which says nothing of the kernel
    except Exception as error:  # whatever a compiler for another machine may raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        note_and_warn_once("engine", f"no Triton kernel for {name} on {device.type} ({reason}): plain torch instead")
        return None
    return kernel


TILE_ELEMENTS = 1024
VECTOR_BYTES = 16
_LANES_PER_WARP = 256


@dataclass(frozen=True)
class TensorKernel:
    """A device function of a table as a kernel on tensors of one shape, which are the table's columns.

    Every tensor is contiguous, or all lie in memory in the same order. Random words are numbered by the position in
    that order.

    Attributes:
        table: what is read, computed and written; its columns are the tensors.
        memory_constants: constants that a launch reads from the device's memory, in the order in which they lie there.
    """

    table: Table
    memory_constants: tuple[int, ...] = ()

    @functools.cached_property
    def run(self) -> Any:
        """The Triton function.

        Raises:
            ImportError: triton is not installed.
        """
        return load_module(self.source)["run"]

    @functools.cached_property
    def source(self) -> str:
        """The text of the module."""
        return _module_text(self)

    @functools.cached_property
    def argument_constants(self) -> tuple[int, ...]:
        """The constants that a launch takes as arguments, by their number."""
        used = sorted(extra[1] for extra, _ in _find_inputs(self.table.trace) if extra[0] == "constant")
        return tuple(k for k in used if k not in self.memory_constants)

    @functools.cached_property
    def tile_shape(self) -> tuple[int, int]:
        """Rows and columns of a tile; a block is padded to a power of two, and is a row."""
        columns = 1 << (self.table.block - 1).bit_length() if self.table.block else TILE_ELEMENTS
        return max(1, TILE_ELEMENTS // columns), columns

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Triton's compile options."""
        rows, columns = self.tile_shape
        return COMPILE_OPTIONS | {"num_warps": max(COMPILE_OPTIONS["num_warps"], rows * columns // _LANES_PER_WARP)}

    def is_ragged(self, length: int) -> bool:
        """Return whether rows of a length are not cut into whole blocks of a power of two."""
        block = self.table.block
        return block is not None and (block != self.tile_shape[1] or length % block != 0)

    def constant_arguments(self, words: np.ndarray) -> tuple[int, ...]:
        """Return the constants of a launch from all of the table's, by their bits."""
        signed = words.view(np.int32 if words.itemsize == 4 else np.int64)
        return tuple(signed[list(self.argument_constants)].tolist())

    def launch(
        self,
        device: torch.device,
        addresses: Sequence[int],
        count: int,
        constants: Sequence[int] = (),
        keys: Sequence[int] = (),
        length: int | None = None,
        memory: int = 0,
        aligned: bool = False,
    ) -> None:
        """Run the kernel over all elements.

        Args:
            device: where the tensors lie.
            addresses: of the tensors' first elements.
            count: elements of each.
            constants: as `constant_arguments` returns them.
            keys: of the random words.
            length: elements of a row, where there are blocks.
            memory: address of the constants in memory, or of the word that takes the largest.
            aligned: as `is_aligned` says; False is always right.
        """
        if not count:
            return
        rows, columns = self.tile_shape
        length = count if length is None else length
        ragged = self.is_ragged(length)
        per_row = -(-length // self.table.block) if self.table.block else 0
        programs = -(-(count // length * per_row) // rows) if ragged else -(-count // (rows * columns))
        halves = [half for key in keys for half in _split_key(key)]
        # Triton's interpreter runs by NumPy, which warns of infinities.
        with np.errstate(all="ignore") if device.type == "cpu" else on_device(device):
            self.run[(programs,)](
                *addresses, *constants, *halves, memory, count, length, per_row, aligned, ragged, **self.options
            )


def is_aligned(addresses: Sequence[int], count: int) -> bool:
    """Return whether tensors consist of whole vectors of 16 bytes.

    >>> is_aligned([0, 32], 48), is_aligned([0, 34], 48), is_aligned([0, 32], 47)
    (True, False, False)
    """
    together = count
    for place in addresses:
        together |= place
    return together % VECTOR_BYTES == 0


def copy_with_alignment(x: torch.Tensor, device: torch.device, aligned: bool) -> torch.Tensor:
    """Return a copy of x on a device, which begins one element behind aligned memory where it is not to be aligned."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[0 if aligned else 1 :]
    return flat[: x.numel()].view(x.shape).copy_(x)


def _split_key(key: int) -> tuple[int, int]:
    """Return the low and the high word of a key as signed integers, which Triton gives one type whatever the key."""
    return _to_signed_word(key & 0xFFFFFFFF), _to_signed_word(key >> 32)


def _to_signed_word(word: int) -> int:
    return (word ^ 0x80000000) - 0x80000000


# source ------------------------------------------------------------------------------------------------------


def _find_inputs(trace: Trace) -> list[tuple[Any, str]]:
    """Return the inputs on which what is written depends, with their kinds."""
    lines = [(trace.lines[number], trace.kinds[number]) for number in sorted(find_live_lines(trace))]
    return [(extra, kind) for (operation, _, extra), kind in lines if operation == "input"]


def _find_element_sizes(trace: Trace) -> dict[int, int]:
    """Return the bytes of an element of each column.

    Raises:
        NotImplementedError: an array has an element per block, or two sizes.
    """
    loads = [(operands[0], *extra) for operation, operands, extra in trace.lines if operation == "load"]
    arrays = {(trace.lines[address][2], bits, per_block) for address, bits, per_block in [*loads, *trace.stores]}
    if any(per_block for *_, per_block in arrays) or len(arrays) != len({column for column, *_ in arrays}):
        raise NotImplementedError("a Triton kernel of whole tensors has one element of one size per element and column")
    return {column: bits // 8 for column, bits, _ in arrays}


def _module_text(kernel: TensorKernel) -> str:
    table, trace = kernel.table, kernel.table.trace
    inputs = _find_inputs(trace)
    arguments: dict[object, str] = {column: f"b{column}" for column in sorted(_find_element_sizes(trace))}
    arguments |= {extra: f"{extra[0]}{extra[1]}" for extra, _ in inputs}
    functions = [] if table.stream_start is None else [word_function_source("start_stream", table.stream_start)]
    element = element_source("element", trace, arguments)
    return module_source([*functions, element], _kernel_text(kernel, list(arguments.values()), inputs))


def _kernel_text(kernel: TensorKernel, arguments: list[str], inputs: list[tuple[Any, str]]) -> str:
    """Return the source of the kernel: one program per tile."""
    table, kinds = kernel.table, dict(inputs)
    draws = any(extra in STREAM_INPUTS for extra in kinds)
    types = {f"a{column}": "tl.int64" for column in range(table.columns)}
    for k in kernel.argument_constants:
        types[f"c{k}"] = f"tl.int{kinds['constant', k][1:]}"
    types |= {f"key_{half}": "tl.int32" for half in ("low", "high") if table.stream_start}
    types |= dict.fromkeys(("memory", "count", "length", "per_row"), "tl.int64")
    lines = [f"constant{k} = {_typed_scalar(f'c{k}', kinds['constant', k])}" for k in kernel.argument_constants]
    for slot, k in enumerate(kernel.memory_constants):
        width, kind = kinds["constant", k][1:], kinds["constant", k]
        lines.append(
            f"constant{k} = {_typed_scalar(f'tl.load(memory.to(tl.pointer_type(tl.int{width})) + {slot})', kind)}"
        )
    lines += [f"{half} = key_{half}.to(tl.uint32, bitcast=True)" for half in ("low", "high") if draws]
    lines += _block_tile_lines(kernel, draws) if table.block else _element_tile_lines(kernel, draws)
    call = f"element(offsets, offsets, {', '.join(arguments)}, lanes, aligned)"
    lines += _largest_word_lines(table.trace, call) if table.trace.sums else [call]
    body = "\n".join(f"    {line}" for line in lines)
    typed = ", ".join(f"{name}: {kind}" for name, kind in types.items())
    # Triton compiles anew for integers that are 1 or multiples of 16, unless it is told not to look.
    decorator = f"@triton.jit(do_not_specialize={list(types)})"
    return f"{decorator}\ndef run({typed}, aligned: tl.constexpr, ragged: tl.constexpr):\n{body}\n"


def _typed_scalar(value: str, kind: str) -> str:
    """Return a signed integer as the value with its bits."""
    width = kind[1:]
    # In the interpreter integers of less than 2^32 have 32 bits, of which no bitcast makes 64.
    word = f"{value}.to(tl.int{width}).to(tl.uint{width})"
    return word if kind[0] == "w" else f"{word}.to(tl.float{width}, bitcast=True)"


def _dense_tile_lines(kernel: TensorKernel, offsets: str, draws: bool) -> list[str]:
    """Return the lines of tiles without gaps; addresses move to a tile's start, so that offsets have 32 bits."""
    rows, columns = kernel.tile_shape
    step = f"tl.full([], {kernel.table.counter_step}, tl.uint32)"
    moved = [f"b{c} = a{c} + first * {size}" for c, size in sorted(_find_element_sizes(kernel.table.trace).items())]
    drawn = ["begun, own0 = start_stream(low, high, first)", f"counter0 = begun + offsets.to(tl.uint32) * {step}"]
    return [
        f"first = tl.program_id(0).to(tl.int64) * {rows * columns}",
        f"rest = tl.minimum(count - first, {rows * columns}).to(tl.int32)",
        "if aligned:",
        f"    rest = tl.multiple_of(rest, {VECTOR_BYTES})",
        offsets,
        *moved,
        *(drawn if draws else []),
    ]


def _element_tile_lines(kernel: TensorKernel, draws: bool) -> list[str]:
    return [*_dense_tile_lines(kernel, f"offsets = tl.arange(0, {TILE_ELEMENTS})", draws), "lanes = offsets < rest"]


def _block_tile_lines(kernel: TensorKernel, draws: bool) -> list[str]:
    (rows, columns), block = kernel.tile_shape, kernel.table.block
    whole = _dense_tile_lines(kernel, f"offsets = blocks * {columns} + places", draws)
    ragged = [
        # Whole rows are cut into blocks, of which a row's last may be shorter.
        f"number = tl.program_id(0).to(tl.int64) * {rows} + blocks.to(tl.int64)",
        "row = number // per_row",
        f"begin = (number - row * per_row) * {block}",
        f"size = tl.minimum(length - begin, {block})",
        "offsets = row * length + begin + places.to(tl.int64)",
        "lanes = (places < size) & (offsets < count)",
        *(f"b{column} = a{column}" for column in sorted(_find_element_sizes(kernel.table.trace))),
        *(["counter0, own0 = start_stream(low, high, offsets)"] if draws else []),
    ]
    return [
        f"blocks = tl.arange(0, {rows})[:, None]",
        f"places = tl.arange(0, {columns})[None, :]",
        "if ragged:",
        *(f"    {line}" for line in ragged),
        "else:",
        *(f"    {line}" for line in [*whole, f"lanes = blocks * {columns} < rest"]),
    ]


def _largest_word_lines(trace: Trace, call: str) -> list[str]:
    """Return the lines that find the largest word of all elements."""
    ((how, number),) = trace.sums
    if how != "max" or trace.kinds[number] != "w32":
        raise NotImplementedError(f"a Triton kernel of whole tensors finds the largest word, got a {how}")
    return [
        f"found = {call}",
        "found = tl.max(tl.where(lanes, found, tl.full([], 0, tl.uint32)))",
        "tl.atomic_max(memory.to(tl.pointer_type(tl.uint32)), found, sem='relaxed')",
    ]


TILES_PER_CHUNK = CHUNK_ELEMENTS // TILE_ELEMENTS


class TableKernel:
    """A compiled device function of elements, without constants, draws and blocks.

    Args:
        table: what is read, computed and written.
        tile: elements of a program, a power of two that divides CHUNK_ELEMENTS.
    """

    def __init__(self, table: Table, tile: int = TILE_ELEMENTS) -> None:
        self.tile_shape = tile
        arguments = {column: f"a{column}" for column in range(table.columns)}
        given = ", ".join(arguments.values())
        lines = [
            *chunk_lines(),
            f"row = pointers + r * {table.columns}",
            *(f"{name} = tl.load(row + {column})" for column, name in arguments.items()),
            *element_lines(tile),
            f"element(i, b, {given}, lanes, aligned)",
        ]
        body = "\n".join(f"    {line}" for line in lines)
        text = f"@triton.jit\ndef run(chunks, pointers, aligned: tl.constexpr):\n{body}\n"
        functions = [element_source("element", table.trace, dict(arguments))]
        self.source = module_source(functions, text, table.trace.count_instructions())

    @functools.cached_property
    def run(self) -> Any:
        """The Triton function.

        Raises:
            ImportError: triton is not installed.
        """
        return load_module(self.source)["run"]

    def __call__(self, chunks: np.ndarray, pointers: np.ndarray, device: torch.device) -> None:
        """Run it over all chunks.

        Args:
            chunks: int64 array of shape (chunks, 4), see `kernels.chunks`.
            pointers: int64 array of shape (rows, columns); 0 for arrays that are not read.
            device: where the arrays lie.
        """
        rows = (pointers % VECTOR_BYTES == 0).all(1)
        whole = rows[chunks[:, 0]] & (chunks[:, 1:3] % VECTOR_BYTES == 0).all(1)
        table = to_device(pointers, device)
        for aligned in (True, False):
            some = chunks[whole == aligned]
            if len(some):
                grid = len(some), -(-int(some[:, 2].max()) // self.tile_shape)
                with np.errstate(all="ignore"), on_device(device):  # Triton's interpreter runs by NumPy, which warns
                    self.run[grid](to_device(some, device), table, aligned, **COMPILE_OPTIONS)


def chunk_lines() -> list[str]:
    """Return the lines of a kernel that read its program's chunk: a tile of it, and the row of the pointers."""
    return [
        "c = tl.program_id(0).to(tl.int64)",
        "part = tl.program_id(1)",
        "begin = tl.load(chunks + 4 * c + 1)",
        "length = tl.load(chunks + 4 * c + 2)",
        "start = tl.load(chunks + 4 * c + 3)",
        "if aligned:",
        f"    begin = tl.multiple_of(begin, {VECTOR_BYTES})",
        f"    length = tl.multiple_of(length, {VECTOR_BYTES})",
        "r = tl.load(chunks + 4 * c)",
    ]


def element_lines(tile: int = TILE_ELEMENTS) -> list[str]:
    """Return the lines of a kernel that number the elements of a tile in a line."""
    return [
        f"offsets = (part * {tile} + tl.arange(0, {tile})).to(tl.int64)",
        "lanes = offsets < length",
        "i = begin + offsets",
        "b = i",
        "index = start + offsets",
    ]
