"""Linear algebra of expansions: solve, inverse, Cholesky, QR, determinant.

All begin with a float64 inverse W of the matrix, or of a triangular factor of it. |W a - 1| < 1/2 in the maximum norm
proves that the matrix is regular; Newton's iteration W += W (1 - a W) (Schulz 1933) makes that inverse exact to all
digits, and a W, which is nearly the identity or nearly orthonormal, has factors that no rounding spoils.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..kernels import define_operator, exponent, keeping_subnormals, power_of_two
from ._matmul import compute_row_exponents_and_factors, matmul
from ._pointwise import (
    MAX_COMPONENTS,
    PRECISION_BY_DTYPE,
    Parts,
    check_component_dtypes,
    find_component_kind,
    pointwise,
)


def solve(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the x with a x = b: the inverse times b, corrected by its residual.

    Rows and columns are scaled by powers of two first. With n components of p bits the error is at most a few 2^-(n p)
    of the largest entry of each column of x; four float64 components have no further one for the residual: there it is
    a few 2^-(n p) times the condition.

    Args:
        a: (..., N, N), 1 to 4 components of one dtype.
        b: (..., N, K); the dimensions before broadcast.
        components: of the result, 1 to 4.
        dtype: of the result.

    Returns:
        The components of x, (..., N, K).

    Raises:
        ValueError: shapes that do not match; infinities or NaNs.
        torch.linalg.LinAlgError: the matrix is singular, or its condition is beyond about 1e15.

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
    """Return the determinant of (..., N, N): the product of the diagonal of R in a = Q R, with the sign of Q's.

    Raises:
        ValueError: not square; infinities or NaNs.
        torch.linalg.LinAlgError: singular, or of a condition beyond about 1e15.
    """
    return _call_solver("det", a, (), components, dtype)


def _call_solver(name: str, a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    check_component_dtypes(find_component_kind(a), *([find_component_kind(b)] if b else []), (dtype, components))
    shape = a[0].shape
    if len(shape) < 2 or (name != "qr" and shape[-1] != shape[-2]):
        kind = "matrices (..., M, N)" if name == "qr" else "square matrices (..., N, N)"
        raise ValueError(f"{name} takes {kind}, got {tuple(shape)}")
    if b and (b[0].dim() < 2 or b[0].shape[-2] != shape[-2]):
        raise ValueError(
            f"{name} takes a right-hand side (..., {shape[-2]}, K), got {tuple(b[0].shape)}; unsqueeze(-1) a vector"
        )
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in (*a, *b)):
        return tuple(_linalg_operator(name, [*a, *b], len(a), components, dtype))
    return tuple(_run_solver(name, [*a, *b], len(a), components, dtype))


@keeping_subnormals()
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
    made = _SOLVER_BY_NAME[name](_WorkingPrecision.for_result(components, dtype), a, b)
    fit = [pointwise("renormalize", x, components=components, dtype=dtype) for x in made]
    return [part for x in fit for part in x]


def _make_empty_results(
    name: str, parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    a = parts[0].shape
    *batch, m, n = a
    shapes: list[Sequence[int]] = [a]
    if name == "qr":
        shapes = [(*batch, m, min(m, n)), (*batch, min(m, n), n)]
    elif name == "det":
        shapes = [batch]
    elif len(parts) > count:
        b = parts[count].shape
        shapes = [(*torch.broadcast_shapes(a[:-2], b[:-2]), n, b[-1])]
    return [parts[0].new_empty(shape, dtype=dtype) for shape in shapes for _ in range(components)]


_linalg_operator = define_operator(
    "linalg(str name, Tensor[] parts, int count, int components, ScalarType dtype) -> Tensor[]",
    _run_solver,
    _make_empty_results,
)


_MOST_REFINEMENT_STEPS = 12
_TEXT_NEARLY_SINGULAR = (
    "float64, in which the inverse starts, cannot tell the matrix from a singular one: its condition is beyond about "
    "1e15. Scale rows and columns, add a small multiple of the identity, or leave out dependent columns"
)


@dataclass(frozen=True)
class _WorkingPrecision:
    """Float64 components that carry a result and about 50 bits more, so that a residual keeps the result's digits."""

    components: int
    bits: int

    @classmethod
    def for_result(cls, components: int, dtype: torch.dtype) -> _WorkingPrecision:
        """Return the working precision for results of so many components of a dtype."""
        bits = components * PRECISION_BY_DTYPE[dtype]
        return cls(min(MAX_COMPONENTS, -(-(bits + 50) // 53)), bits)

    @property
    def negligible_residual(self) -> float:
        """The norm from which on the residual of an iteration no longer counts in the result."""
        return 2.0 ** -(self.bits + 3)

    @property
    def acceptable_residual(self) -> float:
        """The norm that rounding may leave where there is no further component for the residual."""
        return 2.0 ** -(min(self.bits, 53 * self.components - 50) - 4)

    def to_float64(self, parts: Parts) -> Parts:
        """Return operands as float64 components, as many as the work has or more."""
        return pointwise("renormalize", parts, components=max(self.components, len(parts)), dtype=torch.float64)

    def add(self, x: Parts, y: Parts) -> Parts:
        """x + y."""
        return pointwise("add", x, y, components=self.components, dtype=torch.float64)

    def subtract(self, x: Parts, y: Parts) -> Parts:
        """x - y."""
        return pointwise("sub", x, y, components=self.components, dtype=torch.float64)

    def matmul(self, x: Parts, y: Parts) -> Parts:
        """x @ y."""
        return matmul(x, y, self.components, torch.float64)


def _refine_inverse(work: _WorkingPrecision, a: Parts, near: torch.Tensor, task: str) -> Parts:
    """Return the inverse of a from a float64 one by W += W (1 - a W), which squares 1 - a W."""
    one = torch.eye(a[0].shape[-1], dtype=torch.float64, device=near.device)
    found: Parts = work.to_float64((near,))
    before: torch.Tensor | None = None
    for _ in range(_MOST_REFINEMENT_STEPS):
        rest = work.subtract((one,), work.matmul(a, found))
        off = _compute_checked_residual_norm(rest[0], task)
        found = work.add(found, work.matmul(found, rest))
        if bool((off <= work.negligible_residual).all()) or (before is not None and bool((off > before / 2).all())):
            break
        before = off
    if not bool((off <= work.acceptable_residual).all()):
        raise torch.linalg.LinAlgError(f"{task} does not converge: {_TEXT_NEARLY_SINGULAR}")
    return found


def _compute_checked_residual_norm(rest: torch.Tensor, task: str) -> torch.Tensor:
    """Return the maximum norm of what a product differs by from 1; raise where it is not below 1/2."""
    off = rest.abs().sum(-1).amax(-1)
    if not bool((off < 0.5).all()):
        raise torch.linalg.LinAlgError(f"{task}: {_TEXT_NEARLY_SINGULAR}")
    return off


def _refuse_singular(info: torch.Tensor, task: str) -> None:
    """Raise for a matrix in which LAPACK found a pivot of zero."""
    if bool((info != 0).any()):
        raise torch.linalg.LinAlgError(f"{task} met a pivot of zero: {_TEXT_NEARLY_SINGULAR}")


def _scale_rows_or_columns(parts: Parts, dim: int) -> tuple[Parts, torch.Tensor]:
    """Scale rows (dim = -1) or columns (dim = -2) by 2^-k to a largest magnitude in [1/2, 1); return them and k."""
    k, first, second = compute_row_exponents_and_factors(parts[0], dim)
    return tuple(part * first * second for part in parts), k


def _multiply_by_power_of_two(parts: Parts, k: torch.Tensor) -> Parts:
    """Multiply by 2^k for integer k of any size, without over- or underflow on the way."""
    out = parts
    for _ in range(3):
        step = k.clamp(-1000, 1000)
        out, k = tuple(part * power_of_two(step.double()) for part in out), k - step
    sound = torch.isfinite(out[0])
    return (out[0], *(torch.where(sound, part, 0.0) for part in out[1:]))


def _transpose(parts: Parts) -> Parts:
    return tuple(part.mT for part in parts)


def _equilibrate_and_invert(
    work: _WorkingPrecision, a: Parts, task: str
) -> tuple[Parts, Parts, torch.Tensor, torch.Tensor]:
    """Return a with rows and columns of about unit size, its inverse, and the exponents of rows and columns."""
    a, rows = _scale_rows_or_columns(work.to_float64(a), -1)
    a, columns = _scale_rows_or_columns(a, -2)
    near, info = torch.linalg.inv_ex(a[0])
    _refuse_singular(info, task)
    return a, _refine_inverse(work, a, near, task), rows, columns


def _compute_inverse(work: _WorkingPrecision, a: Parts) -> Parts:
    _, near, rows, columns = _equilibrate_and_invert(work, a, "inverse")
    return _multiply_by_power_of_two(_multiply_by_power_of_two(near, -columns.mT), -rows.mT)


def _solve_system(work: _WorkingPrecision, a: Parts, b: Parts) -> Parts:
    a, near, rows, columns = _equilibrate_and_invert(work, a, "solve")
    b = _multiply_by_power_of_two(work.to_float64(b), -rows)
    x = work.matmul(near, b)
    for _ in range(2):  # what is small beside the inverse times b becomes right by corrections
        x = work.add(x, work.matmul(near, work.subtract(b, work.matmul(a, x))))
    x = _multiply_by_power_of_two(x, -columns.mT)
    if not bool(x[0].isfinite().all()):
        raise torch.linalg.LinAlgError("a solution is beyond float64's largest number: scale both sides")
    return x


def _factor_positive_definite(work: _WorkingPrecision, a: Parts) -> Parts:
    """Lower L with L L^T = a, of which the lower triangle is read."""
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
    return _multiply_by_power_of_two(_compute_refined_cholesky_factor(work, a, "cholesky"), half)


def _compute_refined_cholesky_factor(work: _WorkingPrecision, a: Parts, task: str) -> Parts:
    """L += L phi(L^-1 (a - L L^T) L^-T) from a float64 factor, phi the lower triangle with half the diagonal."""
    start, info = torch.linalg.cholesky_ex(a[0])
    _refuse_singular(info, task)
    factor, before = work.to_float64((start,)), torch.tensor(torch.inf, dtype=torch.float64, device=start.device)
    for _ in range(_MOST_REFINEMENT_STEPS):
        rest = work.subtract(a, work.matmul(factor, _transpose(factor)))[0]
        near = torch.linalg.solve_triangular(start, rest, upper=False)
        near = torch.linalg.solve_triangular(start.mT, near, upper=True, left=False)
        lower = near.tril(-1) + torch.diag_embed(near.diagonal(dim1=-2, dim2=-1) / 2)
        factor = work.add(factor, (start @ lower,))
        off = near.abs().amax()
        if bool(off <= work.negligible_residual) or not bool(off < before / 4):
            break
        before = off
    if not bool(off <= work.acceptable_residual):
        raise torch.linalg.LinAlgError(f"{task} does not converge: {_TEXT_NEARLY_SINGULAR}")
    return factor


def _factor_orthogonally(work: _WorkingPrecision, a: Parts, task: str) -> tuple[Parts, Parts]:
    """Return Q with orthonormal columns and upper R, Q R = a; the signs are LAPACK's.

    Of a float64 W = R^-1, a W is nearly orthonormal: with (a W)^T (a W) = C^T C, Q = (a W) C^-1 and R = C W^-1.
    """
    m, n = a[0].shape[-2:]
    if m < n:
        q, left = _factor_orthogonally(work, tuple(part[..., :m] for part in a), task)
        right = work.matmul(_transpose(q), tuple(part[..., m:] for part in work.to_float64(a)))
        return q, tuple(torch.cat(parts, -1) for parts in zip(left, right, strict=True))
    a, columns = _scale_rows_or_columns(work.to_float64(a), -2)
    start = torch.linalg.qr(a[0]).R
    _refuse_singular(start.diagonal(dim1=-2, dim2=-1) == 0, task)
    one = torch.eye(start.shape[-1], dtype=start.dtype, device=start.device).expand(start.shape)
    near = (torch.linalg.solve_triangular(start, one, upper=True),)
    q = work.matmul(a, near)
    gram = work.matmul(_transpose(q), q)
    # Also proves that W is no further from the inverse than its digits reach.
    _compute_checked_residual_norm(gram[0] - one, task)
    factor = _transpose(_compute_refined_cholesky_factor(work, gram, task))
    back = tuple(part.triu() for part in _refine_inverse(work, near, torch.linalg.inv(near[0]), task))
    r = tuple(part.triu() for part in work.matmul(factor, back))
    q = work.matmul(q, _refine_inverse(work, factor, torch.linalg.inv(factor[0]), task))
    return q, _multiply_by_power_of_two(r, columns)


def _compute_determinant(work: _WorkingPrecision, a: Parts) -> Parts:
    """Return the product of R's diagonal in a = Q R, with its power of two kept apart."""
    a, rows = _scale_rows_or_columns(work.to_float64(a), -1)
    a, columns = _scale_rows_or_columns(a, -2)
    q, r = _factor_orthogonally(work, a, "det")
    diagonal = tuple(part.diagonal(dim1=-2, dim2=-1) for part in r)
    # Of a nearly singular matrix float64 may not know the sign; of an orthonormal one it does.
    sign = torch.linalg.slogdet(q[0]).sign
    digits, k = _reduce_product_over_last_dimension(work, diagonal)
    k = k + rows.sum((-2, -1)) + columns.sum((-2, -1))
    return _multiply_by_power_of_two(tuple(part * sign for part in digits), k)


def _reduce_product_over_last_dimension(work: _WorkingPrecision, x: Parts) -> tuple[Parts, torch.Tensor]:
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


_SOLVER_BY_NAME: dict[str, Callable[[_WorkingPrecision, Parts, Parts], Sequence[Parts]]] = {
    "solve": lambda work, a, b: [_solve_system(work, a, b)],
    "inverse": lambda work, a, _: [_compute_inverse(work, a)],
    "cholesky": lambda work, a, _: [_factor_positive_definite(work, a)],
    "qr": lambda work, a, _: _factor_orthogonally(work, a, "qr"),
    "det": lambda work, a, _: [_compute_determinant(work, a)],
}
