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
from ._writer import (
    COMPILE_OPTIONS,
    TritonKernel,
    find_live_lines,
    write_element_function,
    write_module,
    write_word_function,
)

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
class TensorKernel(TritonKernel):
    """A device function of a table as a kernel on tensors of one shape, which are the table's columns.

    Every tensor is contiguous, or all lie in memory in the same order. Random words are numbered by the position in
    that order.

    Attributes:
        table: what is read, computed and written; its columns are the tensors.
        memory_constants: constants that a launch reads from the device's memory, in the order in which they lie there.
    """

    table: Table
    memory_constants: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        """The text of the module.

        Raises:
            NotImplementedError: an array has an element per block or two sizes, or there is a sum.
        """
        table, inputs = self.table, _find_inputs(self.table.trace)
        arguments: dict[object, str] = {column: f"b{column}" for column in sorted(_find_element_sizes(table.trace))}
        arguments |= {extra: f"{extra[0]}{extra[1]}" for extra, _ in inputs}
        functions = [write_word_function("start_stream", table.stream_start)] if table.stream_start else []
        functions.append(write_element_function("element", table.trace, arguments))
        return write_module(functions, _kernel_text(self, list(arguments.values()), inputs))

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
        words = [word for key in keys for word in (key & 0xFFFFFFFF, key >> 32)]
        halves = [(word ^ 0x80000000) - 0x80000000 for word in words]  # signed: Triton gives these one type
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
    if table.block:
        lines += _block_tile_lines(kernel, draws)
    else:
        lines += _dense_tile_lines(kernel, f"offsets = tl.arange(0, {TILE_ELEMENTS})", draws)
        lines.append("lanes = offsets < rest")
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


@dataclass
class PlacedChunks:
    """Chunks on a device, those first that hold whole vectors at aligned addresses.

    Attributes:
        aligned_rows: bool array of shape (rows,): whose addresses are aligned.
        chunks: int64 array of shape (chunks, 4), in the order in which they lie there.
        aligned_count: how many come first.
        device_tensor: the same on the device.
    """

    aligned_rows: np.ndarray
    chunks: np.ndarray
    aligned_count: int
    device_tensor: torch.Tensor


def place_chunks(
    chunks: np.ndarray, pointers: np.ndarray, device: torch.device, placed: PlacedChunks | None = None
) -> PlacedChunks:
    """Return int64 chunks (chunks, 4) of int64 pointers (rows, columns) on a device; `placed` if nothing has changed.

    Args:
        chunks: see `kernels.make_chunk_table`.
        pointers: addresses; 0 for arrays that are not read.
        device: where the arrays lie.
        placed: what an earlier call with the same chunks returned.
    """
    rows = (pointers % VECTOR_BYTES == 0).all(1)
    if placed is not None and np.array_equal(placed.aligned_rows, rows):
        return placed
    whole = rows[chunks[:, 0]] & (chunks[:, 1:3] % VECTOR_BYTES == 0).all(1)
    ordered = chunks[np.argsort(~whole, kind="stable")]
    return PlacedChunks(rows, ordered, int(whole.sum()), to_device(ordered, device))


class TableKernel(TritonKernel):
    """A compiled device function of a table of pointers, one program per tile of a chunk.

    A row of the table holds the addresses, then constants of 32 bits, as their bits, and the key of whoever draws.

    Args:
        table: what is read, computed and written.
        tile: elements of a program, a power of two that divides CHUNK_ELEMENTS.
    """

    def __init__(self, table: Table, tile: int = TILE_ELEMENTS) -> None:
        self.table, self.tile_elements = table, tile
        self.largest_columns = sum(how == "max" for how, _ in table.trace.sums)

    @property
    def source(self) -> str:
        """The text of the module."""
        table, tile, draws = self.table, self.tile_elements, self.table.stream_start
        arguments: dict[object, str] = {j: f"a{j}" for j in range(table.columns)}
        arguments |= {("constant", k): f"constant{k}" for k in range(table.constants)}
        arguments |= {name: name[0] for name in STREAM_INPUTS if draws}
        functions = [write_word_function("start_stream", draws)] if draws else []
        functions.append(write_element_function("element", table.trace, arguments))
        real = ".to(tl.uint32).to(tl.float32, bitcast=True)"
        last = table.columns + table.constants
        lines = [
            "c = tl.program_id(0).to(tl.int64)",
            "part = tl.program_id(1)",
            "begin = tl.load(chunks + 4 * c + 1)",
            "length = tl.load(chunks + 4 * c + 2)",
            "start = tl.load(chunks + 4 * c + 3)",
            "if aligned:",
            f"    begin = tl.multiple_of(begin, {VECTOR_BYTES})",
            f"    length = tl.multiple_of(length, {VECTOR_BYTES})",
            "r = tl.load(chunks + 4 * c)",
            "row = rows + r * width",
            *(f"a{j} = tl.load(row + {j})" for j in range(table.columns)),
            *(f"constant{k} = tl.load(row + {table.columns + k}){real}" for k in range(table.constants)),
            *(_block_lines(table.block, tile) if table.block else _element_lines(tile)),
        ]
        if draws:
            lines.append(f"key = tl.load(row + {last})")
            lines.append("counter, own = start_stream(key.to(tl.uint32), (key >> 32).to(tl.uint32), start + offsets)")
        call = f"element(i, b, {', '.join(arguments.values())}, lanes, aligned)"
        lines += self._total_lines(call) if table.trace.sums else [call]
        body = "\n".join(f"    {line}" for line in lines)
        totals = "totals, " if table.trace.sums else ""
        decorator = "@triton.jit(do_not_specialize=['width'])"
        text = f"{decorator}\ndef run(chunks, rows, width: tl.int64, {totals}aligned: tl.constexpr):\n{body}\n"
        return write_module(functions, text, table.trace.count_instructions())

    def _total_lines(self, call: str) -> list[str]:
        """Return the lines that write a tile's sums, or raise a row's largest words in whatever order programs run."""
        names = [f"sum{j}" for j in range(len(self.table.trace.sums))]
        if self.largest_columns:
            words = [f"tl.where(lanes, {name}, 0).to(tl.int32, bitcast=True)" for name in names]
            return [
                f"{', '.join(names)} = {call}",
                f"to = totals + r * {len(names)}",
                *(f"tl.atomic_max(to + {j}, tl.max({word}), sem='relaxed')" for j, word in enumerate(words)),
            ]
        return [
            f"{', '.join(names)} = {call}",
            f"to = totals + (c * {CHUNK_ELEMENTS // self.tile_elements} + part) * {len(names)}",
            *(
                f"tl.store(to + {j}, tl.sum(tl.where(lanes, {name}, 0.0).to(tl.float64)))"
                for j, name in enumerate(names)
            ),
        ]

    def __call__(self, chunks: np.ndarray, pointers: np.ndarray, device: torch.device) -> None:
        """Run it over all chunks of a table that consists of pointers, as `place_chunks` takes both."""
        self.launch(place_chunks(chunks, pointers, device), to_device(pointers, device))

    def launch(self, placed: PlacedChunks, rows: torch.Tensor) -> torch.Tensor:
        """Run it over all chunks of a table on their device.

        Returns:
            float64 sums (chunks, tiles, sums), or the words of the largest numbers of each row, int32 (rows, numbers).
        """
        chunks, device, sums = len(placed.chunks), rows.device, len(self.table.trace.sums)
        parts = -(-int(placed.chunks[:, 2].max(initial=0)) // self.tile_elements)
        if self.largest_columns:
            totals = torch.zeros(len(rows), sums, dtype=torch.int32, device=device)
        else:
            tiles = CHUNK_ELEMENTS // self.tile_elements
            totals = torch.zeros(chunks if sums else 0, tiles, sums, dtype=torch.float64, device=device)
        with np.errstate(all="ignore"), on_device(device):  # Triton's interpreter runs by NumPy, which warns
            for first, last, aligned in ((0, placed.aligned_count, True), (placed.aligned_count, chunks, False)):
                if first < last:
                    to = [totals if self.largest_columns else totals[first:]] if sums else []
                    run = self.run[last - first, parts]
                    run(placed.device_tensor[first:last], rows, rows.shape[1], *to, aligned, **COMPILE_OPTIONS)
        return totals


def _block_lines(block: int, tile: int) -> list[str]:
    """Return the lines of a kernel that number the elements of a tile, a block in each row."""
    rows = tile // block
    return [
        f"row_of_tile = (part * {rows} + tl.arange(0, {rows})).to(tl.int64)",
        "blocks = row_of_tile[:, None]",
        f"offsets = blocks * {block} + tl.arange(0, {block})[None, :]",
        f"lanes = blocks * {block} < length",
        "i = begin + offsets",
        # Rows that do not exist read the first one's scale.
        f"b = begin // {block} + tl.where(row_of_tile * {block} < length, row_of_tile, 0)",
    ]


def _element_lines(tile: int) -> list[str]:
    """Return the lines of a kernel that number the elements of a tile in a line."""
    return [
        f"offsets = (part * {tile} + tl.arange(0, {tile})).to(tl.int64)",
        "lanes = offsets < length",
        "i = begin + offsets",
        "b = i",
    ]
