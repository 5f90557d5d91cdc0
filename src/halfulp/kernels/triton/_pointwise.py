"""A trace of element-wise arithmetic as one Triton kernel over tensors that broadcast to its results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .._plain_memory import plain
from .._trace import Trace
from ._launch import on_device
from ._writer import LONG, OPTIONS, function_sources, load_module, module_source, stored_as, tables_of

# Instructions up to which a kernel is compiled, in some 10 seconds.
LONGEST = 8500
VECTOR = 16
# How an operand lies beside the results: like them, one for all, one per row, one per column.
_ALIKE, _ONE, _PER_ROW, _PER_COLUMN = range(4)


class Pointwise:
    """A compiled function of elements; calling it fills contiguous results.

    Args:
        trace: what to compute per element.
        results: the instructions whose values are written.
        stored: dtype in memory of each input (float16, bfloat16, float32, float64).
        written: dtype in memory of each result; the value must be one of it, or of the next wider one.
    """

    def __init__(
        self, trace: Trace, results: Sequence[int], stored: Sequence[torch.dtype], written: Sequence[torch.dtype]
    ) -> None:
        self._given = trace, tuple(results), tuple(stored), tuple(written)
        self.size = trace.size()
        self.tile = 1024 if self.size <= 100 else 512 if self.size <= LONG else 256  # whose values registers hold
        self.values = tables_of(trace)
        # Kept as long as the kernel, since what runs or was captured still reads them.
        self._tables: dict[torch.device, torch.Tensor] = {}

    @functools.cached_property
    def kernel(self) -> Any:
        """The Triton function.

        Raises:
            ImportError: triton is not installed.
            NotImplementedError: an operation that has no form on Triton's blocks.
        """
        return load_module(pointwise_source(*self._given))["kernel"]

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Fill `outputs` (contiguous, of one shape and device) from inputs that broadcast to them."""
        first = outputs[0]
        count, device = first.numel(), first.device
        if not count:
            return
        held, modes, columns = places(inputs, first.shape, device)
        table = self._tables.get(device)
        if table is None:
            table = torch.tensor(self.values or (0.0,), dtype=torch.float64, device=device)
            self._tables[device] = table
        grid = (-(-count // self.tile),)
        with on_device(device):
            self.kernel[grid](*held, *outputs, table, count, columns, *modes, count % VECTOR == 0, self.tile, **OPTIONS)


def pointwise_source(
    trace: Trace, results: tuple[int, ...], stored: tuple[torch.dtype, ...], written: tuple[torch.dtype, ...]
) -> str:
    """Return the source of the module, whose function `kernel` takes inputs, outputs, constants, sizes and modes."""
    functions = function_sources("element", trace, results)
    inputs, outputs = range(len(stored)), range(len(written))
    modes = [f"mode{k}: tl.constexpr" for k in inputs]
    arguments = [*(f"input{k}" for k in inputs), *(f"output{k}" for k in outputs), "tables"]
    arguments += ["count: tl.int64", "columns: tl.int64", *modes, "WHOLE: tl.constexpr", "TILE: tl.constexpr"]
    wide = "tl.float64" if trace.dtype == torch.float64 else "tl.float32"
    lines = [
        "if WHOLE:",  # of an argument itself tl.multiple_of says nothing
        f"    count = count // {VECTOR} * {VECTOR}",
        "i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)",
        "lanes = i < count",
        *(f"x{k} = load(input{k}, i, columns, lanes, mode{k}, TILE).to({wide})" for k in inputs),
        f"{', '.join(f'y{k}' for k in outputs)} = element({', '.join([*(f'x{k}' for k in inputs), 'tables'])})",
        *(f"write(output{k} + i, {stored_as(f'y{k}', dtype)}, lanes)" for k, dtype in enumerate(written)),
    ]
    body = "\n".join(f"    {line}" for line in lines)
    # Triton compiles anew for integers that are 1 or multiples of 16, unless it is told not to look.
    text = f"@triton.jit(do_not_specialize=['count', 'columns'])\ndef kernel({', '.join(arguments)}):\n{body}\n"
    return module_source([_LOAD, *functions], text, trace.size())


_LOAD = f"""@triton.jit
def load(input, i, columns, lanes, mode: tl.constexpr, TILE: tl.constexpr):
    if mode == {_ONE}:
        return tl.broadcast_to(tl.load(input), [TILE])
    elif mode == {_PER_ROW}:
        return read(input + i // columns, lanes)
    elif mode == {_PER_COLUMN}:
        return read(input + i % columns, lanes)
    else:
        return read(input + i, lanes)"""


def places(
    inputs: Sequence[torch.Tensor], shape: torch.Size, device: torch.device
) -> tuple[list[torch.Tensor], list[int], int]:
    """Return the operands as a kernel reads them, how each lies beside the results, and the results' columns.

    Raises:
        RuntimeError: an operand of several dimensions lies on another device.
    """
    held, modes, columns = [], [], shape[-1] if shape else 1
    for part in map(plain, inputs):
        mode = _ALIKE
        if part.device != device:
            if part.dim():
                raise RuntimeError(f"components lie on {part.device} and {device}: bring them to one device by .to()")
            part = part.to(device)
        if part.shape != shape:
            if part.numel() == 1:
                mode = _ONE
            elif part.shape[-1] == columns and part.numel() == columns:
                mode = _PER_COLUMN
            elif part.shape[-1] == 1:
                part, mode = part.expand(*shape[:-1], 1), _PER_ROW
            else:
                part = part.expand(shape)
        held.append(part.contiguous())
        modes.append(mode)
    return held, modes, columns
