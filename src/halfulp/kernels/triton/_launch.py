"""Triton kernels over a table of pointers or whole tensors, and what every launch shares: the device, the first use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .._canary import check_bits
from .._device_function import RANDOM_STREAM_INPUTS, Table
from .._engine import note_and_warn_once, note_fallback, use_reference_in_thread
from .._index_map import CHUNK_ELEMENTS
from .._operator import is_under_transform
from .._trace import Trace
from ._writer import (
    COMPILE_OPTIONS,
    TritonKernel,
    find_needed_instructions,
    indent_lines,
    write_element_function,
    write_module,
    write_word_function,
)

_checked_kernels: dict[Hashable, Any] = {}
_NOT_TRIED = object()


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a kernel runs on a device: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
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

    `run(kernel, device)` returns, on the CPU, what the kernel writes for fixed elements, and `reference()` what plain
    torch writes for them.
    """
    known = _checked_kernels.get((key, device), _NOT_TRIED)
    if known is _NOT_TRIED:
        caller = ""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The comparison reads results back, which no capture allows: a call outside of one makes it.
            caller = "captured into a CUDA graph"
        elif is_under_transform():  # which would take the comparison for its own
            caller = "under a transform of torch.func"
        if caller:
            note_fallback("engine", f"{name} by plain torch operations: its first call was {caller}")
            return None
        known = _checked_kernels[key, device] = _build_checked_kernel(name, device, build, run, reference)
    if known is None:
        note_fallback("engine", f"no Triton kernel for {name} on {device.type}: plain torch instead")
    return known


def _build_checked_kernel(name: str, device: torch.device, build: Any, run: Any, reference: Any) -> Any:
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
_ELEMENTS_PER_WARP = 256


@dataclass(frozen=True)
class TensorKernel(TritonKernel):
    """A device function of a table as a kernel on tensors of one shape, which are the table's columns.

    Every tensor is contiguous, or all lie in memory in the same order. Random words are numbered by the position in
    that order.
    """

    table: Table  # its columns are the tensors
    memory_constants: tuple[int, ...] = ()  # those that a launch reads from the device's memory, in order

    @property
    def source(self) -> str:
        """The text of the module, with one program per tile; NotImplementedError over what it cannot compute."""
        table, kinds = self.table, self.input_kinds
        arguments: dict[object, str] = {column: f"b{column}" for column in sorted(_find_element_sizes(table.trace))}
        arguments |= {name: f"{name[0]}{name[1]}" for name in kinds}
        functions = [write_word_function("start_stream", table.stream_start)] if table.stream_start else []
        functions.append(write_element_function("element", table.trace, arguments))
        draws = any(name in RANDOM_STREAM_INPUTS for name in kinds)
        types = {f"a{column}": "tl.int64" for column in range(table.columns)}
        types |= {f"c{k}": f"tl.int{kinds['constant', k][1:]}" for k in self.argument_constants}
        types |= {f"key_{half}": "tl.int32" for half in ("low", "high") if table.stream_start}
        types |= dict.fromkeys(("memory", "count", "length", "per_row"), "tl.int64")
        words = {k: f"c{k}" for k in self.argument_constants}
        for slot, k in enumerate(self.memory_constants):
            words[k] = f"tl.load(memory.to(tl.pointer_type(tl.int{kinds['constant', k][1:]})) + {slot})"
        lines = [f"constant{k} = {_write_bit_cast(word, kinds['constant', k])}" for k, word in words.items()]
        lines += [f"{half} = key_{half}.to(tl.uint32, bitcast=True)" for half in ("low", "high") if draws]
        if table.block:
            lines += _write_block_tile(self, draws)
        else:
            lines += _write_dense_tile(self, f"offsets = tl.arange(0, {TILE_ELEMENTS})", draws)
            lines.append("lanes = offsets < rest")
        call = f"element(offsets, offsets, {', '.join(arguments.values())}, lanes, aligned)"
        if table.trace.sums:
            ((how, number),) = table.trace.sums
            if how != "max" or table.trace.kinds[number] != "w32":
                raise NotImplementedError(f"a Triton kernel of whole tensors finds the largest word, got a {how}")
            lines += [
                f"found = {call}",
                "found = tl.max(tl.where(lanes, found, tl.full([], 0, tl.uint32)))",
                "tl.atomic_max(memory.to(tl.pointer_type(tl.uint32)), found, sem='relaxed')",
            ]
        else:
            lines.append(call)
        typed = ", ".join(f"{name}: {kind}" for name, kind in types.items())
        # Triton compiles anew for integers that are 1 or multiples of 16, unless it is told not to look.
        head = f"@triton.jit(do_not_specialize={list(types)})\ndef run({typed}, aligned: tl.constexpr, "
        return write_module(functions, f"{head}ragged: tl.constexpr):\n{indent_lines(lines)}\n")

    @functools.cached_property
    def input_kinds(self) -> dict[tuple[str, int], str]:
        """The kinds of the inputs on which what is written depends, by their names."""
        trace = self.table.trace
        used = sorted(find_needed_instructions(trace))
        return {trace.lines[k][2]: trace.kinds[k] for k in used if trace.lines[k][0] == "input"}

    @functools.cached_property
    def argument_constants(self) -> tuple[int, ...]:
        """The constants that a launch takes as arguments, by their number."""
        used = sorted(k for name, k in self.input_kinds if name == "constant")
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
        return COMPILE_OPTIONS | {"num_warps": max(COMPILE_OPTIONS["num_warps"], rows * columns // _ELEMENTS_PER_WARP)}

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
        """Run the kernel over `count` elements at addresses, in rows of a length where there are blocks.

        `constants` are as `constant_arguments` returns them, `keys` those of the random words, `memory` the address of
        the constants in memory, or of the word that takes the largest; `aligned` may be False though all are.
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
        with np.errstate(all="ignore") if device.type == "cpu" else use_device(device):
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


def _write_bit_cast(value: str, kind: str) -> str:
    """Return a signed integer as the word or real with its bits."""
    width = kind[1:]
    # In the interpreter integers of less than 2^32 have 32 bits, of which no bitcast makes 64.
    word = f"{value}.to(tl.int{width}).to(tl.uint{width})"
    return word if kind[0] == "w" else f"{word}.to(tl.float{width}, bitcast=True)"


def _write_dense_tile(kernel: TensorKernel, offsets: str, draws: bool) -> list[str]:
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


def _write_block_tile(kernel: TensorKernel, draws: bool) -> list[str]:
    (rows, columns), block = kernel.tile_shape, kernel.table.block
    whole = _write_dense_tile(kernel, f"offsets = blocks * {columns} + places", draws)
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


class DeviceChunks(NamedTuple):
    """Chunks on a device, those first that hold whole vectors at aligned addresses."""

    aligned_rows: np.ndarray  # bool array of shape (rows,): whose addresses are aligned
    chunks: np.ndarray  # int64 array of shape (chunks, 4), in the order in which they lie there
    aligned_count: int  # how many come first
    device_tensor: torch.Tensor  # the chunks on the device


def copy_chunks_to_device(
    chunks: np.ndarray, pointers: np.ndarray, device: torch.device, placed: DeviceChunks | None = None
) -> DeviceChunks:
    """Return int64 chunks (chunks, 4) of int64 pointers (rows, columns) on a device.

    `placed`, what an earlier call with the same chunks returned, is returned if nothing has changed.
    """
    rows = (pointers % VECTOR_BYTES == 0).all(1)
    if placed is not None and np.array_equal(placed.aligned_rows, rows):
        return placed
    whole = rows[chunks[:, 0]] & (chunks[:, 1:3] % VECTOR_BYTES == 0).all(1)
    ordered = chunks[np.argsort(~whole, kind="stable")]
    return DeviceChunks(rows, ordered, int(whole.sum()), copy_to_device(ordered, device))


class TableKernel(TritonKernel):
    """A compiled device function of a table of pointers, one program per tile of a chunk.

    A row of the table holds the addresses, then constants of 32 bits, as their bits, and the key of whoever draws. The
    elements of a tile are a power of two that divides CHUNK_ELEMENTS.
    """

    def __init__(self, table: Table, tile: int = TILE_ELEMENTS) -> None:
        self.table, self.tile_elements = table, tile
        self.largest_columns = sum(how == "max" for how, _ in table.trace.sums)
        sizes = {extra[0] for operation, _, extra in table.trace.lines if operation == "load" and not extra[1]}
        # Registers hold 32 bytes of an array. Beside codes of 4 bits, of which threads load all of theirs at once, 16:
        # if they had two vectors of the others, whose elements do not lie together, codes would be exchanged.
        bytes_per_thread, narrowest = (16 if 4 in sizes else 32), min(sizes - {4}, default=0) // 8
        warps = max(COMPILE_OPTIONS["num_warps"], tile * narrowest // bytes_per_thread // 32)
        self.options = COMPILE_OPTIONS | {"num_warps": warps}

    @property
    def source(self) -> str:
        """The text of the module."""
        table, tile, draws = self.table, self.tile_elements, self.table.stream_start
        arguments: dict[object, str] = {j: f"a{j}" for j in range(table.columns)}
        arguments |= {("constant", k): f"constant{k}" for k in range(table.constants)}
        arguments |= {name: name[0] for name in RANDOM_STREAM_INPUTS if draws}
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
        ]
        if table.block:
            block, blocks = table.block, tile // table.block
            lines += [
                f"row_of_tile = (part * {blocks} + tl.arange(0, {blocks})).to(tl.int64)",
                "blocks = row_of_tile[:, None]",
                f"offsets = blocks * {block} + tl.arange(0, {block})[None, :]",
                f"lanes = blocks * {block} < length",
                "i = begin + offsets",
                # Rows that do not exist read the first one's scale.
                f"b = begin // {block} + tl.where(row_of_tile * {block} < length, row_of_tile, 0)",
            ]
        else:
            lines.append(f"offsets = (part * {tile} + tl.arange(0, {tile})).to(tl.int64)")
            lines += ["lanes = offsets < length", "i = begin + offsets", "b = i"]
        if draws:
            lines.append(f"key = tl.load(row + {last})")
            lines.append("counter, own = start_stream(key.to(tl.uint32), (key >> 32).to(tl.uint32), start + offsets)")
        call = f"element(i, b, {', '.join(arguments.values())}, lanes, aligned)"
        sums = [f"sum{j}" for j in range(len(table.trace.sums))]
        lines.append(f"{', '.join(sums)} = {call}" if sums else call)
        if self.largest_columns:  # of each row, in whatever order programs run
            lines.append(f"to = totals + r * {len(sums)}")
            words = [f"tl.where(lanes, {name}, 0).to(tl.int32, bitcast=True)" for name in sums]
            lines += [f"tl.atomic_max(to + {j}, tl.max({word}), sem='relaxed')" for j, word in enumerate(words)]
        elif sums:
            lines.append(f"to = totals + (c * {CHUNK_ELEMENTS // tile} + part) * {len(sums)}")
            reals = [f"tl.where(lanes, {name}, 0.0).to(tl.float64)" for name in sums]
            lines += [f"tl.store(to + {j}, tl.sum({real}))" for j, real in enumerate(reals)]
        head = "@triton.jit(do_not_specialize=['width'])\ndef run(chunks, rows, width: tl.int64, "
        text = f"{head}{'totals, ' if sums else ''}aligned: tl.constexpr):\n{indent_lines(lines)}\n"
        return write_module(functions, text, table.trace.count_instructions())

    def __call__(self, chunks: np.ndarray, pointers: np.ndarray, device: torch.device) -> None:
        """Run it over all chunks of a table that consists of pointers, as `copy_chunks_to_device` takes both."""
        self.launch(copy_chunks_to_device(chunks, pointers, device), copy_to_device(pointers, device))

    def launch(self, placed: DeviceChunks, rows: torch.Tensor) -> torch.Tensor:
        """Run it over all chunks of a table on their device.

        It returns float64 sums (chunks, tiles, sums), or each row's largest numbers' words, int32 (rows, numbers).
        """
        chunks, device, sums = len(placed.chunks), rows.device, len(self.table.trace.sums)
        parts = -(-int(placed.chunks[:, 2].max(initial=0)) // self.tile_elements)
        if self.largest_columns:
            totals = torch.zeros(len(rows), sums, dtype=torch.int32, device=device)
        else:
            tiles = CHUNK_ELEMENTS // self.tile_elements
            totals = torch.zeros(chunks if sums else 0, tiles, sums, dtype=torch.float64, device=device)
        with np.errstate(all="ignore"), use_device(device):  # Triton's interpreter runs by NumPy, which warns
            for first, last, aligned in ((0, placed.aligned_count, True), (placed.aligned_count, chunks, False)):
                if first < last:
                    to = [totals if self.largest_columns else totals[first:]] if sums else []
                    run = self.run[last - first, parts]
                    run(placed.device_tensor[first:last], rows, rows.shape[1], *to, aligned, **self.options)
        return totals
