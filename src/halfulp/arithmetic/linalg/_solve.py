"""Linear systems and least squares of expansions, refined from a float64 factorization (Wilkinson 1963).

Matrices that float64 takes for singular go, one by one, through elimination in components.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..expansions._pointwise import Parts
from ..matmul._matmul import matmul
from ._elimination import least_squares_by_elimination, solve_by_elimination
from ._refinement import LIMIT, Progress, Work, largest, prove_regular, refuse_singular, scaled, times_power_of_two


def solve(work: Work, a: Parts, b: Parts, task: str = "solve") -> Parts:
    """x with a x = b, corrected until the correction no longer counts; rows and columns are of about unit size."""
    a, rows = scaled(work.to_float64(a), -1)
    a, columns = scaled(a, -2)
    b = times_power_of_two(work.to_float64(b), -rows)
    x = _solve_from_float64(_refine_solution, solve_by_elimination, work, a, b, task)
    return times_power_of_two(x, -columns.mT)


def _solve_from_float64(quick: Callable, slow: Callable, work: Work, a: Parts, b: Parts, task: str) -> Parts:
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


def _refine_solution(work: Work, a: Parts, b: Parts, task: str) -> Parts:
    """x += (LU)^-1 (b - a x), LU in float64."""
    factors, pivots, info = torch.linalg.lu_factor_ex(a[0])
    refuse_singular(info, task)
    one = torch.eye(a[0].shape[-1], dtype=torch.float64, device=a[0].device).expand(a[0].shape)
    prove_regular(a, torch.linalg.lu_solve(factors, pivots, one), task)
    progress, x = Progress(work, task), None
    rest = b[0]
    for _ in range(LIMIT):
        step = torch.linalg.lu_solve(factors, pivots, rest)
        x = work.to_float64((step,)) if x is None else work.add(x, (step,))
        if progress.done(largest(step), largest(x[0])):
            break
        rest = work.residual(b, a, x)
    assert x is not None, "there is a first step"
    return x


def inverse(work: Work, a: Parts) -> Parts:
    """Return the solution of a x = 1."""
    size = a[0].shape[-1]
    one = torch.eye(size, dtype=torch.float64, device=a[0].device).expand(a[0].shape)
    return solve(work, a, (one,), "inverse")


def lstsq(work: Work, a: Parts, b: Parts) -> Parts:
    """x of least |b - a x|, by refinement of r + a x = b, a^T r = 0 (Bjorck 1967); a has full column rank."""
    a, columns = scaled(work.to_float64(a), -2)
    x = _solve_from_float64(_refine_lstsq, least_squares_by_elimination, work, a, work.to_float64(b), "lstsq")
    return times_power_of_two(x, -columns.mT)


def _refine_lstsq(work: Work, a: Parts, b: Parts, task: str) -> Parts:
    """Refine x and the residual together, by QR in float64."""
    transposed = tuple(part.mT for part in a)
    q, r = torch.linalg.qr(a[0])
    if bool((r.diagonal(dim1=-2, dim2=-1) == 0).any()):
        refuse_singular(torch.ones((), dtype=torch.float32, device="cpu"), task)
    _prove_independent(a, r)
    progress, x, rest = Progress(work, task), None, None
    upper, lower = b[0], torch.zeros_like(r[..., :1].expand(*r.shape[:-1], b[0].shape[-1]))
    for _ in range(LIMIT):
        # The float64 solution of dr + a dx = upper, a^T dr = lower.
        height = torch.linalg.solve_triangular(r.mT, lower, upper=False)
        seen = q.mT @ upper
        step = torch.linalg.solve_triangular(r, seen - height, upper=True)
        change = upper - q @ (seen - height)
        x = work.to_float64((step,)) if x is None else work.add(x, (step,))
        rest = work.to_float64((change,)) if rest is None else work.add(rest, (change,))
        if progress.done(largest(step), _resolvable_size(work, x[0], b[0])):
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


def _resolvable_size(work: Work, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the size by which corrections are judged: the solution's, or one that the right-hand side resolves."""
    return torch.maximum(largest(x), largest(b) * 2.0 ** -(53 * work.components - 60 - work.bits / 2))
