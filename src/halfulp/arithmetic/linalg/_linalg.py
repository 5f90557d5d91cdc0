"""Linear algebra of expansions to all their digits: solve, inverse, least squares, Cholesky, QR, determinant."""

from __future__ import annotations

import torch

from ...kernels import define_operator
from ..expansions._pointwise import MOST, PRECISION, Parts, pointwise
from . import _elimination as factors
from . import _solve as systems
from ._elimination import exact_determinant
from ._solve import Work

_NEEDS_SQUARE = ("solve", "inverse", "cholesky", "det")


def solve(a: Parts, b: Parts, components: int, dtype: torch.dtype) -> Parts:
    """Return the x with a x = b, refined from a float64 LU factorization until no digit changes.

    x += (LU)^-1 (b - a x), the residual with a component more than the result (Wilkinson 1963). Rows and columns are
    scaled by powers of two first. The error is at most a few 2^-(n p) of the largest entry of each column of x; four
    float64 components have no further one for the residual: there it is a few 2^-(n p) times the condition.

    A matrix that float64 takes for singular starts from an inverse in two to four float64 components instead, with
    residuals in exact integers: the error is the same for conditions up to about 1e58, N up to 128.

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
    for kind, count in ((a[0].dtype, len(a)), *([(b[0].dtype, len(b))] if b else []), (dtype, components)):
        if kind not in PRECISION:
            raise TypeError(f"components of {kind}: allowed are float16, bfloat16, float32 and float64")
        if not 1 <= count <= MOST:
            raise ValueError(f"{count} components: allowed are 1 to {MOST}")
    _check_shapes(name, a[0].shape, b[0].shape if b else None)
    if torch.compiler.is_compiling() or any(type(part) is not torch.Tensor for part in (*a, *b)):
        return tuple(_operator(name, [*a, *b], len(a), components, dtype))
    return tuple(_run(name, [*a, *b], len(a), components, dtype))


def _check_shapes(name: str, a: torch.Size, b: torch.Size | None) -> None:
    if len(a) < 2 or (name in _NEEDS_SQUARE and a[-1] != a[-2]):
        kind = "square matrices (..., N, N)" if name in _NEEDS_SQUARE else "matrices (..., M, N)"
        raise ValueError(f"{name} takes {kind}, got {tuple(a)}")
    if name == "lstsq" and a[-2] < a[-1]:
        raise ValueError(f"lstsq takes at least as many rows as columns, got {tuple(a)}: its solution is not unique")
    if b is not None and (len(b) < 2 or b[-2] != a[-2]):
        raise ValueError(f"{name} takes a right-hand side (..., {a[-2]}, K), got {tuple(b)}; unsqueeze(-1) a vector")


def _run(name: str, parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype) -> list[torch.Tensor]:
    a, b = (tuple(part.detach() for part in some) for some in (parts[:count], parts[count:]))
    for operand in (a, b):
        if operand and not bool(operand[0].isfinite().all()):
            raise ValueError(f"{name} of infinities or NaNs: there is no solution; look for them with isfinite()")
    shapes = _shapes(name, a[0].shape, b[0].shape if b else None)
    if not all(shape.numel() for shape in shapes) or not a[0].numel():
        fill = torch.ones if name == "det" else torch.zeros
        empty = [fill(shape, dtype=dtype, device=a[0].device) for shape in shapes for _ in range(components)]
        return [part * (k % components == 0) for k, part in enumerate(empty)]
    if b:
        batch = torch.broadcast_shapes(a[0].shape[:-2], b[0].shape[:-2])
        a, b = (tuple(part.expand(*batch, *part.shape[-2:]) for part in some) for some in (a, b))
    work = Work.for_result(components, dtype)
    made = _compute(name, work, a, b)
    fit = [pointwise("renormalize", x, components=components, dtype=dtype) for x in made]
    return [part for x in fit for part in x]


def _compute(name: str, work: Work, a: Parts, b: Parts) -> tuple[Parts, ...]:
    if name == "solve":
        return (systems.solve(work, a, b),)
    if name == "inverse":
        return (systems.inverse(work, a),)
    if name == "lstsq":
        return (systems.lstsq(work, a, b),)
    if name == "cholesky":
        return (factors.cholesky(work, a),)
    if name == "qr":
        return factors.qr(work, a)
    try:
        return (factors.determinant(work, a),)
    except torch.linalg.LinAlgError:
        return (exact_determinant(a),)


def _shapes(name: str, a: torch.Size, b: torch.Size | None) -> list[torch.Size]:
    m, n = a[-2:]
    if name == "qr":
        k = min(m, n)
        return [torch.Size((*a[:-2], m, k)), torch.Size((*a[:-2], k, n))]
    if name == "det":
        return [a[:-2]]
    if b is None:
        return [a]
    return [torch.Size((*torch.broadcast_shapes(a[:-2], b[:-2]), n, b[-1]))]


def _fake(name: str, parts: list[torch.Tensor], count: int, components: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = _shapes(name, parts[0].shape, parts[count].shape if len(parts) > count else None)
    return [parts[0].new_empty(shape, dtype=dtype) for shape in shapes for _ in range(components)]


_operator = define_operator(
    "linalg(str name, Tensor[] parts, int count, int components, ScalarType dtype) -> Tensor[]", _run, _fake
)
