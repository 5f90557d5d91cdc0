"""Products of matrices of expansions by plain products: one in a wider type, or several of slices (Ozaki et al. 2012).

Rows of A and columns of B are scaled by powers of two and cut into slices of so few bits that products of slices are
exact in float64. What the slices leave, the tail, is so small that plain products with it are exact enough: with three
slices each, six exact products and four with tails give two components. Slices are relative to the maximum of their
row or column, so |A||B| tells where they do not reach; those entries are computed one by one, or all get more slices.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._torch_versions import has_full_precision_float32_products
from ..kernels import (
    define_operator,
    exponent,
    floor,
    is_finite,
    keeping_subnormals,
    power_of_two,
    scale_by_power_of_two,
    select,
)
from ._operators import (
    Terms,
    distill_terms,
    round_to_components,
    set_special_values,
    to_float64_terms,
    two_sum,
    vec_sum,
)
from ._pointwise import (
    MAX_COMPONENTS,
    PRECISION_BY_DTYPE,
    ElementwiseKernels,
    Parts,
    check_component_dtypes,
    find_component_kind,
    pointwise,
)
from ._reductions import total

_MOST_PRODUCTS_AT_ONCE = 1 << 18  # products that exist at a time


def _compute_entries_alone(
    a: Parts, b: Parts, entries: tuple[torch.Tensor, ...], components: int, dtype: torch.dtype
) -> Parts:
    """Compute single entries of a @ b, given by one index tensor per dimension."""
    *batch, row, column = entries
    count, inner = len(row), a[0].shape[-1]
    step = max(1, 4 * _MOST_PRODUCTS_AT_ONCE // inner)
    pieces = []
    for first in range(0, count, step):
        part = slice(first, first + step)
        stack = tuple(index[part] for index in batch)
        left = tuple(x[(*stack, row[part])].t() for x in a)
        right = tuple(x.mT[(*stack, column[part])].t() for x in b)
        pieces.append(_sum_products(left, right, components, dtype))
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def _sum_products(left: Parts, right: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the sum over the first dimension of left times right, which broadcast in the others."""
    shape = torch.broadcast_shapes(left[0].shape, right[0].shape)[1:]
    working = min(MAX_COMPONENTS, -(-(components * PRECISION_BY_DTYPE[dtype] + 4) // 53) + (dtype == torch.float64))
    step = max(8, _MOST_PRODUCTS_AT_ONCE // max(1, shape.numel()))
    sums: Parts = ()
    for first in range(0, left[0].shape[0], step):
        pieces = (tuple(part[first : first + step] for part in parts) for parts in (left, right))
        x, y = (tuple(part.expand(-1, *shape).contiguous() for part in parts) for parts in pieces)
        piece = total(pointwise("mul", x, y, components=working, dtype=torch.float64), 0, working)
        sums = pointwise("add", sums, piece, components=working, dtype=torch.float64) if sums else piece
    return pointwise("renormalize", sums, components=components, dtype=dtype)


# scratch memory ----------------------------------------------------------------------------------------------

_MOST_CACHED_BYTES = 64 << 20
_thread_memory = threading.local()
_WorkspaceLayout = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@contextlib.contextmanager
def _borrow_workspace(layout: _WorkspaceLayout, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Return uninitialized tensors of shapes and dtypes from the thread's scratch memory.

    On the CPU it is kept between calls, so that a product does not fault its pages in again: up to a third of its time.
    """
    cached = _thread_memory.__dict__.setdefault("cached", {})
    # Taken out while in use, so that a call inside a call gets memory of its own.
    workspace, size = cached.pop(layout, ([], 0)) if device.type == "cpu" else ([], 0)
    if not workspace:
        workspace = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in layout]
        size = sum(part.nbytes for part in workspace)
    try:
        yield workspace
    finally:
        if device.type == "cpu":
            cached[layout] = workspace, size
            while sum(size for _, size in cached.values()) > _MOST_CACHED_BYTES:
                del cached[next(iter(cached))]


_INNER_PIECE_LENGTH = 512  # inner length from which on a product is taken in pieces
_MOST_INNER_PIECES = 4
# Bits of a float32 that go in rounding to the type, and the type's smallest subnormal.
_DROPPED_BITS_AND_SUBNORMAL_BY_DTYPE = {torch.float16: (13, 2.0**-24), torch.bfloat16: (16, 2.0**-133)}


def _multiply_in_wide_type(a: Parts, b: Parts, components: int, dtype: torch.dtype, work: torch.dtype) -> Parts:
    """a @ b for matrices or stacks of them, in `work` and rounded to components."""
    shape = (*a[0].shape[:-1], b[0].shape[-1])
    written = tuple([torch.empty(shape, dtype=dtype, device=a[0].device) for _ in range(components)])
    direct = components == 1 and dtype == work
    merged = [parts for parts in (a, b) if len(parts) > 1 or parts[0].dtype != work]
    # Where the result has nearly the digits of the product, long sums lose some of them: several are added exactly.
    long = work == torch.float64 and components * PRECISION_BY_DTYPE[dtype] > 40
    pieces = max(1, min(_MOST_INNER_PIECES, a[0].shape[-1] // _INNER_PIECE_LENGTH)) if long else 1
    layout = (*((tuple(parts[0].shape), work) for parts in merged), *([] if direct else [(shape, work)] * pieces))
    with _borrow_workspace(layout, a[0].device) as scratch:
        rest = iter(scratch)
        x, y = (
            _merge_components(parts, next(rest)) if any(parts is z for z in merged) else parts[0] for parts in (a, b)
        )
        products, inner = written[:1] if direct else list(rest), x.shape[-1]
        for k, out in enumerate(products):
            part = slice(inner * k // pieces, inner * (k + 1) // pieces)
            left, right = (x, y) if pieces == 1 else (x[..., part], y[..., part, :])
            multiply_plain_matrices(left, right, out)
        if not direct:
            _make_splitting_kernel(work, dtype, components, pieces)(products, written)
    return written


def _merge_components(parts: Parts, out: torch.Tensor) -> torch.Tensor:
    """Return the sum of all components, in the scratch memory's type."""
    _make_merging_kernel(out.dtype, parts[0].dtype, len(parts))(parts, (out,))
    return out


@contextlib.contextmanager
def borrow_float32_product_of_float16_components(a: Parts, b: Parts) -> Iterator[torch.Tensor]:
    """a @ b of float16 components in float32, whose range holds it; in scratch memory, for the length of a block."""
    shapes = a[0].shape, b[0].shape, (*a[0].shape[:-1], b[0].shape[-1])
    layout = tuple((tuple(shape), torch.float32) for shape in shapes)
    with _borrow_workspace(layout, a[0].device) as (left, right, out):
        multiply_plain_matrices(_merge_components(a, left), _merge_components(b, right), out)
        yield out


def find_largest_magnitude(x: torch.Tensor) -> float:
    """Return the largest magnitude of a tensor with elements; NaN if any is NaN."""
    # Two reductions that torch vectorizes: aminmax is slower than both, the norm by infinity twenty times slower.
    return max(-float(x.amin()), float(x.amax()))


def split_into_float16_components(x: torch.Tensor, factor: float, components: int) -> Parts:
    """Return a float32 tensor on the CPU times a power of two as float16 components, if all |x factor| < 2^15."""
    written = tuple([torch.empty((*x.shape,), dtype=torch.float16, device=x.device) for _ in range(components)])
    _make_float16_splitting_kernel(components)((x, torch.tensor(factor, dtype=torch.float32, device="cpu")), written)
    return written


@functools.cache
def _make_float16_splitting_kernel(components: int) -> ElementwiseKernels:
    def scale_and_cut(x: Any, factor: Any) -> Terms:
        rest, out = x * factor, []
        for _ in range(components - 1):
            out.append(_round_to_sixteen_bits(rest, torch.float16))
            rest = rest - out[-1]
        # Storing rounds the last one.
        return [*out, rest]

    inputs = (torch.float32, torch.float32)
    return ElementwiseKernels("matmul_half", scale_and_cut, torch.float32, inputs, (torch.float16,) * components)


@functools.cache
def _make_merging_kernel(work: torch.dtype, dtype: torch.dtype, count: int) -> ElementwiseKernels:
    def add_components(*parts: Any) -> Terms:
        return [parts[0] + 0.0 if len(parts) == 1 else _add_terms_from_last(parts)]

    return ElementwiseKernels("matmul_merge", add_components, work, (dtype,) * count, (work,))


@functools.cache
def _make_splitting_kernel(work: torch.dtype, dtype: torch.dtype, components: int, pieces: int) -> ElementwiseKernels:
    def cut_product(*products: Any) -> Terms:
        if work == torch.float32:
            return _split_into_sixteen_bit_components(products[0], dtype, components)
        terms = list(products)
        if pieces > 1:
            terms = set_special_values(functools.reduce(operator.add, terms), distill_terms(terms, 2))
        return round_to_components(terms, dtype, components) if dtype != work else terms[:1]

    return ElementwiseKernels("matmul_split", cut_product, work, (work,) * pieces, (dtype,) * components)


def _split_into_sixteen_bit_components(x: Any, dtype: torch.dtype, components: int) -> Terms:
    """Return a float32 as 16-bit components, each the nearest."""
    huge = abs(x) > 2.0**100
    rest, grow = x * select(huge, 2.0**-40, 1.0), select(huge, 2.0**40, 1.0)
    out = []
    for _ in range(components):
        head = _round_to_sixteen_bits(rest, dtype)
        rest = rest - head
        out.append(head * grow)
    head = select(is_finite(x), out[0], x)
    if dtype == torch.float16:
        head = select(abs(head) > 65504.0, head * float("inf"), head)
    return [head, *(select(is_finite(head), part, 0.0) for part in out[1:])]


def _round_to_sixteen_bits(x: Any, dtype: torch.dtype) -> Any:
    """Return a float32 below 2^100 as a 16-bit number (Veltkamp 1968; below the normal numbers by a fixed grid)."""
    bits, smallest = _DROPPED_BITS_AND_SUBNORMAL_BY_DTYPE[dtype]
    magic, far = 1.5 * 2.0**23 * smallest, x * (2.0**bits + 1.0)
    return select(abs(x) < smallest * 2.0 ** (24 - bits), (x + magic) - magic, far - (far - x))


def multiply_plain_matrices(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """x @ y into `out`: matrices or stacks of as many, float32 or float64; never in TensorFloat32 or bfloat16."""
    function = torch.mm if x.dim() == 2 else torch.bmm
    if x.dtype == torch.float32 and not has_full_precision_float32_products(x.device.type):
        out.copy_(function(x.double(), y.double()))
    else:
        function(x, y, out=out)


SLICE_BITS = 22  # of the first slice; the later ones have one more, for their sign
SLICED_BLOCK_LENGTH = 512  # 2 BITS + log2(BLOCK) = 53: inner products of slices are exact up to this length
MOST_SLICES = 12
MAGNITUDE_FLUSH_THRESHOLD = 2.0**-60  # magnitudes below it do not count in the sums that judge the slices


def count_covered_bits(slices: int) -> int:
    """Return how many bits below a row's largest magnitude the slices cover."""
    return SLICE_BITS + (slices - 1) * (SLICE_BITS + 1)


def find_accurate_entry_threshold(slices: int, inner: int, bits: int) -> float:
    """Return the |A||B| (scaled) from which on the tails' error stays under half of 2^-bits of it.

    Every tail product is at most inner 2^-(covered + 1). Their sum, of `length` products in one accumulator, is off by
    at most `length` units of its absolute sum, and with independent roundings (Higham and Mary 2019) by 4 sqrt(length)
    of them: twelve standard deviations where nothing cancels.
    """
    length = (slices + 1) * inner
    growth = min(length, 4 * math.sqrt(length)) + 4
    # Sums are float32: a smaller limit would be taken for zero, and zero for enough.
    return max(growth * length * 2.0 ** (bits + 1 - count_covered_bits(slices) - 1 - 53), 2.0**-126)


@functools.cache
def make_slice_kernel(dtype: torch.dtype, count: int, slices: int) -> ElementwiseKernels:
    """Return the kernel (components, two factors) -> (slices, the tail, the magnitude as float32)."""

    def cut_into_slices(*values: Any) -> Terms:
        first, second = values[count], values[count + 1]
        rest = list(values[:count]) if dtype == torch.float64 else to_float64_terms(list(values[:count]))
        rest = [part * first * second for part in rest]
        out, size = [], abs(rest[0])
        for k in range(slices):
            if k and len(rest) > 1:
                rest = vec_sum(rest)
            # Adding 1.5 * 2^52 units of the slice leaves no bit below one unit.
            magic = 1.5 * 2.0 ** (52 - count_covered_bits(k + 1))
            out.append((rest[0] + magic) - magic)
            rest = [rest[0] - out[-1], *rest[1:]]
        return [*out, _add_terms_from_last(rest), select(size < MAGNITUDE_FLUSH_THRESHOLD, 0.0, size)]

    inputs = (dtype,) * count + (torch.float64, torch.float64)
    outputs = (torch.float64,) * (slices + 1) + (torch.float32,)
    return ElementwiseKernels("matmul_slice", cut_into_slices, torch.float64, inputs, outputs)


@functools.cache
def make_sum_kernel(results: int, carried: int, components: int, dtype: torch.dtype) -> ElementwiseKernels:
    """Return the kernel (products, largest first, exponents of row and column, carry) -> components."""
    working = components if dtype == torch.float64 else -(-(components * PRECISION_BY_DTYPE[dtype] + 4) // 53)

    def add_up(*values: Any) -> Terms:
        scale, known = values[results] + values[results + 1], values[results + 2 :]
        terms = [scale_by_power_of_two(term, scale) for term in _sum_terms(list(values[:results]), working)]
        if known:
            terms = distill_terms([*known, *terms], working)
        head = terms[0]
        terms = [head, *(select(is_finite(head), term, 0.0) for term in terms[1:])]
        return terms if dtype == torch.float64 else round_to_components(terms, dtype, components)

    inputs = (torch.float64,) * (results + 2 + carried)
    return ElementwiseKernels("matmul_sum", add_up, torch.float64, inputs, (dtype,) * components)


def _sum_terms(terms: Terms, keep: int) -> Terms:
    """Return the sum to `keep` components, with an error of order u^(keep + 1) of the largest term."""
    if keep == 1:
        terms = vec_sum(terms)
        return [terms[0] + _add_terms_from_last(terms[1:])] if len(terms) > 1 else terms
    if keep > 2 or len(terms) < 3:
        return distill_terms(terms, keep)
    # n passes of VecSum and a plain sum are as good as n + 1 times the precision (Ogita, Rump, Oishi 2005).
    terms = vec_sum(vec_sum(terms))
    return list(two_sum(terms[0], _add_terms_from_last(terms[1:])))


def _add_terms_from_last(terms: Sequence[Any]) -> Any:
    """Return the plain sum, added up from the last term."""
    return functools.reduce(operator.add, reversed(terms))


def compute_row_exponents_and_factors(head: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, per row or column, k with magnitudes at most 2^k (NaN if not finite), and two factors of 2^-k."""
    largest = head.abs().amax(dim, keepdim=True)
    exponents, first, second = (torch.empty_like(largest) for _ in range(3))
    _ROW_EXPONENT_KERNEL([largest], [exponents, first, second])
    return exponents, first, second


def _compute_exponent_and_factors(largest: Any) -> Terms:
    k = exponent(largest) + 1.0
    # Neither factor leaves the range, where 2^-k would.
    half = floor(k * 0.5)
    return [select(is_finite(largest), k, float("nan")), power_of_two(-half), power_of_two(half - k)]


_ROW_EXPONENT_KERNEL = ElementwiseKernels(
    "matmul_scale", _compute_exponent_and_factors, torch.float64, (torch.float64,), (torch.float64,) * 3
)


_MOST_UNSUMMED_PRODUCTS = 7  # products that wait for being summed
# What a product of two numbers costs in an entry computed alone, compared with one in a matrix product.
_COST_OF_SINGLE_ENTRY = 250


@dataclass(frozen=True)
class _InnerBlock:
    """One block of the inner dimension: its operands, the scales of rows and columns, and the result's type."""

    a: Parts
    b: Parts
    row_scales: tuple[torch.Tensor, ...]
    column_scales: tuple[torch.Tensor, ...]
    components: int
    dtype: torch.dtype

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.a[0].shape[:-1], self.b[0].shape[-1])

    def find_accurate_entry_threshold(self, slices: int) -> float:
        """Return the |A||B| (scaled) from which on so many slices have the error that the result may have."""
        if self.dtype == torch.float64 and self.components <= 2:
            bits = 104 if self.components == 2 else 58
        else:
            bits = self.components * PRECISION_BY_DTYPE[self.dtype] - 4
        return find_accurate_entry_threshold(slices, self.a[0].shape[-1], bits)


def multiply_by_slices(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """a @ b for matrices or stacks of them, by products of slices, with `matmul`'s error bounds."""
    blocks = _cut_into_inner_blocks(a, b, components, dtype)
    if not all(math.isfinite(float(block.row_scales[0].sum() + block.column_scales[0].sum())) for block in blocks):
        # Entries whose plain float64 product is not finite take that.
        plain = torch.matmul(a[0].double(), b[0].double())
        x, y = (tuple(torch.where(parts[0].isfinite(), part, 0.0) for part in parts) for parts in (a, b))
        product, special = multiply_by_slices(x, y, components, dtype), ~plain.isfinite()
        head = torch.where(special, plain.to(dtype), product[0])
        return head, *(torch.where(special, 0.0, part) for part in product[1:])
    known: Parts = ()
    uncovered = None
    for k, block in enumerate(blocks):
        known, missed = _add_block_product(block, known, k == len(blocks) - 1)
        uncovered = missed if uncovered is None else uncovered if missed is None else uncovered | missed
    if uncovered is not None:
        entries = uncovered.nonzero(as_tuple=True)
        for target, value in zip(known, _compute_entries_alone(a, b, entries, components, dtype), strict=True):
            target[entries] = value
    return known


def _cut_into_inner_blocks(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> list[_InnerBlock]:
    inner = a[0].shape[-1]
    count = -(-inner // SLICED_BLOCK_LENGTH)
    edges = [inner * k // count for k in range(count + 1)]
    out = []
    for first, last in itertools.pairwise(edges):
        x = a if count == 1 else tuple(part[..., first:last] for part in a)
        y = b if count == 1 else tuple(part[..., first:last, :] for part in b)
        scales = compute_row_exponents_and_factors(x[0], -1), compute_row_exponents_and_factors(y[0], -2)
        out.append(_InnerBlock(x, y, *scales, components, dtype))
    return out


def _add_block_product(block: _InnerBlock, known: Parts, last: bool) -> tuple[Parts, torch.Tensor | None]:
    """`known` plus a block's product, and the entries that must be computed alone."""
    # They suffice where |A||B| is not much below its largest possible.
    most = block.a[0].shape[-1] / 64
    slices = next((n for n in range(1, MOST_SLICES) if block.find_accurate_entry_threshold(n) <= most), MOST_SLICES)
    wanted = 0
    missed: torch.Tensor | None = None
    while True:
        count = 2 * (slices + 1)
        with _borrow_workspace(_plan_workspace(block, slices), block.a[0].device) as workspace:
            cut, sizes, results = workspace[:count], workspace[count : count + 2], workspace[count + 2 :]
            # The magnitudes' product is read before the first result is written.
            sizes.append(results[0].view(torch.float32).as_strided(block.result_shape, results[0].stride()))
            left, right = _cut_operands_into_slices(block, slices, cut, sizes)
            if not wanted:
                wanted, missed = _choose_slice_count(block, slices, sizes)
            if wanted == slices:
                return _add_slice_products(block, left, right, known, last, results), missed
        slices = wanted


def _plan_workspace(block: _InnerBlock, slices: int) -> _WorkspaceLayout:
    """Return the workspace's layout: slices and tails of both operands, magnitudes, results."""
    left, right = tuple(block.a[0].shape), tuple(block.b[0].shape)
    wide, narrow = torch.float64, torch.float32
    spare = block.components if block.dtype == wide else 0
    return (
        *((left, wide),) * (slices + 1),
        *((right, wide),) * (slices + 1),
        *((left, narrow), (right, narrow)),
        *((block.result_shape, wide),) * (_MOST_UNSUMMED_PRODUCTS - spare),
    )


def _cut_operands_into_slices(
    block: _InnerBlock, slices: int, slice_buffers: list[Any], magnitude_buffers: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the slices of either operand, the tail behind them; magnitudes go to the first two of their buffers."""
    pieces = slice_buffers[: slices + 1], slice_buffers[slices + 1 :]
    scales = block.row_scales, block.column_scales
    for parts, out, size, (_, *factors) in zip((block.a, block.b), pieces, magnitude_buffers, scales, strict=False):
        inputs = [*parts, *(_flatten_single_row(factor) for factor in factors)]
        make_slice_kernel(parts[0].dtype, len(parts), slices)(inputs, [*out, size])
    return pieces


def _flatten_single_row(x: torch.Tensor) -> torch.Tensor:
    """Return one value per column of a matrix as a vector, which a kernel reads in place."""
    return x.reshape(-1) if x.dim() == 2 and x.shape[0] == 1 else x


def _choose_slice_count(block: _InnerBlock, slices: int, sizes: list[Any]) -> tuple[int, torch.Tensor | None]:
    """Choose the number of slices; return it, and the entries that it does not cover."""
    left, right, sums = sizes
    multiply_plain_matrices(left, right, sums)
    if float(sums.amin()) >= block.find_accurate_entry_threshold(slices):
        return slices, None
    nonzero = sums > 0
    if any(bool(((size == 0) & (parts[0] != 0)).any()) for size, parts in ((left, block.a), (right, block.b))):
        # A product may be nonzero though factors of it were flushed.
        nonzero = nonzero | (torch.matmul((block.a[0] != 0).float(), (block.b[0] != 0).float()) > 0)
    slices = _choose_cheapest_slice_count(block, slices, sums[nonzero])
    missed = nonzero & (sums < block.find_accurate_entry_threshold(slices))
    return slices, missed if bool(missed.any()) else None


def _choose_cheapest_slice_count(block: _InnerBlock, slices: int, sums: torch.Tensor) -> int:
    """Choose between more slices for all entries and single entries computed alone, by time."""
    outputs = block.result_shape[-1] * block.a[0].shape[:-1].numel()

    def cost(count: int) -> float:
        missed = int((sums < block.find_accurate_entry_threshold(count)).sum())
        # Plain products: exact ones of slices i + j <= count + 1, one for each tail, and two of the first try.
        products = count * (count + 1) // 2 + count + 1 + (2 if count > slices else 0)
        return products * outputs + _COST_OF_SINGLE_ENTRY * missed

    return min(range(slices, MOST_SLICES + 1), key=cost)


def _add_slice_products(
    block: _InnerBlock, left: list[Any], right: list[Any], known: Parts, last: bool, results: list[Any]
) -> Parts:
    """Add all products of slices and tails to the sum of earlier blocks."""
    slices, device = len(left) - 1, left[0].device
    final, dtype = (block.components, block.dtype) if last else (block.components + 1, torch.float64)
    written = tuple(torch.empty(block.result_shape, dtype=dtype, device=device) for _ in range(final))
    buffers = [*(part for part in written if part.dtype == torch.float64), *results][:_MOST_UNSUMMED_PRODUCTS]
    waiting: list[torch.Tensor] = []
    for level in range(slices):
        for i in range(level + 1):
            if len(waiting) == _MOST_UNSUMMED_PRODUCTS - 1:
                known, waiting = _add_scaled_sums(block, waiting, known, None), []
            multiply_plain_matrices(left[i], right[level - i], buffers[len(waiting)])
            waiting.append(buffers[len(waiting)])
    tails = buffers[len(waiting)]
    rest = right[slices]
    multiply_plain_matrices(left[0], rest, tails)
    for i in range(1, slices + 1):
        rest += right[slices - i]
        tails.addmm_(left[i], rest) if tails.dim() == 2 else tails.baddbmm_(left[i], rest)
    return _add_scaled_sums(block, [*waiting, tails], known, written)


def _add_scaled_sums(block: _InnerBlock, waiting: list[Any], known: Parts, written: Parts | None) -> Parts:
    if written is None:
        written = tuple(torch.empty_like(waiting[0]) for _ in range(block.components + 1))
    kernel = make_sum_kernel(len(waiting), len(known), len(written), written[0].dtype)
    kernel([*waiting, block.row_scales[0], _flatten_single_row(block.column_scales[0]), *known], written)
    return written


# the choice of a method -------------------------------------------------------------------------------------

_MOST_STACK_ELEMENTS = 1 << 20  # elements of operands and result that are worked on at a time


def matmul(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the product of two matrices of expansions, or of stacks of them.

    One product in a wider native type serves where it holds the digits: float32 for results of two float16 and up to
    three bfloat16, float64 for other results of up to 48 bits. More digits come from products of slices that are exact
    in float64: |error| <= 2^-104 (|A||B|)_ij for two float64, 2^-(n p - 6) for more components. Two float32 are as good
    as the float64 product: a few 2^-53 (|A||B|)_ij where signs vary, up to 2^-49 where they do not, besides rounding to
    two components, which takes up to 2^-49 of the entry. The workspace is a small multiple of the operands and is kept
    for the next call.

    Args:
        a: (..., M, K), 1 to 4 components of float16, bfloat16, float32 or float64.
        b: (..., K, N), likewise; the dimensions before the last two broadcast.
        components: of the result, 1 to 4.
        dtype: of the result.

    Returns:
        The components of the result, (..., M, N), without gradient. Infinities and NaNs follow the plain product.

    Raises:
        ValueError: shapes that do not match, or a number of components that is not 1 to 4.
        TypeError: a dtype that is not one of the four, or components of several.

    >>> import torch
    >>> x = (torch.tensor([[1.0, 1.0]], dtype=torch.float64), torch.tensor([[2.0**-60, 0.0]], dtype=torch.float64))
    >>> y = (torch.tensor([[1.0], [-1.0]], dtype=torch.float64),)
    >>> [float(part) for part in matmul(x, y, components=2, dtype=torch.float64)] == [2.0**-60, 0.0]
    True
    """
    check_component_dtypes(find_component_kind(a), find_component_kind(b), (dtype, components))
    x, y = a[0].shape, b[0].shape
    if len(x) < 2 or len(y) < 2 or x[-1] != y[-2]:
        raise ValueError(f"matmul takes (..., M, K) and (..., K, N), got {tuple(x)} and {tuple(y)}")
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in (*a, *b)):
        return tuple(_matmul_operator([*a, *b], len(a), components, dtype))
    return _multiply_stacks(a, b, components, dtype)


def _find_result_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    if b.dim() == 2:
        return (*a.shape[:-1], b.shape[-1])
    return (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


@keeping_subnormals()
def _multiply_stacks(a: Sequence[Any], b: Sequence[Any], components: int, dtype: torch.dtype) -> Parts:
    a, b = ([part.detach() if part.requires_grad else part for part in parts] for parts in (a, b))
    shape = _find_result_shape(a[0], b[0])
    if len(shape) == 2:
        return _multiply_matrices(tuple(a), tuple(b), components, dtype)
    if b[0].dim() == 2:
        a = [part.reshape(-1, part.shape[-1]) for part in a]
        made = _multiply_matrices(tuple(a), tuple(b), components, dtype)
    else:
        a, b = ([part.expand(*shape[:-2], *part.shape[-2:]).flatten(0, -3) for part in parts] for parts in (a, b))
        made = _multiply_stack_in_chunks(tuple(a), tuple(b), components, dtype)
    return tuple(part.reshape(shape) for part in made)


def _multiply_stack_in_chunks(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Multiply a stack of matrices in chunks that keep the workspace small."""
    count, m, k = a[0].shape
    n = b[0].shape[-1]
    step = max(1, _MOST_STACK_ELEMENTS // max(1, m * k + k * n + m * n))
    if count <= step and count != 1:
        return _multiply_matrices(a, b, components, dtype)
    pieces = []
    for first in range(0, count, step):
        at = first if step == 1 or count == 1 else slice(first, first + step)
        pieces.append(_multiply_matrices(tuple(p[at] for p in a), tuple(p[at] for p in b), components, dtype))
    join = torch.stack if step == 1 or count == 1 else torch.cat
    return tuple(join(parts) for parts in zip(*pieces, strict=True))


def _multiply_matrices(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Multiply matrices, or one stack of them, by the method that suits them."""
    shape, inner = (*a[0].shape[:-1], b[0].shape[-1]), a[0].shape[-1]
    outputs = torch.Size(shape).numel()
    if not outputs or not inner:
        return tuple(a[0].new_zeros(shape, dtype=dtype) for _ in range(components))
    is_plain = len(a) == len(b) == components == 1 and a[0].dtype == b[0].dtype == dtype
    if is_plain and dtype in (torch.float32, torch.float64):
        made = a[0].new_empty(shape)
        multiply_plain_matrices(a[0], b[0], made)
        return (made,)
    bits = components * PRECISION_BY_DTYPE[dtype]
    if bits <= 24 and dtype.itemsize == 2 and torch.float64 not in (a[0].dtype, b[0].dtype):
        return _multiply_in_wide_type(a, b, components, dtype, torch.float32)
    if bits <= 48:
        return _multiply_in_wide_type(a, b, components, dtype, torch.float64)
    # Measured costs of slicing and of computing each entry, in microseconds.
    sliced = 200 * -(-inner // SLICED_BLOCK_LENGTH) + 0.03 * (a[0].numel() + b[0].numel()) + 0.0005 * outputs * inner
    if 250 + 0.1 * outputs * inner < sliced:
        left = tuple(part.movedim(-1, 0).unsqueeze(-1) for part in a)
        right = tuple(part.movedim(-2, 0).unsqueeze(-2) for part in b)
        return _sum_products(left, right, components, dtype)
    return multiply_by_slices(_widen_for_slices(a), _widen_for_slices(b), components, dtype)


def _widen_for_slices(parts: Parts) -> Parts:
    """Return float64 components, each of which has more bits than the first slice takes."""
    if len(parts) > 1 and parts[0].dtype.itemsize == 2:
        return pointwise("renormalize", parts, components=len(parts), dtype=torch.float64)
    return tuple(x.double() for x in parts)


_matmul_operator = define_operator(
    "matmul(Tensor[] parts, int count, int components, ScalarType dtype) -> Tensor[]",
    lambda parts, count, components, dtype: list(_multiply_stacks(parts[:count], parts[count:], components, dtype)),
    lambda parts, count, components, dtype: [
        parts[0].new_empty(_find_result_shape(parts[0], parts[count]), dtype=dtype) for _ in range(components)
    ],
)
