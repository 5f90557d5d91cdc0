"""Matrix products, convolutions as products over windows, and torch.linalg by iterative refinement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import arithmetic
from ..._torch_versions import has_transposed_factors_in_solve_backward
from ...arithmetic import Parts
from ...arithmetic._matmul import (
    borrow_float32_product_of_float16_components,
    find_largest_magnitude,
    split_into_float16_components,
)
from ...kernels import define_operator
from ...subclass._derivation import aten
from ...subclass._in_backward import COMPONENTS_GRADIENTS_MODE, wants_plain_result
from .._encode import (
    HEADROOM_BINADES,
    OVERFLOW_EXPONENT_BY_DTYPE,
    choose_scale,
    divide_by_scale,
    find_largest_finite_magnitude,
)
from .._mctensor import MCTensor, implements, wrap_components
from .._result_type import (
    ResultType,
    choose_working_components_and_dtype,
    keep_component_gradients,
    make_result,
    need_no_conversion,
    result_type,
    run_pointwise_function,
    to_components,
)


def multiply_matrices(a: Any, b: Any, form: ResultType) -> Tensor:
    """Return a @ b as a result of a type; batch dimensions are broadcast."""
    if form.is_scaled or _has_scale(a) or _has_scale(b):
        return _multiply_scaled(a, b, form)
    left, right = to_components(a, form.device), to_components(b, form.device)
    return make_result(arithmetic.matmul(left, right, *choose_working_components_and_dtype(form)), form)


def _has_scale(x: Any) -> bool:
    return isinstance(x, MCTensor) and x._scale is not None


def _multiply_scaled(a: Any, b: Any, form: ResultType) -> Tensor:
    """Multiply payloads, and the result by both scales."""
    left, right = (x._parts if isinstance(x, MCTensor) else to_components(x, form.device) for x in (a, b))
    scales = [x._scale for x in (a, b) if _has_scale(x)]
    # float32 carries a product to two float16 components; more need float64.
    is_short = form.is_scaled and form.components <= 2 and not wants_plain_result(form.gradients, form.has_gradient)
    x, y = left[0], right[0]
    # float16 on the CPU, whose products float32 holds without overflow or underflow; matrices or as many of them.
    is_half = x.dtype == y.dtype == torch.float16 and x.device.type == "cpu"
    if is_short and is_half and x.dim() <= 3 and x.shape[:-2] == y.shape[:-2] and x.numel() and y.numel():
        flat = [*left, *right]
        call = _multiply_float16 if all(type(part) is Tensor for part in flat) else _float16_product_operator
        *parts, scale = call(flat, len(left), scales, form.components)
        return wrap_components(tuple(parts), scale, form.gradients)
    return make_result(_multiply_in_float64(left, right, scales, 1 if form.fits_float64 else form.components), form)


def _multiply_in_float64(left: Parts, right: Parts, scales: list[Tensor], count: int) -> Parts:
    wide = arithmetic.matmul(left, right, count, torch.float64)
    for scale in scales:
        wide = tuple(part * scale for part in wide)
    return wide


def _multiply_float16(flat: list[Tensor], left: int, scales: list[Tensor], components: int) -> list[Tensor]:
    """float16 components of a product and their scale: a float32 product, cut in two passes where it is finite."""
    payloads = tuple(flat[:left]), tuple(flat[left:])
    with borrow_float32_product_of_float16_components(*payloads) as product:
        largest = find_largest_magnitude(product)
        if 0 < largest < math.inf:
            factor = math.prod([float(scale) for scale in scales])
            exponent = math.frexp(largest)[1] - (OVERFLOW_EXPONENT_BY_DTYPE[torch.float16] - HEADROOM_BINADES)
            power = max(math.ldexp(factor, exponent), 2.0**-126)
            if power <= 2.0**127:
                parts = split_into_float16_components(product, factor / power, components)
                return [*parts, torch.tensor(power, dtype=torch.float32, device="cpu")]
    wide = _multiply_in_float64(*payloads, scales, 1)
    scale = choose_scale(find_largest_finite_magnitude(wide[0]), torch.float16)
    return [*divide_by_scale(wide, scale, components, torch.float16), scale]


def _fake_multiply_float16(flat: list[Tensor], left: int, scales: list[Tensor], components: int) -> list[Tensor]:
    product = torch.matmul(flat[0], flat[left])
    parts = [product.new_empty(product.shape) for _ in range(components)]
    return [*parts, product.new_empty((), dtype=torch.float32)]


# The same code for eager calls and for compiled graphs, where it is one operator: the same bits.
_float16_product_operator = define_operator(
    "half_product(Tensor[] flat, int left, Tensor[] scales, int components) -> Tensor[]",
    _multiply_float16,
    _fake_multiply_float16,
)


@implements(aten.addmm.default, aten.baddbmm.default)
def addmm(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha (a @ b)."""
    form = result_type((start, a, b))
    whole = form._replace(gradients=COMPONENTS_GRADIENTS_MODE)
    result = multiply_matrices(a, b, form if beta == 0 and alpha == 1 else whole)
    if alpha != 1:
        result = run_pointwise_function("mul", result, alpha, form=form if beta == 0 else whole)
    if beta == 0:
        return result
    terms = (start,) if beta == 1 else (start, beta)
    return run_pointwise_function("add" if beta == 1 else "addcmul", result, *terms, form=form)


@implements(aten.mm.default, aten.bmm.default)
def mm(a: Any, b: Any) -> Tensor:
    """Return the product of two matrices, or of two batches of matrices."""
    left, right = a.shape, b.shape
    if left[-1] != right[-2] or left[:-2] != right[:-2]:
        raise RuntimeError(f"shapes {tuple(left)} and {tuple(right)} cannot be multiplied")
    if need_no_conversion(a, b):
        parts = arithmetic.matmul(a._parts, b._parts, len(a._parts), a._parts[0].dtype)
        return wrap_components(parts, None, a._gradients)
    return multiply_matrices(a, b, result_type((a, b)))


implements(aten.mv.default)(lambda a, b: multiply_matrices(a, b.unsqueeze(-1), result_type((a, b))).squeeze(-1))


@implements(aten.dot.default, aten.vdot.default)
def dot(a: Any, b: Any) -> Tensor:
    """Multiply two vectors."""
    if a.shape != b.shape:
        raise RuntimeError(f"dot of vectors of {a.numel()} and {b.numel()} elements")
    return multiply_matrices(a.unsqueeze(0), b.unsqueeze(-1), result_type((a, b))).reshape(())


@implements(aten.addbmm.default)
def addbmm(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha times the sum of a batch's products: one product of the matrices side by side."""
    rows, columns = a.shape[1], b.shape[2]
    return addmm(start, a.transpose(0, 1).reshape(rows, -1), b.reshape(-1, columns), beta=beta, alpha=alpha)


@implements(aten._grouped_mm.default)
def grouped_mm(
    a: Any, b: Any, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return a product for each group of rows, of columns or of terms; what lies behind the last group becomes 0."""
    if bias is not None:
        raise NotImplementedError("grouped_mm takes no bias yet, as in torch: add it to the result")
    form = result_type((a, b), out_dtype)
    if offs is None and a.dim() == b.dim() == 3:
        return multiply_matrices(a, b, form)
    if torch.compiler.is_compiling():
        raise NotImplementedError("grouped_mm of MCTensors reads its offsets: call it outside of torch.compile")
    ends = [] if offs is None else offs.tolist()
    limit = a.shape[-1] if a.dim() == b.dim() else b.shape[-1] if a.dim() == 3 else a.shape[0]
    groups = {x.shape[0] for x in (a, b) if x.dim() == 3} or {len(ends)}
    if [0, *ends] != sorted([0, *ends]) or not ends or ends[-1] > limit or groups != {len(ends)}:
        raise ValueError(
            f"grouped_mm takes offsets, one for each group, that never decrease, from 0 to {limit}; got {ends}"
        )
    pieces: list[Tensor] = []
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        within = slice(start, end)
        left = a[group] if a.dim() == 3 else a[within] if b.dim() == 3 else a[:, within]
        right = b[group] if b.dim() == 3 else b[:, within] if a.dim() == 3 else b[within]
        pieces.append(multiply_matrices(left, right, form))
    if a.dim() == b.dim():
        return torch.stack(pieces)
    rest = limit - ends[-1]
    size = (rest, b.shape[-1]) if a.dim() == 2 else (a.shape[-2], rest)
    return torch.cat([*pieces, pieces[0].new_zeros(size)], 0 if a.dim() == 2 else 1)


def _run_matrix_function(function: Callable, operands: tuple, form: ResultType) -> Any:
    """Run one of arithmetic's functions of matrices and return results of a type."""
    parts = [to_components(x, form.device) for x in operands]
    results = function(*parts, *choose_working_components_and_dtype(form))
    if isinstance(results[0], Tensor):
        return make_result(results, form)
    return tuple(make_result(result, form) for result in results)


def _factorize_for_backward(a: Any, turned: bool) -> tuple[Tensor, Tensor]:
    """Return LU factors and pivots for the backward pass (`turned`: of a contiguous a's transpose), if there is one."""
    if not a.requires_grad:
        return a.new_empty((0,)), torch.empty((0,), dtype=torch.int32, device=a.device)
    form, a = result_type((a,)), a.mT if turned and a.is_contiguous() else a
    return refine_lu_factors(keep_component_gradients(a) if isinstance(a, MCTensor) else a, form.components)


def refine_lu_factors(a: Any, components: int) -> tuple[Tensor, Tensor]:
    """Refine float64 LU factors: L += L tril(z), U += triu(z) U for z = L^-1 (P a - L U) U^-1."""
    value = a.decode() if isinstance(a, MCTensor) else a.double()
    start, pivots = torch.linalg.lu_factor_ex(value)[:2]
    permutation, low, high = torch.lu_unpack(start, pivots)
    rows = permutation.mT @ a
    lower, upper = (
        MCTensor.encode(x, components, torch.float64, gradients=COMPONENTS_GRADIENTS_MODE) for x in (low, high)
    )
    for _ in range(components):
        rest = (rows - lower @ upper).decode()
        near = torch.linalg.solve_triangular(low, rest, upper=False, unitriangular=True)
        near = torch.linalg.solve_triangular(high, near, upper=True, left=False)
        lower, upper = lower + low @ near.tril(-1), upper + near.triu() @ high
    return (lower.tril(-1) + upper.triu()).to(a.dtype), pivots


def _make_zero_info(a: Any) -> Tensor:
    """Return zeros, one for each matrix of a stack: where one has no result, an error is raised."""
    return torch.zeros(a.shape[:-2], dtype=torch.int32, device=a.device)


def _solve_system(a: Any, b: Any, left: bool, form: ResultType) -> Tensor:
    """x with a x = b, or x a = b."""
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    b = b.unsqueeze(-1) if vector else b
    x = _run_matrix_function(arithmetic.solve, (a, b) if left else (a.mT, b.mT), form)
    x = x if left else x.mT
    return x.squeeze(-1) if vector else x


@implements(aten.linalg_lu_solve.default)
def lu_solve(factors: Any, pivots: Tensor, b: Any, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """Solve a system by the factors P L U of its matrix."""
    if not left:
        return lu_solve(factors, pivots, b.mT, adjoint=not adjoint).mT
    form = result_type((factors, b))
    whole = form._replace(gradients=COMPONENTS_GRADIENTS_MODE)
    plain = factors.decode() if isinstance(factors, MCTensor) else factors
    permutation = torch.lu_unpack(plain, pivots, unpack_data=False)[0].to(b.dtype)
    lower = factors.tril(-1) + torch.eye(factors.shape[-1], dtype=torch.float64, device=factors.device)
    upper = factors.triu()
    if adjoint:
        x: Any = _solve_system(lower.mT, _solve_system(upper.mT, b, True, whole), True, whole)
        return make_result(to_components(permutation @ keep_component_gradients(x), form.device), form)
    return _solve_system(upper, _solve_system(lower, permutation.mT @ b, True, whole), True, form)


implements(aten._linalg_solve_ex.default)(
    lambda a, b, *, left=True, check_errors=False: (
        _solve_system(a, b, left, result_type((a, b))),
        *_factorize_for_backward(a, has_transposed_factors_in_solve_backward()),
        _make_zero_info(a),
    )
)
implements(aten.linalg_inv_ex.default)(
    lambda a, **_: (_run_matrix_function(arithmetic.inverse, (a,), result_type((a,))), _make_zero_info(a))
)
implements(aten._linalg_det.default)(
    lambda a: (_run_matrix_function(arithmetic.det, (a,), result_type((a,))), *_factorize_for_backward(a, turned=True))
)


@implements(aten._linalg_slogdet.default)
def slogdet(a: MCTensor) -> tuple[Tensor, ...]:
    """Return the determinant's sign and the logarithm of its magnitude."""
    determinant = _run_matrix_function(arithmetic.det, (a,), result_type((a,)))
    return determinant.sign(), determinant.abs().log(), *_factorize_for_backward(a, turned=True)


@implements(aten.cholesky.default)
def cholesky(a: MCTensor, upper: bool = False) -> Tensor:
    """Return the Cholesky factor."""
    lower = _run_matrix_function(arithmetic.cholesky, (a.mT if upper else a,), result_type((a,)))
    return lower.mT if upper else lower


implements(aten.linalg_cholesky_ex.default)(
    lambda a, *, upper=False, check_errors=False: (cholesky(a, upper), _make_zero_info(a))
)


@implements(aten.linalg_qr.default)
def linalg_qr(a: MCTensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Return orthonormal columns and a triangular factor."""
    if mode == "complete" and a.shape[-2] != a.shape[-1]:
        raise NotImplementedError("qr of MCTensors has the modes 'reduced' and 'r': the rest of Q is not unique")
    q, r = _run_matrix_function(arithmetic.qr, (a,), result_type((a,)))
    return (q.new_empty((0,)) if mode == "r" else q), r


@implements(aten.linalg_solve_triangular.default)
def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Solve a triangular system, of which the other triangle is not read."""
    form = result_type((a, b))
    triangle = a.triu() if upper else a.tril()
    if unitriangular:
        ones = torch.ones(a.shape[:-1], dtype=torch.float64, device=a.device)
        triangle = triangle - torch.diag_embed(triangle.diagonal(dim1=-2, dim2=-1)) + torch.diag_embed(ones)
    return _solve_system(triangle, b, left, form)


@implements(aten.cholesky_solve.default)
def cholesky_solve(b: Any, root: Any, upper: bool = False) -> Tensor:
    """Solve a system by the triangular root of its matrix."""
    first = solve_triangular(root.mT if upper else root, b, upper=False)
    return solve_triangular(root if upper else root.mT, first, upper=True)
