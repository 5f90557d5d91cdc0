"""Reductions of matrices along rows as one Triton kernel, in the order of the processor's: the bits are the same."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..vector._reductions import ACROSS, BLOCK, ReductionSteps
from ._launch import on_device
from ._writer import function_sources, load_module, module_source, stored_as

_TILE = 128  # columns of a program, where there are at least ACROSS
_SHORT = 40  # instructions of a step up to which a block's rows are written out, so that they load together
_NUMBERS = ("rows", "columns", "length", "segments", "divisor", "several", "tiles")


class Reduction:
    """A compiled reduction; calling it fills the results.

    Args:
        steps: its device functions.
        stored: dtype in memory of each of a row's components.
        written: of each of the result's, which is what the values are, or wider.
    """

    def __init__(self, steps: ReductionSteps, stored: Sequence[torch.dtype], written: Sequence[torch.dtype]) -> None:
        self._given = steps, tuple(stored), tuple(written)

    @functools.cached_property
    def kernel(self) -> Any:
        """The Triton function.

        Raises:
            ImportError: triton is not installed.
            NotImplementedError: an operation that has no form on Triton's blocks.
        """
        return load_module(reduction_source(*self._given))["kernel"]

    def __call__(
        self, parts: Sequence[torch.Tensor], made: Sequence[torch.Tensor], cut: Sequence[int], divisor: int
    ) -> None:
        """Reduce segments of rows.

        Args:
            parts: the matrices' components, one matrix after another without gaps.
            made: the results, a row for each segment.
            cut: matrices, rows, columns, rows of a segment, segments of a matrix, and rows that lie side by side in
                the lanes of a program.
            divisor: of a mean.
        """
        many, rows, columns, length, segments, several = cut
        narrow = columns < ACROSS
        lanes = ACROSS if narrow else _TILE
        tiles = 1 if narrow else -(-columns // lanes)
        if not many * segments * columns:
            return
        with on_device(made[0].device):
            # One axis: CUDA's second one ends at 65,535.
            self.kernel[(many * segments * tiles,)](
                *parts,
                *made,
                rows,
                columns,
                length,
                segments,
                divisor,
                several,
                tiles,
                lanes,
                num_warps=1 if narrow else 4,
                enable_fp_fusion=False,
            )


def reduction_source(steps: ReductionSteps, stored: tuple[torch.dtype, ...], written: tuple[torch.dtype, ...]) -> str:
    """Return the source of the module, with the kernel `kernel(inputs, outputs, numbers, LANES)`."""
    pieces = steps.recorded(len(stored))
    functions = dict.fromkeys(
        text
        for name, (trace, results) in zip(("step", "join", "merge", "close"), pieces)
        for text in function_sources(name, trace, results)
    )
    inputs, outputs = range(len(stored)), range(len(written))
    state, held, other, row = (
        [f"{name}{k}" for k in range(count)]
        for name, count in (("state", steps.width), ("held", steps.width), ("other", steps.width), ("row", len(stored)))
    )
    begin = [steps.start] + [0.0] * (steps.width - 1)
    written_out = pieces[0][0].size() <= _SHORT

    def call(name: str, results: Sequence[str], given: Sequence[str]) -> str:
        # None of these looks constants up.
        return f"{', '.join(results)} = {name}({', '.join(given)}, None)"

    def start(names: Sequence[str]) -> list[str]:
        return [f"{name} = tl.full([LANES], {value}, tl.float64)" for name, value in zip(names, begin)]

    def each(lines: Sequence[str]) -> list[str]:
        return [f"    {line}" for line in lines]

    turn = [
        "at = (first + turn) * width + lane",
        "there = inside & (at < count)",
        *(
            f"row{k} = tl.load(input{k} + base + at, mask=there, other={0.0 if k else steps.start}).to(tl.float64)"
            for k in inputs
        ),
        call("step", [f"new{k}" for k in range(steps.width)], [*state, *row]),
        *(f"state{k} = tl.where(first + turn < turns, new{k}, state{k})" for k in range(steps.width)),
    ]
    block = [
        *start(state),
        f"for turn in {'tl.static_range' if written_out else 'range'}({BLOCK}):",
        *each(turn),
        call("join", held, [*held, *state]),
        f"first += {BLOCK}",
    ]
    merge = [
        "beside = (several + 1) // 2",
        "from_lane = tl.minimum(lane + beside * columns, LANES - 1).to(tl.int32)",
        *(f"other{k} = tl.gather(held{k}, from_lane, 0)" for k in range(steps.width)),
        call("merge", [f"new{k}" for k in range(steps.width)], [*held, *other]),
        *(f"held{k} = tl.where(lane < (several - beside) * columns, new{k}, held{k})" for k in range(steps.width)),
        "several = beside",
    ]
    lines = [
        "program = tl.program_id(0).to(tl.int64)",
        "segment = program // tiles",
        "matrix = segment // segments",
        "top = (segment - matrix * segments) * length",
        "lane = (program - segment * tiles) * LANES + tl.arange(0, LANES)",
        "width = columns * several",
        "inside = lane < width",
        "count = tl.minimum(rows - top, length) * columns",
        "turns = (count + width - 1) // width",
        "base = (matrix * rows + top) * columns",
        *start(held),
        # Triton's interpreter has no loops over ranges that it computes.
        "first = turns * 0",
        "while first < turns:",
        *each(block),
        f"for _ in range({ACROSS.bit_length() - 1}):",
        *each(merge),
        call("close", [f"y{k}" for k in outputs], [*held, "tl.full([LANES], 0.0, tl.float64) + divisor"]),
        "to = segment * columns + lane",
        *(
            f"tl.store(output{k} + to, {stored_as(f'y{k}', dtype)}, mask=lane < columns)"
            for k, dtype in enumerate(written)
        ),
    ]
    numbers = [f"{name}: tl.int64" for name in _NUMBERS]
    arguments = [*(f"input{k}" for k in inputs), *(f"output{k}" for k in outputs), *numbers, "LANES: tl.constexpr"]
    # Triton compiles anew for integers that are 1 or multiples of 16, unless it is told not to look.
    text = f"@triton.jit(do_not_specialize={list(_NUMBERS)})\ndef kernel({', '.join(arguments)}):\n"
    return module_source(functions, text + "\n".join(each(lines)) + "\n")
