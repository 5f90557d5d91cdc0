"""Element-wise traces on broadcast tensors, and reductions along rows, as one Triton kernel each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .._plain_memory import to_plain_memory
from .._trace import Trace
from ..vector._reductions import BLOCK_ROWS, LANES_OF_NARROW_MATRIX, ReductionSteps
from ._launch import use_device
from ._writer import (
    COMPILE_OPTIONS,
    LONG_TRACE_INSTRUCTIONS,
    TritonKernel,
    concatenate_tables,
    indent_lines,
    write_functions,
    write_module,
)

# Instructions up to which a kernel is compiled, in some 10 seconds.
MOST_POINTWISE_INSTRUCTIONS = 8500
VECTOR_ELEMENTS = 16
# How an operand lies beside the results: like them, one for all, one per row, one per column.
_SAME_SHAPE_MODE, _ONE_ELEMENT_MODE, _ELEMENT_PER_ROW_MODE, _ELEMENT_PER_COLUMN_MODE = range(4)


class PointwiseKernel(TritonKernel):
    """A compiled function of elements; calling it fills contiguous results.

    These are the values of the instructions `results`, in dtypes that hold them or in the next narrower ones.
    """

    def __init__(self, trace: Trace, results: Sequence[int]) -> None:
        self.trace, self.results, self.size = trace, results, trace.count_instructions()
        # Registers hold the values of a tile.
        self.tile_elements = 1024 if self.size <= 100 else 512 if self.size <= LONG_TRACE_INSTRUCTIONS else 256
        self.table_values = concatenate_tables(trace) or (0.0,)
        # Kept as long as the kernel, since what runs or was captured still reads them.
        self.copy_tables = functools.cache(functools.partial(torch.tensor, self.table_values, dtype=torch.float64))

    @property
    def source(self) -> str:
        """The text of the module, whose function `run` takes inputs, outputs, constants, sizes and modes."""
        functions = write_functions("element", self.trace, self.results)
        inputs = range(sum(operation == "input" for operation, *_ in self.trace.lines))
        outputs, tables = range(len(self.results)), ["tables"] if concatenate_tables(self.trace) else []
        modes = [f"mode{k}: tl.constexpr" for k in inputs]
        arguments = [*(f"input{k}" for k in inputs), *(f"output{k}" for k in outputs), "tables"]
        arguments += ["count: tl.int64", "columns: tl.int64", *modes, "WHOLE: tl.constexpr", "TILE: tl.constexpr"]
        wide = "tl.float64" if self.trace.dtype == torch.float64 else "tl.float32"
        lines = [
            "if WHOLE:",  # of an argument itself tl.multiple_of says nothing
            f"    count = count // {VECTOR_ELEMENTS} * {VECTOR_ELEMENTS}",
            "i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)",
            "lanes = i < count",
            *(f"x{k} = load(input{k}, i, columns, lanes, mode{k}, TILE).to({wide})" for k in inputs),
            f"{', '.join(f'y{k}' for k in outputs)} = element({', '.join([*(f'x{k}' for k in inputs), *tables])})",
            *(f"write(output{k} + i, round_to_type(y{k}, output{k}.dtype.element_ty), lanes)" for k in outputs),
        ]
        # Triton compiles anew for integers that are 1 or multiples of 16, unless it is told not to look.
        head = f"@triton.jit(do_not_specialize=['count', 'columns'])\ndef run({', '.join(arguments)}):\n"
        return write_module([_LOAD_SOURCE, *functions], f"{head}{indent_lines(lines)}\n", self.size)

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Fill `outputs` (contiguous, of one shape and device) from inputs that broadcast to them."""
        first = outputs[0]
        count, device = first.numel(), first.device
        if not count:
            return
        held, modes, columns = lay_out_operands(inputs, first.shape, device)
        given = *held, *outputs, self.copy_tables(device=device), count, columns, *modes, count % VECTOR_ELEMENTS == 0
        with use_device(device):
            self.triton_function[(-(-count // self.tile_elements),)](*given, self.tile_elements, **COMPILE_OPTIONS)


_LOAD_SOURCE = f"""@triton.jit
def load(input, i, columns, lanes, mode: tl.constexpr, TILE: tl.constexpr):
    if mode == {_ONE_ELEMENT_MODE}:
        return tl.broadcast_to(tl.load(input), [TILE])
    elif mode == {_ELEMENT_PER_ROW_MODE}:
        return read(input + i // columns, lanes)
    elif mode == {_ELEMENT_PER_COLUMN_MODE}:
        return read(input + i % columns, lanes)
    else:
        return read(input + i, lanes)"""


def lay_out_operands(
    inputs: Sequence[torch.Tensor], shape: torch.Size, device: torch.device
) -> tuple[list[torch.Tensor], list[int], int]:
    """Return the operands as a kernel reads them, how each lies beside the results, and the results' columns."""
    held, modes, columns = [], [], shape[-1] if shape else 1
    for part in map(to_plain_memory, inputs):
        mode = _SAME_SHAPE_MODE
        if part.device != device:
            if part.dim():
                raise RuntimeError(f"components lie on {part.device} and {device}: bring them to one device by .to()")
            part = part.to(device)
        if part.shape != shape:
            if part.numel() == 1:
                mode = _ONE_ELEMENT_MODE
            elif part.shape[-1] == columns and part.numel() == columns:
                mode = _ELEMENT_PER_COLUMN_MODE
            elif part.shape[-1] == 1:
                part, mode = part.expand(*shape[:-1], 1), _ELEMENT_PER_ROW_MODE
            else:
                part = part.expand(shape)
        held.append(part.contiguous())
        modes.append(mode)
    return held, modes, columns


_TILE_COLUMNS = 128  # columns of a program, where there are at least LANES_OF_NARROW_MATRIX
# Instructions of a step up to which a block's rows are written out, so that they load together.
_MOST_UNROLLED_INSTRUCTIONS = 40
_SIZE_ARGUMENT_NAMES = ("rows", "columns", "length", "segments", "divisor", "several", "tiles")


class ReductionKernel(TritonKernel):
    """A compiled reduction, of rows of some components to others; calling it fills the results."""

    def __init__(self, steps: ReductionSteps, inputs: int, outputs: int) -> None:
        self._source_arguments = steps, range(inputs), range(outputs)

    @property
    def source(self) -> str:
        """The text of the module, with the kernel `run(inputs, outputs, numbers, LANES)`."""
        steps, inputs, outputs = self._source_arguments
        pieces = dict(zip(("step", "join", "merge", "close"), steps.record_steps(len(inputs))))
        functions = dict.fromkeys(text for name, piece in pieces.items() for text in write_functions(name, *piece))
        width, initial = range(steps.accumulator_count), steps.initial_value
        state, new, held, other = ([f"{name}{k}" for k in width] for name in ("state", "new", "held", "other"))
        written_out = pieces["step"][0].count_instructions() <= _MOST_UNROLLED_INSTRUCTIONS

        def format_call(name: str, results: Sequence[str], given: Sequence[str]) -> str:
            return f"{', '.join(results)} = {name}({', '.join(given)})"

        def format_start_values(names: Sequence[str]) -> list[str]:
            return [f"{name} = tl.full([LANES], {0.0 if k else initial}, tl.float64)" for k, name in enumerate(names)]

        turn = [
            "at = (first + turn) * width + lane",
            "there = inside & (at < count)",
            *(
                f"row{k} = tl.load(input{k} + base + at, mask=there, other={0.0 if k else initial}).to(tl.float64)"
                for k in inputs
            ),
            format_call("step", new, [*state, *(f"row{k}" for k in inputs)]),
            *(f"state{k} = tl.where(first + turn < turns, new{k}, state{k})" for k in width),
        ]
        block = [
            *format_start_values(state),
            f"for turn in {'tl.static_range' if written_out else 'range'}({BLOCK_ROWS}):",
            indent_lines(turn),
            format_call("join", held, [*held, *state]),
            f"first += {BLOCK_ROWS}",
        ]
        merge = [
            "beside = (several + 1) // 2",
            "from_lane = tl.minimum(lane + beside * columns, LANES - 1).to(tl.int32)",
            *(f"other{k} = tl.gather(held{k}, from_lane, 0)" for k in width),
            format_call("merge", new, [*held, *other]),
            *(f"held{k} = tl.where(lane < (several - beside) * columns, new{k}, held{k})" for k in width),
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
            *format_start_values(held),
            # Triton's interpreter has no loops over ranges that it computes.
            "first = turns * 0",
            "while first < turns:",
            indent_lines(block),
            f"for _ in range({LANES_OF_NARROW_MATRIX.bit_length() - 1}):",
            indent_lines(merge),
            format_call("close", [f"y{k}" for k in outputs], [*held, "tl.full([LANES], 0.0, tl.float64) + divisor"]),
            "to = segment * columns + lane",
            *(
                f"write(output{k} + to, round_to_type(y{k}, output{k}.dtype.element_ty), lane < columns)"
                for k in outputs
            ),
        ]
        arguments = [*(f"input{k}" for k in inputs), *(f"output{k}" for k in outputs)]
        arguments += [*(f"{name}: tl.int64" for name in _SIZE_ARGUMENT_NAMES), "LANES: tl.constexpr"]
        # Triton compiles anew for integers that are 1 or multiples of 16, unless it is told not to look.
        text = f"@triton.jit(do_not_specialize={list(_SIZE_ARGUMENT_NAMES)})\ndef run({', '.join(arguments)}):\n"
        return write_module(functions, f"{text}{indent_lines(lines)}\n")

    def __call__(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], layout_sizes: Sequence[int], divisor: int
    ) -> None:
        """Reduce segments of rows of matrices, which lie one after another without gaps; a mean has a divisor.

        The results have a row for each segment. `layout_sizes` are matrices, rows, columns, rows of a segment,
        segments of a matrix, and rows that lie side by side in the lanes of a program.
        """
        many, rows, columns, length, segments, several = layout_sizes
        narrow = columns < LANES_OF_NARROW_MATRIX
        lanes = LANES_OF_NARROW_MATRIX if narrow else _TILE_COLUMNS
        tiles = 1 if narrow else -(-columns // lanes)
        if not many * segments * columns:
            return
        with use_device(outputs[0].device):
            # One axis: CUDA's second one ends at 65,535.
            sizes = rows, columns, length, segments, divisor, several, tiles
            warps = 1 if narrow else 4
            run = self.triton_function[(many * segments * tiles,)]
            run(*inputs, *outputs, *sizes, lanes, num_warps=warps, enable_fp_fusion=False)
