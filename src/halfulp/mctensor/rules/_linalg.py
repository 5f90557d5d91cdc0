"""torch.linalg by iterative refinement: solve, inverse, det, cholesky, qr, lstsq, triangular systems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import arithmetic
from ..._torch_versions import solves_by_transpose
from ...kernels import torch_operators
from ...subclass._in_backward import COMPONENTS, gives_plain_gradient
from .._mctensor import MCTensor, implements
from .._result_type import ResultType, evaluate, float64_count, make_result, parts_of, result_type, without_rounding

aten = torch_operators("aten")


def _run_arithmetic(function: Callable, operands: tuple, form: ResultType) -> Any:
    """Run one of arithmetic's functions of matrices and return results of a type."""
    parts = [parts_of(x, form.device) for x in operands]
    if form.scaled:
        results = function(*parts, float64_count(form), torch.float64)
    else:
        results = function(
            *parts, 1 if gives_plain_gradient(form.gradients, form.has_gradient) else form.components, form.dtype
        )
    if isinstance(results[0], Tensor):
        return make_result(results, form)
    return tuple(make_result(result, form) for result in results)


def _factors(a: Any, turned: bool = False) -> tuple[Tensor, Tensor]:
    """Return LU factors and pivots for the backward pass, or placeholders if there is none.

    turned: of the transpose, which a determinant's backward pass expects of a contiguous matrix.
    """
    if not a.requires_grad:
        return a.new_empty((0,)), torch.empty((0,), dtype=torch.int32, device=a.device)
    form, a = result_type((a,)), a.mT if turned and a.is_contiguous() else a
    return refined_lu(without_rounding(a) if isinstance(a, MCTensor) else a, form.components)


def refined_lu(a: Any, components: int) -> tuple[Tensor, Tensor]:
    """Refine float64 LU factors: L += L tril(z), U += triu(z) U for z = L^-1 (P a - L U) U^-1."""
    value = a.decode() if isinstance(a, MCTensor) else a.double()
    start, pivots = torch.linalg.lu_factor_ex(value)[:2]
    permutation, low, high = torch.lu_unpack(start, pivots)
    rows = permutation.mT @ a
    lower, upper = (MCTensor.encode(x, components, torch.float64, gradients=COMPONENTS) for x in (low, high))
    for _ in range(components):
        rest = (rows - lower @ upper).decode()
        near = torch.linalg.solve_triangular(low, rest, upper=False, unitriangular=True)
        near = torch.linalg.solve_triangular(high, near, upper=True, left=False)
        lower, upper = lower + low @ near.tril(-1), upper + near.triu() @ high
    return (lower.tril(-1) + upper.triu()).to(a.dtype), pivots


def _run_each_with_info(function: Callable, *operands: Any) -> tuple[Tensor, Tensor]:
    """Run a function on each matrix of a stack; return results and info: 0, or the size where a result is NaN.

    torch's functions without _ex raise where one is not 0.
    """
    first = operands[0]
    try:
        return function(*operands), torch.zeros(first.shape[:-2], dtype=torch.int32, device=first.device)
    except torch.linalg.LinAlgError:
        shape = torch.broadcast_shapes(*(x.shape[:-2] for x in operands))
        if not shape:
            size = torch.tensor(first.shape[-1], dtype=torch.int32, device=first.device)
            return torch.full_like(operands[-1], float("nan")), size
    stacks = [x.expand(*shape, *x.shape[-2:]).flatten(0, len(shape) - 1) for x in operands]
    made, found = zip(
        *(_run_each_with_info(function, *matrices) for matrices in zip(*stacks, strict=True)), strict=True
    )
    return torch.stack(made).unflatten(0, shape), torch.stack(found).reshape(shape)


def _check_information(information: Tensor, name: str, check_errors: bool) -> None:
    if check_errors:
        aten._linalg_check_errors.default(information, name, is_matrix=information.dim() == 0)


def _solve(a: Any, b: Any, left: bool, form: ResultType) -> Tensor:
    """x with a x = b, or x a = b."""
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    b = b.unsqueeze(-1) if vector else b
    x = (
        _run_arithmetic(arithmetic.solve, (a, b), form)
        if left
        else _run_arithmetic(arithmetic.solve, (a.mT, b.mT), form).mT
    )
    return x.squeeze(-1) if vector else x


@implements(aten._linalg_solve_ex.default)
def solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> tuple[Tensor, ...]:
    """Return the solution of a linear system, and which matrices are singular."""
    form, vector = result_type((a, b)), b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    columns = b.unsqueeze(-1) if vector else b
    x, information = _run_each_with_info(lambda a, b: _solve(a, b, left, form), a, columns)
    _check_information(information, "torch.linalg.solve_ex", check_errors)
    return (x.squeeze(-1) if vector else x), *_factors(a, solves_by_transpose()), information


@implements(aten.linalg_lu_solve.default)
def lu_solve(factors: Any, pivots: Tensor, b: Any, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """Return a system by the factors P L U of its matrix."""
    if not left:
        return lu_solve(factors, pivots, b.mT, adjoint=not adjoint).mT
    form = result_type((factors, b))
    whole = form._replace(gradients=COMPONENTS)
    plain = factors.decode() if isinstance(factors, MCTensor) else factors
    permutation = torch.lu_unpack(plain, pivots, unpack_data=False)[0].to(b.dtype)
    lower = factors.tril(-1) + torch.eye(factors.shape[-1], dtype=torch.float64, device=factors.device)
    upper = factors.triu()
    if adjoint:
        x: Any = _solve(lower.mT, _solve(upper.mT, b, True, whole), True, whole)
        return make_result(parts_of(permutation @ without_rounding(x), form.device), form)
    return _solve(upper, _solve(lower, permutation.mT @ b, True, whole), True, form)


@implements(aten.linalg_inv_ex.default)
def inv_ex(a: MCTensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """Return the inverse, and which matrices are singular."""
    found, information = _run_each_with_info(lambda a: _run_arithmetic(arithmetic.inverse, (a,), result_type((a,))), a)
    _check_information(information, "torch.linalg.inv_ex", check_errors)
    return found, information


@implements(aten._linalg_det.default)
def linalg_det(a: MCTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the determinant."""
    return _run_arithmetic(arithmetic.det, (a,), result_type((a,))), *_factors(a, turned=True)


@implements(aten._linalg_slogdet.default)
def slogdet(a: MCTensor) -> tuple[Tensor, ...]:
    """Return the determinant's sign and the logarithm of its magnitude."""
    determinant = _run_arithmetic(arithmetic.det, (a,), result_type((a,)))
    return determinant.sign(), determinant.abs().log(), *_factors(a, turned=True)


@implements(aten.linalg_cholesky_ex.default)
def cholesky_ex(a: MCTensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """Return the triangular root of a positive definite matrix, and which matrices are not."""
    root, information = _run_each_with_info(lambda a: cholesky(a, upper), a)
    _check_information(information, "torch.linalg.cholesky_ex", check_errors)
    return root, information


@implements(aten.cholesky.default)
def cholesky(a: MCTensor, upper: bool = False) -> Tensor:
    """Return the Cholesky factor without the information which matrices have none."""
    lower = _run_arithmetic(arithmetic.cholesky, (a.mT if upper else a,), result_type((a,)))
    return lower.mT if upper else lower


@implements(aten.linalg_qr.default)
def linalg_qr(a: MCTensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Return orthonormal columns and a triangular factor."""
    if mode == "complete" and a.shape[-2] != a.shape[-1]:
        raise NotImplementedError("qr of MCTensors has the modes 'reduced' and 'r': the rest of Q is not unique")
    q, r = _run_arithmetic(arithmetic.qr, (a,), result_type((a,)))
    return (q.new_empty((0,)) if mode == "r" else q), r


@implements(aten.linalg_lstsq.default)
def lstsq(a: Any, b: Any, rcond: float | None = None, *, driver: str | None = None) -> tuple[Tensor, ...]:
    """Return the least-squares solution for a matrix of full column rank; another raises.

    Singular values, which two drivers give beside it, are computed in float64 and counted.
    """
    vector = b.dim() == a.dim() - 1
    right = b.unsqueeze(-1) if vector else b
    form = result_type((a, b))
    x = _run_arithmetic(arithmetic.lstsq, (a, right), form)
    rest = right - a @ x
    rank = torch.full(a.shape[:-2], a.shape[-1], dtype=torch.int64, device=a.device)
    tall = a.shape[-2] > a.shape[-1]
    residuals = (rest * rest).sum(-2) if tall else rest.new_empty((0,))
    by_singular_values = driver in ("gelsd", "gelss")
    values = torch.linalg.svdvals(evaluate("mul", a, 1, form=form)) if by_singular_values else x.new_empty((0,))
    return (x.squeeze(-1) if vector else x), residuals, rank, values


@implements(aten.linalg_solve_triangular.default)
def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Return a triangular system, of which the other triangle is not read."""
    form = result_type((a, b))
    triangle = a.triu() if upper else a.tril()
    if unitriangular:
        ones = torch.ones(a.shape[:-1], dtype=torch.float64, device=a.device)
        triangle = triangle - torch.diag_embed(triangle.diagonal(dim1=-2, dim2=-1)) + torch.diag_embed(ones)
    return _solve(triangle, b, left, form)


@implements(aten.triangular_solve.default)
def triangular_solve(
    b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """torch.triangular_solve, the deprecated operator that also returns its matrix."""
    turned = a.mT if transpose else a
    x = solve_triangular(turned, b, upper=upper != transpose, unitriangular=unitriangular)
    return x, a.clone()


@implements(aten.cholesky_solve.default)
def cholesky_solve(b: Any, root: Any, upper: bool = False) -> Tensor:
    """Return a system by the triangular root of its matrix."""
    first = solve_triangular(root.mT if upper else root, b, upper=False)
    return solve_triangular(root if upper else root.mT, first, upper=True)
