"""Linear algebra of expansions to all their digits: solve, inverse, least squares, Cholesky, QR, determinant.

A float64 factorization starts, and residuals in more components correct it. A system that float64 takes for singular
is eliminated in integers: Gauss and Jordan's elimination with many bits behind the point makes an approximate inverse
Z. |Z a - 1| in the maximum norm, computed exactly, proves that a is regular and, being below the last digit that is
wanted, that Z b has all.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels import define_operator, exponent, power
from ._exact_products import find_row_exponents
from ._matmul import matmul
from ._pointwise import MOST, PRECISION, Parts, check_component_dtypes, pointwise

_NAMES_OF_SQUARE_SOLVERS = ("solve", "inverse", "cholesky", "det")


def solve(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the x with a x = b, refined from a float64 LU factorization until no digit changes.

    x += (LU)^-1 (b - a x), the residual with a component more than the result (Wilkinson 1963). Rows and columns are
    scaled by powers of two first. The error is at most a few 2^-(n p) of the largest entry of each column of x; four
    float64 components have no further one for the residual: there it is a few 2^-(n p) times the condition.

    A single matrix that float64 takes for singular is eliminated in integers of up to 1,024 bits instead: the error is
    the same for conditions up to about 1e58, N up to 128. Of a stack give such a matrix by itself.

    Args:
        a: (..., N, N), 1 to 4 components of one dtype.
        b: (..., N, K); the dimensions before broadcast.
        components: of the result, 1 to 4.
        dtype: of the result.

    Returns:
        The components of x, (..., N, K).

    Raises:
        ValueError: shapes that do not match; infinities or NaNs.
        torch.linalg.LinAlgError: the matrix is singular, or its condition is beyond about 1e58.

    >>> import torch
    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> x = solve((a,), (torch.ones(2, 1, dtype=torch.float64),), components=2, dtype=torch.float64)
    >>> (5 * x[0] + 5 * x[1]).tolist()
    [[2.0], [1.0]]
    """
    return _call_solver("solve", a, b, components, dtype)


def inverse(a: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the inverse of (..., N, N): the solution of a x = 1, with `solve`'s accuracy and errors."""
    return _call_solver("inverse", a, (), components, dtype)


def lstsq(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the x of least |b - a x| for a of full column rank, refined together with the residual (Bjorck 1967).

    Args:
        a: (..., M, N) with M >= N.
        b: (..., M, K).
        components: of the result, 1 to 4.
        dtype: of the result.

    Returns:
        The components of x, (..., N, K).

    Raises:
        ValueError: shapes that do not match, M < N; infinities or NaNs.
        torch.linalg.LinAlgError: the columns are dependent, or nearly.
    """
    return _call_solver("lstsq", a, b, components, dtype)


def cholesky(a: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the lower L with L L^T = a for a positive definite (..., N, N), of which the lower triangle is read.

    L += L phi(L^-1 (a - L L^T) L^-T), phi the lower triangle with half the diagonal.

    Raises:
        ValueError: not square; infinities or NaNs.
        torch.linalg.LinAlgError: not positive definite, or of a condition beyond about 1e15.
    """
    return _call_solver("cholesky", a, (), components, dtype)


def qr(a: Parts, components: int, dtype: torch.dtype) -> tuple[Parts, Parts]:
    """Return Q (..., M, k) with orthonormal columns and upper R (..., k, N), Q R = a, k = min(M, N).

    Raises:
        ValueError: infinities or NaNs.
        torch.linalg.LinAlgError: the first k columns are dependent, or nearly.
    """
    made = _call_solver("qr", a, (), components, dtype)
    return made[:components], made[components:]


def det(a: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the determinant of (..., N, N): of refined LU factors, or, where float64 cannot start, by exact integers.

    The exact way takes N up to 64; it also tells that a determinant is zero.

    Raises:
        ValueError: not square; infinities or NaNs.
        torch.linalg.LinAlgError: N > 64 and singular, or of a condition beyond about 1e15.
    """
    return _call_solver("det", a, (), components, dtype)


def _call_solver(name: str, a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    check_component_dtypes(*[(x[0].dtype, len(x)) for x in (a, b) if x], (dtype, components))
    _check_shapes(name, a[0].shape, b[0].shape if b else None)
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in (*a, *b)):
        return tuple(_linalg_operator(name, [*a, *b], len(a), components, dtype))
    return tuple(_run_solver(name, [*a, *b], len(a), components, dtype))


def _check_shapes(name: str, a: torch.Size, b: torch.Size | None) -> None:
    if len(a) < 2 or (name in _NAMES_OF_SQUARE_SOLVERS and a[-1] != a[-2]):
        kind = "square matrices (..., N, N)" if name in _NAMES_OF_SQUARE_SOLVERS else "matrices (..., M, N)"
        raise ValueError(f"{name} takes {kind}, got {tuple(a)}")
    if name == "lstsq" and a[-2] < a[-1]:
        raise ValueError(f"lstsq takes at least as many rows as columns, got {tuple(a)}: its solution is not unique")
    if b is not None and (len(b) < 2 or b[-2] != a[-2]):
        raise ValueError(f"{name} takes a right-hand side (..., {a[-2]}, K), got {tuple(b)}; unsqueeze(-1) a vector")


def _run_solver(
    name: str, parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    a, b = (tuple(part.detach() for part in some) for some in (parts[:count], parts[count:]))
    for operand in (a, b):
        if operand and not bool(operand[0].isfinite().all()):
            raise ValueError(f"{name} of infinities or NaNs: there is no solution; look for them with isfinite()")
    empty = _make_empty_results(name, parts, count, components, dtype)
    if not all(part.numel() for part in (a[0], *empty)):
        return [part.fill_(name == "det" and k == 0) for k, part in enumerate(empty)]
    if b:
        batch = torch.broadcast_shapes(a[0].shape[:-2], b[0].shape[:-2])
        a, b = (tuple(part.expand(*batch, *part.shape[-2:]) for part in some) for some in (a, b))
    made = _compute_solution(name, _WorkingPrecision.for_result(components, dtype), a, b)
    fit = [pointwise("renormalize", x, components=components, dtype=dtype) for x in made]
    return [part for x in fit for part in x]


def _compute_solution(name: str, work: _WorkingPrecision, a: Parts, b: Parts) -> tuple[Parts, ...]:
    if name == "inverse":
        b = (torch.eye(a[0].shape[-1], dtype=torch.float64, device=a[0].device).expand(a[0].shape),)
    if name in ("solve", "inverse"):
        return (_solve_system(work, a, b, name),)
    if name == "lstsq":
        return (_solve_least_squares(work, a, b),)
    if name == "cholesky":
        return (_factor_positive_definite(work, a),)
    if name == "qr":
        return _factor_orthogonally(work, a)
    try:
        return (_compute_determinant(work, a),)
    except torch.linalg.LinAlgError:
        return (_compute_exact_determinants(a),)


def _find_result_shapes(name: str, a: torch.Size, b: torch.Size | None) -> list[torch.Size]:
    m, n = a[-2:]
    if name == "qr":
        k = min(m, n)
        return [torch.Size((*a[:-2], m, k)), torch.Size((*a[:-2], k, n))]
    if name == "det":
        return [a[:-2]]
    if b is None:
        return [a]
    return [torch.Size((*torch.broadcast_shapes(a[:-2], b[:-2]), n, b[-1]))]


def _make_empty_results(
    name: str, parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    shapes = _find_result_shapes(name, parts[0].shape, parts[count].shape if len(parts) > count else None)
    return [parts[0].new_empty(shape, dtype=dtype) for shape in shapes for _ in range(components)]


_linalg_operator = define_operator(
    "linalg(str name, Tensor[] parts, int count, int components, ScalarType dtype) -> Tensor[]",
    _run_solver,
    _make_empty_results,
)


# refinement --------------------------------------------------------------------------------------------------

_MOST_CORRECTIONS = 60  # each one that counts brings at least two bits
_MATRIX_DIMENSIONS = (-2, -1)
_TEXT_NEARLY_SINGULAR = (
    "float64, in which refinement starts, sees no regular matrix: its condition is beyond about 1e15. Scale rows and "
    "columns, add a small multiple of the identity, leave out dependent columns, or take solve, which eliminates a "
    "matrix of up to 128 rows that comes by itself, and no stack, in integers"
)


@dataclass(frozen=True)
class _WorkingPrecision:
    """Float64 components that carry a result and about 50 bits more, so that a residual keeps the result's digits."""

    components: int
    bits: int

    @classmethod
    def for_result(cls, components: int, dtype: torch.dtype) -> _WorkingPrecision:
        """Return the working precision for results of so many components of a dtype."""
        bits = components * PRECISION[dtype]
        return cls(min(MOST, -(-(bits + 50) // 53)), bits)

    def to_float64(self, parts: Parts) -> Parts:
        """Return operands as float64 components, as many as the work has or more."""
        return pointwise("renormalize", parts, components=max(self.components, len(parts)), dtype=torch.float64)

    def add(self, x: Parts, y: Parts) -> Parts:
        """x + y; y where x has no parts yet."""
        if not x:
            return self.to_float64(y)
        return pointwise("add", x, y, components=self.components, dtype=torch.float64)

    def sub(self, x: Parts, y: Parts) -> Parts:
        """x - y."""
        return pointwise("sub", x, y, components=self.components, dtype=torch.float64)

    def matmul(self, x: Parts, y: Parts) -> Parts:
        """x @ y."""
        return matmul(x, y, self.components, torch.float64)

    def residual(self, b: Parts, x: Parts, y: Parts) -> torch.Tensor:
        """b - x @ y, rounded to float64 at the end."""
        return self.sub(b, self.matmul(x, y))[0]


class _RefinementProgress:
    """Decides after each correction whether it was the last one; `task` names for the error what is computed."""

    def __init__(self, work: _WorkingPrecision, task: str) -> None:
        # One more correction than the largest entries need serves entries that are smaller by up to 2^-50.
        self._enough = 2.0 ** -(work.bits + 3)
        self._acceptable = 2.0 ** -(min(work.bits, 53 * work.components - 50) - 4)
        self._before: torch.Tensor | None = None
        self._count = 0
        self._task = task

    def is_done(self, step: torch.Tensor, size: torch.Tensor | float) -> bool:
        """Return whether every correction, of largest entry `step`, is small enough against what it corrects.

        Raises:
            torch.linalg.LinAlgError: corrections do not shrink.
        """
        relative = torch.where(step == 0, 0.0, step / size)
        fine = relative <= self._enough
        if bool(fine.all()):
            return True
        before, self._before, self._count = self._before, relative, self._count + 1
        stuck = ~relative.isfinite()
        # The first solution may be all rounding, where it is small beside the right-hand side; then so is its error.
        if before is not None and self._count > 2:
            stuck |= ~(relative <= before / 4)
        if bool((stuck & ~(relative <= self._acceptable)).any()):
            raise torch.linalg.LinAlgError(f"{self._task} does not converge: {_TEXT_NEARLY_SINGULAR}")
        return bool((stuck | fine).all()) or self._count == _MOST_CORRECTIONS


def _refine(
    work: _WorkingPrecision,
    task: str,
    rest: torch.Tensor,
    solve: Callable[[torch.Tensor], torch.Tensor],
    find_residual: Callable[[Parts], torch.Tensor],
    dims: tuple[int, ...] = (-2,),
) -> Parts:
    """Return x, to which the solution of its residual is added until no digit changes; the first one is `rest`."""
    progress = _RefinementProgress(work, task)
    x: Parts = ()
    while True:
        step = solve(rest)
        x = work.add(x, (step,))
        if progress.is_done(_find_largest_magnitudes(step, dims), _find_largest_magnitudes(x[0], dims)):
            return x
        rest = find_residual(x)


def _refuse_singular(info: torch.Tensor, task: str) -> None:
    """Raise for a matrix in which LAPACK found a pivot of zero."""
    if bool((info != 0).any()):
        raise torch.linalg.LinAlgError(f"{task} met a pivot of zero: {_TEXT_NEARLY_SINGULAR}")


def _prove_regular(a: Parts, near: torch.Tensor, task: str) -> None:
    """Prove by |near a - 1| < 1/2 in the maximum norm that a is regular; `near` is about the inverse.

    Refinement alone does not: where b lies in the range of a singular matrix it converges, to any of the solutions.
    """
    one = torch.eye(a[0].shape[-1], dtype=near.dtype, device=near.device)
    off = (near @ a[0] - one).abs() + (near.abs() @ a[0].abs()) * (4 * near.shape[-1] * 2.0**-53)
    if not bool((off.sum(-1) < 0.5).all()):
        exact = matmul((near,), a, 2, torch.float64)
        off = pointwise("sub", exact, (one,), components=1, dtype=torch.float64)[0].abs()
        if not bool((off.sum(-1) < 0.5).all()):
            raise torch.linalg.LinAlgError(
                f"{task} cannot tell the matrix from a singular one: {_TEXT_NEARLY_SINGULAR}"
            )


def _find_largest_magnitudes(x: torch.Tensor, dims: tuple[int, ...] = (-2,)) -> torch.Tensor:
    """Return the largest magnitude of each column, or of each matrix."""
    return x.abs().amax(dims)


def _scale_to_unit_size(parts: Parts, dim: int) -> tuple[Parts, torch.Tensor]:
    """Scale rows (dim = -1) or columns (dim = -2) by 2^-k to a largest magnitude in [1/2, 1); return them and k."""
    k, first, second = find_row_exponents(parts[0], dim)
    return tuple(part * first * second for part in parts), k


def _multiply_by_power_of_two(parts: Parts, k: torch.Tensor) -> Parts:
    """Multiply by 2^k for integer k of any size, without over- or underflow on the way."""
    out = parts
    for _ in range(3):
        step = k.clamp(-1000, 1000)
        out, k = tuple(part * power(step.double()) for part in out), k - step
    sound = torch.isfinite(out[0])
    return (out[0], *(torch.where(sound, part, 0.0) for part in out[1:]))


# systems -----------------------------------------------------------------------------------------------------


def _solve_system(work: _WorkingPrecision, a: Parts, b: Parts, task: str) -> Parts:
    """x with a x = b, corrected until the correction no longer counts; rows and columns are of about unit size."""
    a, rows = _scale_to_unit_size(work.to_float64(a), -1)
    a, columns = _scale_to_unit_size(a, -2)
    b = _multiply_by_power_of_two(work.to_float64(b), -rows)
    try:
        x = _refine_solution(work, a, b, task)
    except torch.linalg.LinAlgError:
        if a[0].dim() > 2:
            raise
        x = _solve_by_elimination(work, a, b, task)
    return _multiply_by_power_of_two(x, -columns.mT)


def _refine_solution(work: _WorkingPrecision, a: Parts, b: Parts, task: str) -> Parts:
    """x += (LU)^-1 (b - a x), LU in float64."""
    factors, pivots, info = torch.linalg.lu_factor_ex(a[0])
    _refuse_singular(info, task)
    one = torch.eye(a[0].shape[-1], dtype=torch.float64, device=a[0].device).expand(a[0].shape)
    _prove_regular(a, torch.linalg.lu_solve(factors, pivots, one), task)
    return _refine(
        work,
        task,
        b[0],
        lambda rest: torch.linalg.lu_solve(factors, pivots, rest),
        lambda x: work.residual(b, a, x),
    )


def _solve_least_squares(work: _WorkingPrecision, a: Parts, b: Parts) -> Parts:
    """x of least |b - a x|, by refinement of r + a x = b, a^T r = 0 (Bjorck 1967), from QR in float64."""
    a, columns = _scale_to_unit_size(work.to_float64(a), -2)
    b, transposed = work.to_float64(b), tuple(part.mT for part in a)
    q, r = torch.linalg.qr(a[0])
    _refuse_singular(r.diagonal(dim1=-2, dim2=-1) == 0, "lstsq")
    # a R^-1 is orthonormal but for rounding, and hence a's columns independent, or they may not be.
    one = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device).expand(r.shape)
    near = matmul(a, (torch.linalg.solve_triangular(r, one, upper=True),), 2, torch.float64)[0]
    _prove_regular((near,), near.mT, "lstsq")
    progress = _RefinementProgress(work, "lstsq")
    x: Parts = ()
    rest: Parts = ()
    upper, lower = b[0], torch.zeros_like(r[..., :1].expand(*r.shape[:-1], b[0].shape[-1]))
    # Corrections are judged by the solution's size, or one that the right-hand side resolves.
    resolved = _find_largest_magnitudes(b[0]) * 2.0 ** -(53 * work.components - 60 - work.bits / 2)
    while True:
        # The float64 solution of dr + a dx = upper, a^T dr = lower.
        height = torch.linalg.solve_triangular(r.mT, lower, upper=False)
        seen = q.mT @ upper
        step = torch.linalg.solve_triangular(r, seen - height, upper=True)
        x, rest = work.add(x, (step,)), work.add(rest, (upper - q @ (seen - height),))
        if progress.is_done(_find_largest_magnitudes(step), torch.maximum(_find_largest_magnitudes(x[0]), resolved)):
            return _multiply_by_power_of_two(x, -columns.mT)
        upper = work.sub(work.sub(b, rest), work.matmul(a, x))[0]
        lower = -work.matmul(transposed, rest)[0]


# factors -----------------------------------------------------------------------------------------------------


def _factor_positive_definite(work: _WorkingPrecision, a: Parts) -> Parts:
    """Lower L with L L^T = a, of which the lower triangle is read: L += L phi(L^-1 (a - L L^T) L^-T)."""
    a = tuple(part.tril() + part.tril(-1).mT for part in work.to_float64(a))
    diagonal = a[0].diagonal(dim1=-2, dim2=-1)
    if not bool((diagonal > 0).all()):
        raise torch.linalg.LinAlgError(
            "cholesky: a number on the matrix's diagonal is not positive, in float64 or at all, so that the matrix is "
            "not positive definite: add a multiple of the identity"
        )
    # Halves of even powers of two scale L exactly.
    half = (exponent(diagonal) / 2).floor().unsqueeze(-1)
    a = _multiply_by_power_of_two(_multiply_by_power_of_two(a, -half), -half.mT)
    return _multiply_by_power_of_two(_refine_cholesky_factor(work, a, "cholesky"), half)


def _refine_cholesky_factor(work: _WorkingPrecision, a: Parts, task: str) -> Parts:
    start, info = torch.linalg.cholesky_ex(a[0])
    _refuse_singular(info, task)
    progress, factor = _RefinementProgress(work, task), work.to_float64((start,))
    while True:
        rest = work.residual(a, factor, tuple(part.mT for part in factor))
        near = torch.linalg.solve_triangular(start, rest, upper=False)
        near = torch.linalg.solve_triangular(start.mT, near, upper=True, left=False)
        lower = near.tril(-1) + torch.diag_embed(near.diagonal(dim1=-2, dim2=-1) / 2)
        factor = work.add(factor, (start @ lower,))
        if progress.is_done(_find_largest_magnitudes(near, _MATRIX_DIMENSIONS), 1.0):
            return factor


def _factor_orthogonally(work: _WorkingPrecision, a: Parts) -> tuple[Parts, Parts]:
    """Return Q with orthonormal columns and upper R, Q R = a; the signs are LAPACK's.

    Q~ = a R0^-1 is orthonormal but for float64's rounding; Q~^T Q~ = C^T C, refined, makes R = C R0 and Q = a R^-1.
    """
    m, n = a[0].shape[-2:]
    if m < n:
        q, left = _factor_orthogonally(work, tuple(part[..., :m] for part in a))
        right = work.matmul(tuple(part.mT for part in q), tuple(part[..., m:] for part in work.to_float64(a)))
        return q, tuple(torch.cat(parts, -1) for parts in zip(left, right, strict=True))
    a, columns = _scale_to_unit_size(work.to_float64(a), -2)
    start = torch.linalg.qr(a[0]).R
    _refuse_singular(start.diagonal(dim1=-2, dim2=-1) == 0, "qr")
    near = _divide_by_upper(work, a, work.to_float64((start,)))
    factor = _refine_cholesky_factor(work, work.matmul(tuple(part.mT for part in near), near), "qr")
    r = tuple(part.triu() for part in work.matmul(tuple(part.mT for part in factor), (start,)))
    return _divide_by_upper(work, a, r), _multiply_by_power_of_two(r, columns)


def _divide_by_upper(work: _WorkingPrecision, a: Parts, r: Parts) -> Parts:
    """x with x r = a for an upper r."""
    return _refine(
        work,
        "qr",
        a[0],
        lambda rest: torch.linalg.solve_triangular(r[0], rest, upper=True, left=False),
        lambda x: work.residual(a, x, r),
        _MATRIX_DIMENSIONS,
    )


def _compute_determinant(work: _WorkingPrecision, a: Parts) -> Parts:
    """Return the product of U's diagonal in P a = L U, with its power of two kept apart.

    Raises:
        torch.linalg.LinAlgError: float64's factors are too far off to refine.
    """
    a, rows = _scale_to_unit_size(work.to_float64(a), -1)
    a, columns = _scale_to_unit_size(a, -2)
    factors, pivots, info = torch.linalg.lu_factor_ex(a[0])
    _refuse_singular(info, "det")
    permutation, low, high = torch.lu_unpack(factors, pivots)
    a = tuple(permutation.mT @ part for part in a)
    lower, upper, progress = work.to_float64((low,)), work.to_float64((high,)), _RefinementProgress(work, "det")
    is_done = False
    while not is_done:
        rest = work.residual(a, lower, upper)
        near = torch.linalg.solve_triangular(low, rest, upper=False, unitriangular=True)
        near = torch.linalg.solve_triangular(high, near, upper=True, left=False)
        lower = work.add(lower, (low @ near.tril(-1),))
        upper = work.add(upper, (near.triu() @ high,))
        is_done = progress.is_done(_find_largest_magnitudes(near, _MATRIX_DIMENSIONS), 1.0)
    ratio = upper[0].diagonal(dim1=-2, dim2=-1) / high.diagonal(dim1=-2, dim2=-1)
    # A pivot that was all rounding is left with the residual's rounding, however small its corrections have become.
    _refuse_singular(~((ratio > 0.5) & (ratio < 2.0)), "det")
    swaps = (pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device, dtype=torch.int64)).sum(-1) % 2
    digits, k = _multiply_along_last_dimension(work, tuple(part.diagonal(dim1=-2, dim2=-1) for part in upper))
    k = k + rows.sum((-2, -1)) + columns.sum((-2, -1))
    return _multiply_by_power_of_two(tuple(part * (1 - 2 * swaps) for part in digits), k)


def _multiply_along_last_dimension(work: _WorkingPrecision, x: Parts) -> tuple[Parts, torch.Tensor]:
    """Return the product over the last dimension as parts near 1 and an exponent."""
    powers = torch.zeros(x[0].shape[:-1], dtype=torch.float64, device=x[0].device)
    while True:
        k = exponent(x[0])
        x, powers = _multiply_by_power_of_two(x, -k), powers + k.sum(-1)
        count = x[0].shape[-1]
        if count == 1:
            return tuple(part[..., 0] for part in x), powers
        half = count // 2
        pairs = [tuple(part[..., i : i + half] for part in x) for i in (0, half)]
        made = pointwise("mul", *pairs, components=work.components, dtype=torch.float64)
        x = tuple(torch.cat((part, old[..., 2 * half :]), -1) for part, old in zip(made, x, strict=True))


# integers ----------------------------------------------------------------------------------------------------

_MOST_ELIMINATED_ROWS = 128
_MOST_DETERMINANT_ROWS = 64
# Behind the point, tried in this order: a condition of 1e58 has 193 bits.
_FRACTION_BITS = (256, 1024)


def _solve_by_elimination(work: _WorkingPrecision, a: Parts, b: Parts, task: str) -> Parts:
    """x with a x = b for one matrix (N, N) of about unit size, of float64 components, as b's (N, K).

    Raises:
        torch.linalg.LinAlgError: a is singular, or nearly; N > 128; the solution is beyond float64.
    """
    why = f"neither can integers of {_FRACTION_BITS[-1]} bits"
    if len(a[0]) > _MOST_ELIMINATED_ROWS:
        why = f"elimination in integers serves up to {_MOST_ELIMINATED_ROWS} rows, and this matrix has {len(a[0])}"
    else:
        matrix = _IntegerMatrix.of(a)
        for bits in _FRACTION_BITS:
            near = _invert_integer_matrix(matrix, bits)
            if near is not None and _is_near_identity(near @ matrix, work.bits + 3):
                x = (near @ _IntegerMatrix.of(b)).parts(b[0].device, work.components)
                _refuse_infinite(x)
                return x
    raise torch.linalg.LinAlgError(
        f"{task}: float64 cannot tell the matrix from a singular one, and {why}. Scale rows and columns, add a small "
        "multiple of the identity, or leave out dependent columns"
    )


def _refuse_infinite(parts: Parts) -> None:
    """Raise for a side of a system that is not finite."""
    if not all(bool(part.isfinite().all()) for part in parts):
        raise torch.linalg.LinAlgError("a solution is beyond float64's largest number: scale both sides")


class _IntegerMatrix:
    """A matrix of expansions as Python integers times one power of two."""

    def __init__(self, values: np.ndarray, power: int) -> None:
        self.values, self.power = values, power

    @classmethod
    def of(cls, parts: Parts) -> _IntegerMatrix:
        """Return the exact sum of finite float64 components."""
        _refuse_infinite(parts)
        fractions, exponents = zip(*(np.frexp(part.detach().cpu().numpy()) for part in parts), strict=True)
        power = min(int(np.min(e, where=f != 0, initial=0)) for f, e in zip(fractions, exponents, strict=True)) - 53
        values: np.ndarray = np.zeros(parts[0].shape, dtype=object)
        for fraction, scale in zip(fractions, exponents, strict=True):
            shifts = np.where(fraction == 0, 0, scale - 53 - power).astype(object)
            values = values + (np.ldexp(fraction, 53).astype(np.int64).astype(object) << shifts)
        bits = functools.reduce(operator.or_, values.flat, 0)
        zeros = max(0, (bits & -bits).bit_length() - 1)  # behind the last digit of all
        return cls(values >> zeros, power + zeros)

    def __matmul__(self, other: _IntegerMatrix) -> _IntegerMatrix:
        return _IntegerMatrix(self.values @ other.values, self.power + other.power)

    def parts(self, device: torch.device, components: int = MOST) -> Parts:
        """Return the matrix rounded to float64 components."""
        rows = [_round_to_floats(int(value), self.power, components) for value in self.values.flat]
        wide = torch.tensor(rows, dtype=torch.float64, device=device).reshape(*self.values.shape, components)
        return pointwise("renormalize", tuple(wide.unbind(-1)), components=components, dtype=torch.float64)


def _round_to_floats(value: int, power: int, components: int) -> list[float]:
    """Return components of value 2^power, each the nearest float64 to what is left; behind an infinity follow zeros."""
    out: list[float] = []
    value, behind = value << max(0, power), max(0, -power)
    for _ in range(components):
        try:
            head = value / (1 << behind)  # Python divides integers with one rounding, of subnormals too
        except OverflowError:
            return [math.inf if value > 0 else -math.inf, *[0.0] * (components - 1)]
        out.append(head)
        above, below = head.as_integer_ratio()
        value -= (above << behind) // below
    return out


def _is_near_identity(a: _IntegerMatrix, bits: int) -> bool:
    """Return whether |a - 1| < 2^-bits in the maximum norm."""
    point = max(0, -a.power)
    off = (a.values << point + a.power) - (np.eye(len(a.values), dtype=object) << point)
    return bool(abs(off).sum(1).max() << bits < 1 << point)


def _invert_integer_matrix(a: _IntegerMatrix, bits: int) -> _IntegerMatrix | None:
    """Invert a by eliminating [a, 1], with partial pivoting and so many bits behind the point; None if it fails."""
    rows, shift = len(a.values), a.power + bits
    values = a.values << shift if shift > 0 else a.values >> -shift
    table = np.concatenate([values, np.eye(rows, dtype=object) << bits], 1)
    for k in range(rows):
        pivot = k + int(np.argmax(abs(table[k:, k])))
        if not table[pivot, k]:
            return None
        table[[k, pivot]] = table[[pivot, k]]
        row = table[k, k:] = (table[k, k:] << bits) // table[k, k]
        factors = table[:, k].copy()
        factors[k] = 0
        table[:, k:] -= factors[:, None] * row >> bits
    return _IntegerMatrix(table[:, rows:], -bits)


def _compute_exact_determinants(a: Parts) -> Parts:
    """Return four float64 components of det(..., N, N), by Bareiss' division-free elimination (1968)."""
    size = a[0].shape[-1]
    if size > _MOST_DETERMINANT_ROWS:
        raise torch.linalg.LinAlgError(
            f"det of a {size} x {size} matrix that is singular, or of a condition beyond about 1e15: float64, in which "
            f"refinement starts, cannot tell which, and exact integers serve up to {_MOST_DETERMINANT_ROWS} rows. "
            "Scale rows and columns by powers of two, or take the determinant of a factor"
        )
    found = []
    for parts in zip(*(part.double().reshape(-1, size, size) for part in a), strict=True):
        matrix = _IntegerMatrix.of(parts)
        rows, sign, before = matrix.values.copy(), 1, 1
        for k in range(size - 1):
            pivot = next((i for i in range(k, size) if rows[i, k]), None)
            if pivot is None:
                rows[:], sign = 0, 0
                break
            if pivot != k:
                rows[[k, pivot]], sign = rows[[pivot, k]], -sign
            below, corner = rows[k + 1 :, k + 1 :], rows[k, k]
            below[:] = (below * corner - rows[k + 1 :, k : k + 1] * rows[k, k + 1 :]) // before
            before = corner
        found.append(_IntegerMatrix(sign * rows[-1:, -1:], matrix.power * size).parts(a[0].device))
    return tuple(torch.cat(parts).reshape(a[0].shape[:-2]) for parts in zip(*found, strict=True))
