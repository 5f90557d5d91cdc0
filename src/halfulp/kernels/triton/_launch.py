"""Triton kernels over a table of pointers or whole tensors, and what every launch shares: the device, the first use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from .._canary import check_bits
from .._device_function import RANDOM_STREAM_INPUT_NAMES, PointerTableFunction
from .._engine import note_fallback, use_reference_in_thread, warn_once_of_fallback
from .._index_map import CHUNK_ELEMENTS
from .._operator import is_under_transform
from ._writer import (
    COMPILE_OPTIONS,
    TritonKernel,
    find_needed_instructions,
    indent_lines,
    write_element_function,
    write_functions,
    write_module,
)

_checked_kernel_by_key: dict[Hashable, Any] = {}


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a kernel runs on a device: Triton launches on the current one."""
    if device.type != "cuda":
        return np.errstate(all="ignore")  # Triton's interpreter runs by NumPy, which warns of infinities
    return contextlib.nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


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
    if (key, device) not in _checked_kernel_by_key:
        caller = ""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The comparison reads results back, which no capture allows: a call outside of one makes it.
            caller = "captured into a CUDA graph"
        elif is_under_transform():  # which would take the comparison for its own
            caller = "under a transform of torch.func"
        if caller:
            note_fallback("engine", f"{name} by plain torch operations: its first call was {caller}")
            return None
        _checked_kernel_by_key[key, device] = _build_checked_kernel(name, device, build, run, reference)
    known = _checked_kernel_by_key[key, device]
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
        warn_once_of_fallback("engine", f"no Triton kernel for {name} on {device.type} ({reason}): plain torch instead")
        return None
    return kernel


TILE_ELEMENTS = 1024
VECTOR_BYTES = 16
_ELEMENTS_PER_WARP = 256


class TensorKernel(TritonKernel):
    """A device function of a table as a kernel on tensors of one shape, which are the table's columns.

    Every tensor is contiguous, or all lie in memory in the same order. Random words are numbered by the position in
    that order. A launch reads `memory_constant_numbers` from the device's memory, where they lie in order.
    """

    def __init__(self, table: PointerTableFunction, memory_constant_numbers: tuple[int, ...] = ()) -> None:
        self.table, self.memory_constant_numbers, trace = table, memory_constant_numbers, table.trace
        # A block is padded to a power of two, and is a row.
        columns = 1 << (table.block_size - 1).bit_length() if table.block_size else TILE_ELEMENTS
        self.tile_shape = max(1, TILE_ELEMENTS // columns), columns
        self.options = COMPILE_OPTIONS | {"num_warps": max(TILE_ELEMENTS, columns) // _ELEMENTS_PER_WARP}
        # The kinds of the inputs on which what is written depends, by their names.
        inputs = (k for k in sorted(find_needed_instructions(trace)) if trace.lines[k][0] == "input")
        self.input_kinds: dict[tuple[str, int], str] = {trace.lines[k][2]: trace.kinds[k] for k in inputs}
        constants = (k for name, k in self.input_kinds if name == "constant")
        self.argument_constant_numbers = [k for k in constants if k not in memory_constant_numbers]

    @property
    def source(self) -> str:
        """The text of the module, with one program per tile."""
        (rows, columns), block, kinds = self.tile_shape, self.table.block_size, self.input_kinds
        lines = [f"constant{k} = c{k}" for k in self.argument_constant_numbers]
        for slot, k in enumerate(self.memory_constant_numbers):
            bits = kinds["constant", k][1:]
            lines.append(f"constant{k} = tl.load(memory.to(tl.pointer_type(tl.int{bits})) + {slot})")
        for kind, k in ((kind, name[1]) for name, kind in kinds.items() if name[0] == "constant"):
            # In the interpreter integers of less than 2^32 have 32 bits, of which no bitcast makes 64.
            cast = f"constant{k}.to(tl.int{kind[1:]}).to(tl.uint{kind[1:]})"
            lines.append(f"constant{k} = {f'real({cast})' if kind[0] == 'f' else cast}")
        draws = RANDOM_STREAM_INPUT_NAMES[0] in kinds
        start = "start_stream(key.to(tl.uint32), (key.to(tl.int64) >> 32).to(tl.uint32), {})"
        whole = [
            f"first = tl.program_id(0).to(tl.int64) * {rows * columns}",
            f"offsets = {f'blocks * {columns} + places' if block else f'tl.arange(0, {columns})'}",
            "i = first + offsets",
            f"lanes = {f'first + blocks * {columns}' if block else 'i'} < count",
        ]
        if draws:  # the counters of neighbours differ by a step
            step = f"tl.full([], {self.table.random_counter_step}, tl.uint32)"
            whole += [f"begun, own = {start.format('first')}", f"counter = begun + offsets.to(tl.uint32) * {step}"]
        if block:
            ragged = [
                # Whole rows are cut into blocks, of which a row's last may be shorter.
                f"number = tl.program_id(0).to(tl.int64) * {rows} + blocks.to(tl.int64)",
                "row = number // per_row",
                f"begin = (number - row * per_row) * {block}",
                "i = row * length + begin + places.to(tl.int64)",
                f"lanes = (places < tl.minimum(length - begin, {block})) & (i < count)",
                *([f"counter, own = {start.format('i')}"] if draws else []),
            ]
            lines += [f"blocks = tl.arange(0, {rows})[:, None]", f"places = tl.arange(0, {columns})[None, :]"]
            lines += ["if ragged:", indent_lines(ragged), "else:", indent_lines(whole)]
        else:  # of an argument itself tl.multiple_of says nothing
            lines += ["if aligned:", f"    count = count // {VECTOR_BYTES} * {VECTOR_BYTES}", *whole]
        take = ["tl.atomic_max(memory.to(tl.pointer_type(tl.uint32)), tl.max(tl.where(lanes, sum0, 0)), sem='relaxed')"]
        types = {f"a{j}": "tl.int64" for j in range(self.table.column_count)}
        types |= {f"c{k}": f"tl.int{kinds['constant', k][1:]}" for k in self.argument_constant_numbers}
        types |= dict.fromkeys(("key", "memory", "count", "length", "per_row"), "tl.int64")
        typed = ", ".join(f"{name}: {kind}" for name, kind in types.items())
        head = f"do_not_specialize={list(types)}", f"{typed}, aligned: tl.constexpr, ragged: tl.constexpr"
        return write_kernel_module(self.table, kinds, head, [*lines, "b = i"], take)

    def has_ragged_blocks(self, length: int) -> bool:
        """Return whether rows of a length are not cut into whole blocks of a power of two."""
        block = self.table.block_size
        return block is not None and (block != self.tile_shape[1] or length % block != 0)

    def select_launch_constants(self, words: np.ndarray) -> tuple[int, ...]:
        """Return the constants of a launch from all of the table's, by their bits."""
        signed = words.view(np.int32 if words.itemsize == 4 else np.int64)
        return tuple(signed[self.argument_constant_numbers].tolist())

    def launch(
        self,
        device: torch.device,
        addresses: Sequence[int],
        count: int,
        constants: Sequence[int] = (),
        random_key: int = 0,
        length: int | None = None,
        memory_address: int = 0,
        aligned: bool = False,
    ) -> None:
        """Run the kernel over `count` elements at addresses, in rows of a length where there are blocks.

        `constants` are of `select_launch_constants`, `random_key` that of the random words, `memory_address` that of
        the constants in memory, or of the word that takes the largest; `aligned` may be False though all are.
        """
        if not count:
            return
        rows, columns = self.tile_shape
        length = count if length is None else length
        ragged = self.has_ragged_blocks(length)
        per_row = -(-length // (self.table.block_size or length))
        programs = -(-(count // length * per_row) // rows) if ragged else -(-count // (rows * columns))
        sizes = (random_key ^ 1 << 63) - (1 << 63), memory_address, count, length, per_row
        with use_device(device):
            self.triton_function[(programs,)](*addresses, *constants, *sizes, aligned, ragged, **self.options)


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


def write_kernel_module(
    table: PointerTableFunction,
    inputs: Iterable[tuple[str, int]],
    head: tuple[str, str],
    lines: Sequence[str],
    sums: Sequence[str],
) -> str:
    """Return a module whose kernel runs a table's function on elements i in blocks b, as lines of source make them.

    The lines give each column's address a name as a0, and inputs as constant0, counter and own; `head` are Triton's
    options and the kernel's arguments, and other lines do something with the sums' values, sum0 and so on.
    """
    arguments: dict[object, str] = {j: f"a{j}" for j in range(table.column_count)}
    arguments |= {name: f"constant{name[1]}" if name[0] == "constant" else name[0] for name in inputs}
    start, found = table.random_stream_function, ", ".join(f"sum{j}" for j in range(len(table.trace.sums)))
    functions = write_functions("start_stream", start.trace, start.results) if start else []
    functions.append(write_element_function("element", table.trace, arguments))
    call = f"element(i, b, {', '.join(arguments.values())}, lanes, aligned)"
    body = indent_lines([*lines, f"{found} = {call}", *sums] if found else [*lines, call])
    kernel = f"@triton.jit({head[0]})\ndef run({head[1]}):\n{body}\n"
    return write_module(functions, kernel, table.trace.count_instructions())


class DeviceChunks(NamedTuple):
    """Chunks on a device, those first that hold whole vectors at aligned addresses."""

    aligned_row_mask: np.ndarray  # bool array of shape (rows,): whose addresses are aligned
    chunks: np.ndarray  # int64 array of shape (chunks, 4), in the order in which they lie there
    aligned_chunk_count: int  # how many come first
    device_chunks: torch.Tensor  # the chunks on the device


def copy_chunks_to_device(
    chunks: np.ndarray, pointers: np.ndarray, device: torch.device, placed: DeviceChunks | None = None
) -> DeviceChunks:
    """Return int64 chunks (chunks, 4) of int64 pointers (rows, columns) on a device.

    `placed`, what an earlier call with the same chunks returned, is returned if nothing has changed.
    """
    rows = (pointers % VECTOR_BYTES == 0).all(1)
    if placed is not None and np.array_equal(placed.aligned_row_mask, rows):
        return placed
    whole = rows[chunks[:, 0]] & (chunks[:, 1:3] % VECTOR_BYTES == 0).all(1)
    ordered = chunks[np.argsort(~whole, kind="stable")]
    return DeviceChunks(rows, ordered, int(whole.sum()), copy_to_device(ordered, device))


class PointerTableKernel(TritonKernel):
    """A compiled device function of a table of pointers, one program per tile of a chunk.

    A row of the table holds the addresses, then constants of 32 bits, as their bits, and the key of whoever draws. The
    elements of a tile are a power of two that divides CHUNK_ELEMENTS.
    """

    def __init__(self, table: PointerTableFunction, tile: int = TILE_ELEMENTS) -> None:
        self.table, self.tile_elements = table, tile
        self.maximum_count = sum(how == "max" for how, _ in table.trace.sums)
        sizes = [extra[0] for operation, _, extra in table.trace.lines if operation == "load" and not extra[1]]
        # A thread has 8 elements of 16 bits, or 4 of more: ptxas spills some kernels of 8, whose two vectors would not
        # lie together, as those codes of 4 bits do that a thread loads at once.
        is_wide = min((bits for bits in sizes if bits > 4), default=0) >= 32
        warps = max(COMPILE_OPTIONS["num_warps"], tile // (_ELEMENTS_PER_WARP // 2 if is_wide else _ELEMENTS_PER_WARP))
        self.options = COMPILE_OPTIONS | {"num_warps": warps}

    @property
    def source(self) -> str:
        """The text of the module."""
        table, tile, count = self.table, self.tile_elements, len(self.table.trace.sums)
        inputs = [("constant", k) for k in range(table.constant_count)]
        last = table.column_count + table.constant_count
        lines = [
            "c = tl.program_id(0).to(tl.int64)",
            "part = tl.program_id(1)",
            "r = tl.load(chunks + 4 * c)",
            "begin = tl.load(chunks + 4 * c + 1)",
            "length = tl.load(chunks + 4 * c + 2)",
            "start = tl.load(chunks + 4 * c + 3)",
            "if aligned:",
            f"    begin = tl.multiple_of(begin, {VECTOR_BYTES})",
            f"    length = tl.multiple_of(length, {VECTOR_BYTES})",
            "row = rows + r * width",
            *(f"a{j} = tl.load(row + {j})" for j in range(table.column_count)),
            *(f"constant{k} = real(tl.load(row + {table.column_count + k}).to(tl.uint32))" for _, k in inputs),
        ]
        if table.block_size:
            block, blocks = table.block_size, tile // table.block_size
            lines += [
                f"row_of_tile = (part * {blocks} + tl.arange(0, {blocks})).to(tl.int64)",
                f"offsets = row_of_tile[:, None] * {block} + tl.arange(0, {block})[None, :]",
                f"lanes = row_of_tile[:, None] * {block} < length",
                # Rows that do not exist read the first one's scale.
                f"b = begin // {block} + tl.where(row_of_tile * {block} < length, row_of_tile, 0)",
                "i = begin + offsets",
            ]
        else:
            lines.append(f"offsets = (part * {tile} + tl.arange(0, {tile})).to(tl.int64)")
            lines += ["lanes = offsets < length", "i = begin + offsets", "b = i"]
        if table.random_stream_function:
            inputs += RANDOM_STREAM_INPUT_NAMES
            lines.append(f"key = tl.load(row + {last})")
            lines.append("counter, own = start_stream(key.to(tl.uint32), (key >> 32).to(tl.uint32), start + offsets)")
        place = "r" if self.maximum_count else f"(c * {CHUNK_ELEMENTS // tile} + part)"
        add = (  # the largest of each row in whatever order programs run, or sums of each tile
            "tl.atomic_max(to + {0}, tl.max(tl.where(lanes, sum{0}, 0).to(tl.int32, bitcast=True)), sem='relaxed')"
            if self.maximum_count
            else "tl.store(to + {0}, tl.sum(tl.where(lanes, sum{0}, 0.0).to(tl.float64)))"
        )
        sums = [f"to = totals + {place} * {count}", *(add.format(j) for j in range(count))]
        names = f"chunks, rows, width: tl.int64, {'totals, ' if count else ''}aligned: tl.constexpr"
        return write_kernel_module(table, inputs, ("do_not_specialize=['width']", names), lines, sums)

    def __call__(self, chunks: np.ndarray, pointers: np.ndarray, device: torch.device) -> None:
        """Run it over all chunks of a table that consists of pointers, as `copy_chunks_to_device` takes both."""
        self.launch(copy_chunks_to_device(chunks, pointers, device), copy_to_device(pointers, device))

    def launch(self, placed: DeviceChunks, rows: torch.Tensor) -> torch.Tensor:
        """Run it over all chunks of a table on their device.

        It returns float64 sums (chunks, tiles, sums), or each row's largest numbers' words, int32 (rows, numbers).
        """
        chunks, device, sums = len(placed.chunks), rows.device, len(self.table.trace.sums)
        parts = -(-int(placed.chunks[:, 2].max(initial=0)) // self.tile_elements)
        if self.maximum_count:
            totals = torch.zeros(len(rows), sums, dtype=torch.int32, device=device)
        else:
            tiles = CHUNK_ELEMENTS // self.tile_elements
            totals = torch.zeros(chunks if sums else 0, tiles, sums, dtype=torch.float64, device=device)
        with use_device(device):
            aligned_count = placed.aligned_chunk_count
            for first, last, aligned in ((0, aligned_count, True), (aligned_count, chunks, False)):
                if first < last:
                    to = [totals if self.maximum_count else totals[first:]] if sums else []
                    run = self.triton_function[last - first, parts]
                    run(placed.device_chunks[first:last], rows, rows.shape[1], *to, aligned, **self.options)
        return totals
