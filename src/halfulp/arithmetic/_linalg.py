"""Linear algebra of expansions to all their digits: solve, inverse, least squares, Cholesky, QR, determinant.

Matrices that float64 takes for singular go, one by one, through elimination in integers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels import define_operator
from . import _elimination as factors
from ._elimination import compute_exact_determinants, solve_by_elimination, solve_lstsq_by_elimination
from ._matmul import matmul
from ._pointwise import Parts, check_components, pointwise
from ._refinement import (
    MOST_CORRECTIONS,
    RefinementProgress,
    WorkingPrecision,
    find_maxima,
    multiply_by_power_of_two,
    prove_regular,
    refuse_singular,
    scale_to_unit_size,
)


def _solve_system(work: WorkingPrecision, a: Parts, b: Parts, task: str = "solve") -> Parts:
    """x with a x = b, corrected until the correction no longer counts; rows and columns are of about unit size."""
    a, rows = scale_to_unit_size(work.to_float64(a), -1)
    a, columns = scale_to_unit_size(a, -2)
    b = multiply_by_power_of_two(work.to_float64(b), -rows)
    x = _solve_from_float64(_refine_solution, solve_by_elimination, work, a, b, task)
    return multiply_by_power_of_two(x, -columns.mT)


def _solve_from_float64(
    quick: Callable[..., Parts], slow: Callable[..., Parts], work: WorkingPrecision, a: Parts, b: Parts, task: str
) -> Parts:
    """Solve all systems from a float64 start, or, where one has none, each system by itself."""
    try:
        return quick(work, a, b, task)
    except torch.linalg.LinAlgError:
        if a[0].dim() == 2:
            return slow(work, a, b, task)
    shape = a[0].shape[:-2]
    pairs = [zip(*(part.reshape(-1, *part.shape[-2:]) for part in some), strict=True) for some in (a, b)]
    found = [_solve_from_float64(quick, slow, work, left, right, task) for left, right in zip(*pairs, strict=True)]
    stacks = (torch.stack(parts) for parts in zip(*found, strict=True))
    return tuple(stack.reshape(*shape, *stack.shape[-2:]) for stack in stacks)


def _refine_solution(work: WorkingPrecision, a: Parts, b: Parts, task: str) -> Parts:
    """x += (LU)^-1 (b - a x), LU in float64."""
    factors, pivots, info = torch.linalg.lu_factor_ex(a[0])
    refuse_singular(info, task)
    one = torch.eye(a[0].shape[-1], dtype=torch.float64, device=a[0].device).expand(a[0].shape)
    prove_regular(a, torch.linalg.lu_solve(factors, pivots, one), task)
    progress, x = RefinementProgress(work, task), None
    rest = b[0]
    for _ in range(MOST_CORRECTIONS):
        step = torch.linalg.lu_solve(factors, pivots, rest)
        x = work.to_float64((step,)) if x is None else work.add(x, (step,))
        if progress.is_done(find_maxima(step), find_maxima(x[0])):
            break
        rest = work.residual(b, a, x)
    assert x is not None, "there is a first step"
    return x


def _solve_least_squares(work: WorkingPrecision, a: Parts, b: Parts) -> Parts:
    """x of least |b - a x|, by refinement of r + a x = b, a^T r = 0 (Bjorck 1967); a has full column rank."""
    a, columns = scale_to_unit_size(work.to_float64(a), -2)
    x = _solve_from_float64(_refine_lstsq, solve_lstsq_by_elimination, work, a, work.to_float64(b), "lstsq")
    return multiply_by_power_of_two(x, -columns.mT)


def _refine_lstsq(work: WorkingPrecision, a: Parts, b: Parts, task: str) -> Parts:
    """Refine x and the residual together, by QR in float64."""
    transposed = tuple(part.mT for part in a)
    q, r = torch.linalg.qr(a[0])
    if bool((r.diagonal(dim1=-2, dim2=-1) == 0).any()):
        refuse_singular(torch.ones((), dtype=torch.float32, device="cpu"), task)
    _prove_independent(a, r)
    progress, x, rest = RefinementProgress(work, task), None, None
    upper, lower = b[0], torch.zeros_like(r[..., :1].expand(*r.shape[:-1], b[0].shape[-1]))
    for _ in range(MOST_CORRECTIONS):
        # The float64 solution of dr + a dx = upper, a^T dr = lower.
        height = torch.linalg.solve_triangular(r.mT, lower, upper=False)
        seen = q.mT @ upper
        step = torch.linalg.solve_triangular(r, seen - height, upper=True)
        change = upper - q @ (seen - height)
        x = work.to_float64((step,)) if x is None else work.add(x, (step,))
        rest = work.to_float64((change,)) if rest is None else work.add(rest, (change,))
        if progress.is_done(find_maxima(step), _find_resolvable_size(work, x[0], b[0])):
            break
        upper = work.sub(work.sub(b, rest), work.matmul(a, x))[0]
        lower = -work.matmul(transposed, rest)[0]
    assert x is not None, "there is a first step"
    return x


def _prove_independent(a: Parts, r: torch.Tensor) -> None:
    """a R^-1 is orthonormal but for rounding, and hence a's columns independent, or they may not be."""
    one = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device).expand(r.shape)
    near = matmul(a, (torch.linalg.solve_triangular(r, one, upper=True),), 2, torch.float64)[0]
    prove_regular((near,), near.mT, "lstsq")


def _find_resolvable_size(work: WorkingPrecision, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the size by which corrections are judged: the solution's, or one that the right-hand side resolves."""
    return torch.maximum(find_maxima(x), find_maxima(b) * 2.0 ** -(53 * work.components - 60 - work.bits / 2))


_NAMES_OF_SQUARE_SOLVERS = ("solve", "inverse", "cholesky", "det")


def solve(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the x with a x = b, refined from a float64 LU factorization until no digit changes.

    x += (LU)^-1 (b - a x), the residual with a component more than the result (Wilkinson 1963). Rows and columns are
    scaled by powers of two first. The error is at most a few 2^-(n p) of the largest entry of each column of x; four
    float64 components have no further one for the residual: there it is a few 2^-(n p) times the condition.

    A matrix that float64 takes for singular is eliminated in integers of up to 1,024 bits instead, with exact
    residuals: the error is the same for conditions up to about 1e58, N up to 128.

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
        torch.linalg.LinAlgError: not positive definite, or of a condition beyond about 1e58.
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
    check_components(*[(x[0].dtype, len(x)) for x in (a, b) if x], (dtype, components))
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
    shapes = _find_result_shapes(name, a[0].shape, b[0].shape if b else None)
    if not all(shape.numel() for shape in shapes) or not a[0].numel():
        fill = torch.ones if name == "det" else torch.zeros
        empty = [fill(shape, dtype=dtype, device=a[0].device) for shape in shapes for _ in range(components)]
        return [part * (k % components == 0) for k, part in enumerate(empty)]
    if b:
        batch = torch.broadcast_shapes(a[0].shape[:-2], b[0].shape[:-2])
        a, b = (tuple(part.expand(*batch, *part.shape[-2:]) for part in some) for some in (a, b))
    work = WorkingPrecision.for_result(components, dtype)
    made = _compute_solution(name, work, a, b)
    fit = [pointwise("renormalize", x, components=components, dtype=dtype) for x in made]
    return [part for x in fit for part in x]


def _compute_solution(name: str, work: WorkingPrecision, a: Parts, b: Parts) -> tuple[Parts, ...]:
    if name == "solve":
        return (_solve_system(work, a, b),)
    if name == "inverse":
        one = torch.eye(a[0].shape[-1], dtype=torch.float64, device=a[0].device).expand(a[0].shape)
        return (_solve_system(work, a, (one,), "inverse"),)
    if name == "lstsq":
        return (_solve_least_squares(work, a, b),)
    if name == "cholesky":
        return (factors.cholesky(work, a),)
    if name == "qr":
        return factors.qr(work, a)
    try:
        return (factors.determinant(work, a),)
    except torch.linalg.LinAlgError:
        return (compute_exact_determinants(a),)


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


def _fake_solver(
    name: str, parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    shapes = _find_result_shapes(name, parts[0].shape, parts[count].shape if len(parts) > count else None)
    return [parts[0].new_empty(shape, dtype=dtype) for shape in shapes for _ in range(components)]


_linalg_operator = define_operator(
    "linalg(str name, Tensor[] parts, int count, int components, ScalarType dtype) -> Tensor[]",
    _run_solver,
    _fake_solver,
)
