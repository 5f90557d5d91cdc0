"""Sums, products and running sums of expansions along dimensions."""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from ..kernels import (
    BLOCK_ROWS,
    LANES_OF_NARROW_MATRIX,
    MOST_SERIAL_ELEMENTS,
    ReductionSteps,
    address,
    compile_reduction,
    define_operator,
    keeping_subnormals,
    run_chunks,
    select_engine,
)
from ..kernels._threads import count_kernel_threads
from ..kernels.triton._expansions import ReductionKernel
from ..kernels.triton._launch import find_checked_kernel
from ._exact_sums import find_result_shape, normalize_dims
from ._operators import Terms, add, divide_with_scaling, multiply, round_to_components, sum_terms, two_sum
from ._pointwise import PRECISION_BY_DTYPE, Parts, check_component_dtypes, find_component_kind, pointwise

# Of a matrix from which on its rows are reduced in segments, each by one thread.
_LARGE_MATRIX_ELEMENTS = 2**17
_SEGMENT_ELEMENTS = 2**16  # elements of a segment


def total(parts: Parts, dim: int | Sequence[int] | None, components: int, keepdim: bool = False) -> Parts:
    """Return the sum over dimensions, accumulated in float64 expansions of at least two components.

    16 elements at a time are summed exactly but for a plain sum of their rounding errors, the blocks' results as
    expansions: the error is at most (2^8 + N/5) 2^-106 sum |x|, of components up to 48 bits in all 2^-49 sum |x|, and
    one rounding to the components. The order depends on the shape alone, so the bits do not depend on threads, strides
    or the processor. Infinities and NaN are as in a float64 sum.

    Args:
        parts: components of one value, any shape.
        dim: one, several, or None for all.
        components: of the result, in the same dtype, 1 to 4.
        keepdim: leave dimensions of size 1.

    Returns:
        The components of the sum, without gradient.

    Raises:
        ValueError: a number of components that is not 1 to 4; components of several shapes; a dimension given twice.
        TypeError: a dtype that is none of float16, bfloat16, float32 and float64, or components of several.
        IndexError: there is no such dimension.

    >>> import torch
    >>> [float(part) for part in total((torch.tensor([1.0, 2.0**-40]),), None, 2)]
    [1.0, 9.094947017729282e-13]
    """
    return _run_reduction("sum", parts, dim, components, keepdim)


def product(parts: Parts, dim: int | Sequence[int] | None, components: int, keepdim: bool = False) -> Parts:
    """Return the product over dimensions; arguments and order are those of `total`."""
    return _run_reduction("prod", parts, dim, components, keepdim)


def average(parts: Parts, dim: int | Sequence[int] | None, components: int, keepdim: bool = False) -> Parts:
    """Return the sum over dimensions, divided before it is rounded to the components: 15 u^2 of a float64 sum more.

    >>> import torch
    >>> [float(part) for part in average((torch.tensor([1.0, 2.0**-40]),), None, 2)]
    [0.5, 4.547473508864641e-13]
    """
    return _run_reduction("mean", parts, dim, components, keepdim)


def running_sum(parts: Parts, dim: int, components: int) -> Parts:
    """Return the running sum along a dimension (torch.cumsum), by doubling: log2 N sums of whole tensors.

    >>> import torch
    >>> running_sum((torch.tensor([1.0, 2.0, 3.0]),), 0, 1)[0].tolist()
    [1.0, 3.0, 6.0]
    """
    dtype = find_component_kind(parts)[0]
    parts = pointwise("renormalize", parts, components=components, dtype=dtype)
    if parts[0].dim() == 0:
        return parts
    length, step = parts[0].shape[dim], 1
    while step < length:
        early = tuple(part.narrow(dim, 0, length - step) for part in parts)
        late = tuple(part.narrow(dim, step, length - step) for part in parts)
        summed = pointwise("add", late, early, components=components, dtype=dtype)
        parts = tuple(torch.cat([part.narrow(dim, 0, step), new], dim) for part, new in zip(parts, summed))
        step *= 2
    return parts


def _run_reduction(kind: str, parts: Parts, dim: int | Sequence[int] | None, components: int, keepdim: bool) -> Parts:
    kind_of_parts = find_component_kind(parts)
    check_component_dtypes(kind_of_parts, (kind_of_parts[0], components))
    dims = normalize_dims(parts[0].dim(), dim)
    # A kernel reads memory, without lazy signs and zeros.
    if torch.compiler.is_compiling() or any(
        type(part) is not torch.Tensor or part.is_neg() or part._is_zerotensor() for part in parts
    ):
        return tuple(_reduction_operator(kind, list(parts), dims, components, keepdim))
    return _reduce_dims(kind, parts, dims, components, keepdim)


def _reduce_dims(kind: str, parts: Parts, dims: Sequence[int], components: int, keepdim: bool) -> Parts:
    shape, dtype = parts[0].shape, parts[0].dtype
    after = find_result_shape(shape, dims, keepdim)
    matrices, sizes = _view_as_matrices(parts, dims)
    made = _reduce_rows(kind, matrices, sizes, components, dtype, after)
    if made[0].device.type == "cpu" and _is_finite(made[0]):  # nobody waits for a CPU
        return made
    head = matrices[0].view(sizes)
    plain = getattr(head, kind)(1, dtype=torch.float64).reshape(after)
    if kind != "prod" or dtype == torch.float64:
        return _restore_special_values(made, plain)
    # A product that leaves float64's range does so in another place than one that only its components cannot hold.
    wide = _reduce_rows(
        kind, matrices, sizes, _count_accumulator_components(dtype, len(parts), components), torch.float64, after
    )
    mended = pointwise("renormalize", _restore_special_values(wide, plain), components=components, dtype=dtype)
    lost = ~torch.isfinite(made[0])
    return tuple([torch.where(lost, other, part) for other, part in zip(mended, made)])


def _view_as_matrices(parts: Parts, dims: Sequence[int]) -> tuple[Parts, tuple[int, int, int]]:
    """Return the elements as (matrices, rows, columns) without gaps, of which the rows are reduced."""
    shape = parts[0].shape
    if len(dims) == len(shape):
        return tuple([part.contiguous() for part in parts]), (1, parts[0].numel(), 1)
    before = [d for d in range(dims[0]) if d not in dims]
    behind = [d for d in range(dims[0], len(shape)) if d not in dims]
    many, rows, columns = (math.prod([shape[d] for d in some]) for some in (before, dims, behind))
    sizes = (many, rows, columns)
    order = [*before, *dims, *behind]
    if order != sorted(order):
        parts = tuple([part.permute(order) for part in parts])
    parts = tuple([part.contiguous() for part in parts])
    if rows * columns > LANES_OF_NARROW_MATRIX or columns >= LANES_OF_NARROW_MATRIX or many < LANES_OF_NARROW_MATRIX:
        return parts, sizes
    # Many small matrices lie side by side.
    beside = tuple([part.reshape(sizes).transpose(0, 1).contiguous() for part in parts])
    return beside, (1, rows, many * columns)


def _is_finite(x: torch.Tensor) -> bool:
    return math.isfinite(x.item() if x.numel() == 1 else x.sum(dtype=torch.float64).item())


def _restore_special_values(made: Parts, plain: torch.Tensor) -> Parts:
    """Return a result with the infinities and NaN that the leading components' reduction has."""
    # The plain reduction of narrower components is not finite only where an element is not. Of float64 its steps may
    # leave the range though the sum does not: there the result decides.
    judge = made[0] if made[0].dtype == torch.float64 else plain
    lost = (judge - judge) != 0.0
    first = torch.where(lost, plain.to(made[0].dtype), made[0])
    return (first, *(torch.where(lost, 0.0, part) for part in made[1:]))


def _reduce_rows(
    kind: str, parts: Parts, sizes: tuple[int, int, int], components: int, dtype: torch.dtype, shape: Sequence[int]
) -> Parts:
    """Reduce every column of (matrices, rows, columns); return the results in a shape."""
    many, rows, columns = sizes
    stored, count = parts[0].dtype, len(parts)
    width = _count_accumulator_components(stored, count, max(components, 2) if dtype == torch.float64 else components)
    reduction = _Reduction(kind, stored, count, width, True, components, dtype)
    several = _count_rows_side_by_side(rows, columns)
    if rows * columns <= _LARGE_MATRIX_ELEMENTS:
        return _reduce_segments(reduction, parts, _SegmentLayout(sizes, rows, 1, several, rows), shape)
    length = max(2, _SEGMENT_ELEMENTS // (BLOCK_ROWS * several * columns)) * BLOCK_ROWS * several
    segments = -(-rows // length)
    inner = reduction._replace(kind="prod" if kind == "prod" else "sum", components=width, dtype=torch.float64)
    first = _reduce_segments(
        inner, parts, _SegmentLayout(sizes, length, segments, several, rows), (many * segments, columns)
    )
    outer = reduction._replace(stored=torch.float64, inputs=width, raw=False)
    cut = _SegmentLayout((many, segments, columns), segments, 1, _count_rows_side_by_side(segments, columns), rows)
    return _reduce_segments(outer, first, cut, shape)


def _count_rows_side_by_side(rows: int, columns: int) -> int:
    """Return how many rows lie side by side in the lanes of a kernel."""
    return LANES_OF_NARROW_MATRIX if columns == 1 else max(1, min(LANES_OF_NARROW_MATRIX // max(columns, 1), rows))


class _SegmentLayout(NamedTuple):
    """The order in which a kernel reads its matrices."""

    sizes: tuple[int, int, int]  # matrices, rows and columns
    length: int  # rows of a segment
    segments: int  # of a matrix
    several: int  # rows that lie side by side in the lanes of a kernel
    divisor: int  # of a mean


def _count_accumulator_components(dtype: torch.dtype, count: int, components: int) -> int:
    """Return how many float64 components accumulate a result."""
    if dtype == torch.float64:
        return max(2, components)
    return 2 if PRECISION_BY_DTYPE[dtype] * max(count, components) <= 60 else 3


class _Reduction(NamedTuple):
    """One reduction of expansions: its kind, types and device functions."""

    kind: str  # "sum", "mean" or "prod"
    stored: torch.dtype  # of a row's components
    inputs: int  # components of a row
    width: int  # float64 components that the result is gathered in
    raw: bool  # whether a row is an operand's own, and the rounding errors of a block may be summed plainly
    components: int  # of the result
    dtype: torch.dtype  # of the result's components

    def add_row(self, *values: Any) -> Terms:
        """Add the next row to a block's state."""
        width, state, row = self.width, list(values[: self.width]), list(values[self.width :])
        if self.stored != torch.float64 and len(row) == 2:  # which one float64 holds
            row = [row[0] + row[1]]
        elif self.stored != torch.float64 and len(row) > 2:
            high, low = two_sum(row[0], row[1])
            row = list(two_sum(high, low + sum(row[3:], row[2])))
        if self.kind == "prod":
            return multiply(state, row, width)
        if not self._adds_errors_plainly:
            return add(state, row, width)
        if self.stored != torch.float64:
            # Two float32 fill 48 bits: 16 of them summed in float64 keep what they hold.
            return [state[0] + row[0], state[1]]
        high, error = two_sum(state[0], row[0])
        return [high, state[1] + (error + row[1] if len(row) > 1 else error)]

    def add_block(self, *values: Any) -> Terms:
        """Add a block's state to the accumulators."""
        state = values[self.width :]
        return self.merge_lanes(
            *values[: self.width], *(two_sum(*state) if self._adds_errors_plainly and self.kind != "prod" else state)
        )

    def merge_lanes(self, *values: Any) -> Terms:
        """Merge the accumulators of two lanes."""
        one, other = list(values[: self.width]), list(values[self.width :])
        return multiply(one, other, self.width) if self.kind == "prod" else add(one, other, self.width)

    def round_result(self, *values: Any) -> Terms:
        """Return the accumulators, divided by a mean's count, as the result's components."""
        *terms, count = values
        if self.kind == "mean":
            terms = divide_with_scaling(terms, [count], self.width)
        if self.dtype != torch.float64:
            return round_to_components(terms, self.dtype, self.components)
        return terms if self.width == self.components else sum_terms(terms, self.width)[: self.components]

    @property
    def _adds_errors_plainly(self) -> bool:
        """Whether at most 16 rounding errors are summed plainly: 2^8 u^2 of the sum of magnitudes."""
        return self.raw and self.width == 2

    @property
    def device_functions(self) -> ReductionSteps:
        """The device functions, for the compiler."""
        return ReductionSteps(
            self.add_row, self.add_block, self.merge_lanes, self.round_result, self.width, self.neutral_element
        )

    @property
    def neutral_element(self) -> float:
        """The number that changes no sum, or no product."""
        return 1.0 if self.kind == "prod" else 0.0


def _reduce_segments(reduction: _Reduction, parts: Parts, cut: _SegmentLayout, shape: Sequence[int]) -> Parts:
    """Reduce every segment; return the results in a shape."""
    (many, rows, columns), length, segments, several, divisor = cut
    engine = select_engine(parts[0].device.type)
    if engine == "triton" and (triton_kernel := _find_triton_kernel(reduction, parts[0].device)) is not None:
        return tuple([part.reshape(shape) for part in _run_on_triton(reduction, triton_kernel, parts, cut)])
    if engine != "llvm":
        return tuple([part.reshape(shape) for part in _reduce_by_reference(reduction, parts, cut)])
    made = tuple([torch.empty(shape, dtype=reduction.dtype, device="cpu") for _ in range(reduction.components)])
    count = many * segments
    if not count or not columns:
        return made
    words = [rows, columns, length, segments, several, many * rows * columns, divisor]
    table = array.array("q", [*words, *map(address, (*parts, *made))])
    kernel = _compile_kernel(
        reduction, "line" if columns == 1 else "narrow" if columns < LANES_OF_NARROW_MATRIX else "wide"
    )
    if count == 1 or many * rows * columns < MOST_SERIAL_ELEMENTS or count_kernel_threads() == 1:
        kernel(0, count, table.buffer_info()[0])
    else:
        run_chunks(kernel, np.full(count, length * columns, np.int64), table.buffer_info()[0])
    return made


@functools.cache
def _compile_kernel(reduction: _Reduction, shape: str) -> Callable[..., Any]:
    stored, written = (reduction.stored,) * reduction.inputs, (reduction.dtype,) * reduction.components
    return compile_reduction(f"reduce_{reduction.kind}", reduction.device_functions, stored, written, shape)


def _find_triton_kernel(reduction: _Reduction, device: torch.device) -> Any:
    """Return the kernel of an accelerator, compared with plain torch; None, counted, where there is none."""
    name = f"{reduction.kind} of {reduction.inputs} x {reduction.stored} in {reduction.components} x {reduction.dtype}"

    def run(kernel: ReductionKernel, device: torch.device) -> list[torch.Tensor]:
        found = (_run_on_triton(reduction, kernel, [x.to(device) for x in parts], cut) for cut, parts in trials())
        return [part.cpu() for parts in found for part in parts]

    def reference() -> list[torch.Tensor]:
        return [part for cut, parts in trials() for part in _reduce_by_reference(reduction, parts, cut)]

    trials = functools.partial(_make_canary_matrices, reduction)
    build = functools.partial(ReductionKernel, reduction.device_functions, reduction.inputs, reduction.components)
    return find_checked_kernel(reduction, name, device, build, run, reference)


def _run_on_triton(
    reduction: _Reduction, kernel: ReductionKernel, parts: Sequence[torch.Tensor], cut: _SegmentLayout
) -> Parts:
    """Return the results as (matrices and segments, columns)."""
    shape = cut.sizes[0] * cut.segments, cut.sizes[2]
    made = [torch.empty(shape, dtype=reduction.dtype, device=parts[0].device) for _ in range(reduction.components)]
    kernel(parts, made, (*cut.sizes, *cut[1:4]), cut.divisor)
    return tuple(made)


def _make_canary_matrices(reduction: _Reduction) -> Iterator[tuple[_SegmentLayout, list[torch.Tensor]]]:
    """Yield fixed matrices of one, a few and many columns, on which a kernel is compared with its reference."""
    for columns in (1, 5, LANES_OF_NARROW_MATRIX + 3):
        cut = _SegmentLayout((2, 75, columns), 50, 2, _count_rows_side_by_side(75, columns), 75)
        made = []
        for k in range(reduction.inputs):
            ramp = torch.linspace(-1, 1, math.prod(cut.sizes), dtype=torch.float64, device="cpu").roll(31 * k)
            made.append((ramp * torch.exp2(-12.0 * k - 8 * ramp)).to(reduction.stored))
        yield cut, made


@keeping_subnormals()
def _reduce_by_reference(reduction: _Reduction, parts: Sequence[torch.Tensor], cut: _SegmentLayout) -> Parts:
    """Return the results as (matrices and segments, columns)."""
    length, wide = cut.length, [part.reshape(cut.sizes).double() for part in parts]
    pieces_of = [[part[:, k * length : (k + 1) * length] for part in wide] for k in range(cut.segments)]
    terms = [
        torch.stack(some, 1) for some in zip(*(_reduce_segment_by_torch(reduction, some, cut) for some in pieces_of))
    ]
    return tuple([part.to(reduction.dtype).flatten(0, 1) for part in terms])


def _reduce_segment_by_torch(reduction: _Reduction, parts: list[torch.Tensor], cut: _SegmentLayout) -> Terms:
    """Reduce one segment in torch, in the order of the kernel: rows side by side, then lanes by halves."""
    (many, rows, columns), several = parts[0].shape, cut.several
    turns = -(-rows // several)
    frame = (0, 0, 0, turns * several - rows)
    lanes = [pad(part, frame, value=0.0 if k else reduction.neutral_element) for k, part in enumerate(parts)]
    lanes = [part.reshape(many, turns, several * columns) for part in lanes]
    begin = [
        lanes[0].new_full((many, several * columns), 0.0 if k else reduction.neutral_element)
        for k in range(reduction.width)
    ]
    held: Terms = begin
    for top in range(0, turns, BLOCK_ROWS):
        state: Terms = begin
        for turn in range(top, min(top + BLOCK_ROWS, turns)):
            state = reduction.add_row(*state, *(part[:, turn] for part in lanes))
        held = reduction.add_block(*held, *state)
    while several > 1:
        half = (several + 1) // 2
        own, alone, other = (several - half) * columns, half * columns, several * columns
        merged = reduction.merge_lanes(*(part[:, :own] for part in held), *(part[:, alone:other] for part in held))
        held = [torch.cat([new, old[:, own:alone]], 1) for new, old in zip(merged, held)]
        several = half
    return reduction.round_result(*held, held[0].new_tensor(float(cut.divisor)))


_reduction_operator = define_operator(
    "reduce(str kind, Tensor[] parts, int[] dims, int components, bool keepdim) -> Tensor[]",
    lambda kind, parts, *given: list(_reduce_dims(kind, tuple(parts), *given)),
    lambda kind, parts, dims, components, keepdim: [
        parts[0].new_empty(find_result_shape(parts[0].shape, dims, keepdim)) for _ in range(components)
    ],
)
