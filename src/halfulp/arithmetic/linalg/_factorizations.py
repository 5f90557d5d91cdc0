"""Factorizations of expansions, refined from LAPACK's in float64: Cholesky, QR, LU for the determinant.

With A = F G + R for approximate triangular factors, E = F^-1 R G^-1 is small, and its lower and upper parts correct F
and G to first order: each step brings as many digits as float64 had correct.
"""

from __future__ import annotations

from fractions import Fraction

import torch

from ...kernels import exponent
from ..expansions._pointwise import Parts, pointwise
from ._elimination import cholesky_by_elimination
from ._refinement import LIMIT, Progress, Work, largest, refuse_singular, scaled, times_power_of_two

_MATRIX = (-2, -1)


def cholesky(work: Work, a: Parts) -> Parts:
    """Lower L with L L^T = a, of which the lower triangle is read: L += L phi(L^-1 (a - L L^T) L^-T)."""
    a = tuple(part.tril() + part.tril(-1).mT for part in work.to_float64(a))
    diagonal = a[0].diagonal(dim1=-2, dim2=-1)
    if not bool((diagonal > 0).all()):
        _refuse_indefinite()
    # Halves of even powers of two scale L exactly.
    half = (exponent(diagonal) / 2).floor().unsqueeze(-1)
    a = times_power_of_two(times_power_of_two(a, -half), -half.mT)
    return times_power_of_two(_cholesky_started(work, a), half)


def _cholesky_started(work: Work, a: Parts) -> Parts:
    """From float64 where it can be, together; else each matrix by the way that it needs."""
    try:
        start, info = torch.linalg.cholesky_ex(a[0])
        refuse_singular(info, "cholesky")
        return _refined_cholesky(work, a, start, "cholesky")
    except torch.linalg.LinAlgError:
        if a[0].dim() == 2:
            return cholesky_by_elimination(work, a, "cholesky")
    matrices = zip(*(part.reshape(-1, *part.shape[-2:]) for part in a), strict=True)
    found = [_cholesky_started(work, matrix) for matrix in matrices]
    return tuple(torch.stack(parts).reshape(a[0].shape) for parts in zip(*found, strict=True))


def _refuse_indefinite() -> None:
    raise torch.linalg.LinAlgError(
        "cholesky: a number on the matrix's diagonal is not positive, in float64 or at all, so that the matrix is not "
        "positive definite: add a multiple of the identity"
    )


def _refined_cholesky(work: Work, a: Parts, start: torch.Tensor, task: str) -> Parts:
    progress, factor = Progress(work, task), work.to_float64((start,))
    for _ in range(LIMIT):
        rest = work.residual(a, factor, tuple(part.mT for part in factor))
        near = torch.linalg.solve_triangular(start, rest, upper=False)
        near = torch.linalg.solve_triangular(start.mT, near, upper=True, left=False)
        lower = near.tril(-1) + torch.diag_embed(near.diagonal(dim1=-2, dim2=-1) / 2)
        factor = work.add(factor, (start @ lower,))
        if progress.done(largest(near, _MATRIX), torch.ones((), dtype=near.dtype, device=near.device)):
            break
    return factor


def qr(work: Work, a: Parts) -> tuple[Parts, Parts]:
    """Q with orthonormal columns and upper R, Q R = a; the signs are LAPACK's.

    Q~ = a R0^-1 is orthonormal but for float64's rounding; Q~^T Q~ = C^T C, refined, makes R = C R0 and Q = a R^-1.
    """
    m, n = a[0].shape[-2:]
    if m < n:
        q, left = qr(work, tuple(part[..., :m] for part in a))
        right = work.matmul(tuple(part.mT for part in q), tuple(part[..., m:] for part in work.to_float64(a)))
        return q, tuple(torch.cat(parts, -1) for parts in zip(left, right, strict=True))
    a, columns = scaled(work.to_float64(a), -2)
    start = torch.linalg.qr(a[0]).R
    if bool((start.diagonal(dim1=-2, dim2=-1) == 0).any()):
        refuse_singular(torch.ones((), dtype=torch.float32, device="cpu"), "qr")
    near = _divided(work, a, work.to_float64((start,)), start)
    gram = work.matmul(tuple(part.mT for part in near), near)
    lower, info = torch.linalg.cholesky_ex(gram[0])
    refuse_singular(info, "qr")
    factor = _refined_cholesky(work, gram, lower, "qr")
    r = work.matmul(tuple(part.mT for part in factor), (start,))
    r = tuple(part.triu() for part in r)
    q = _divided(work, a, r, r[0])
    return q, times_power_of_two(r, columns)


def _divided(work: Work, a: Parts, r: Parts, start: torch.Tensor) -> Parts:
    """x with x r = a for an upper r whose head is `start`."""
    progress, x, rest = Progress(work, "qr"), None, a[0]
    for _ in range(LIMIT):
        step = torch.linalg.solve_triangular(start, rest, upper=True, left=False)
        x = work.to_float64((step,)) if x is None else work.add(x, (step,))
        if progress.done(largest(step, _MATRIX), largest(x[0], _MATRIX)):
            break
        rest = work.residual(a, x, r)
    assert x is not None, "there is a first step"
    return x


def determinant(work: Work, a: Parts) -> Parts:
    """The product of U's diagonal in P a = L U, with its power of two kept apart.

    Raises:
        torch.linalg.LinAlgError: float64's factors are too far off to refine.
    """
    a, rows = scaled(work.to_float64(a), -1)
    a, columns = scaled(a, -2)
    factors, pivots, info = torch.linalg.lu_factor_ex(a[0])
    refuse_singular(info, "det")
    permutation, low, high = torch.lu_unpack(factors, pivots)
    a = tuple(permutation.mT @ part for part in a)
    lower, upper, progress = work.to_float64((low,)), work.to_float64((high,)), Progress(work, "det")
    for _ in range(LIMIT):
        rest = work.residual(a, lower, upper)
        near = torch.linalg.solve_triangular(low, rest, upper=False, unitriangular=True)
        near = torch.linalg.solve_triangular(high, near, upper=True, left=False)
        lower = work.add(lower, (low @ near.tril(-1),))
        upper = work.add(upper, (near.triu() @ high,))
        if progress.done(largest(near, _MATRIX), torch.ones((), dtype=near.dtype, device=near.device)):
            break
    ratio = upper[0].diagonal(dim1=-2, dim2=-1) / high.diagonal(dim1=-2, dim2=-1)
    # A pivot that was all rounding is left with the residual's rounding, however small its corrections have become.
    refuse_singular(~((ratio > 0.5) & (ratio < 2.0)), "det")
    swaps = (pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device, dtype=torch.int64)).sum(-1) % 2
    digits, k = _multiplied(work, tuple(part.diagonal(dim1=-2, dim2=-1) for part in upper))
    k = k + rows.sum((-2, -1)) + columns.sum((-2, -1))
    return times_power_of_two(tuple(part * (1 - 2 * swaps) for part in digits), k)


def _multiplied(work: Work, x: Parts) -> tuple[Parts, torch.Tensor]:
    """The product over the last dimension as parts near 1 and an exponent."""
    powers = torch.zeros(x[0].shape[:-1], dtype=torch.float64, device=x[0].device)
    while True:
        k = exponent(x[0])
        x, powers = times_power_of_two(x, -k), powers + k.sum(-1)
        count = x[0].shape[-1]
        if count == 1:
            return tuple(part[..., 0] for part in x), powers
        half = count // 2
        pairs = [tuple(part[..., i : i + half] for part in x) for i in (0, half)]
        made = pointwise("mul", *pairs, components=work.components, dtype=torch.float64)
        x = tuple(torch.cat((part, old[..., 2 * half :]), -1) for part, old in zip(made, x, strict=True))


MOST_ROWS = 64


def exact_determinant(a: Parts) -> Parts:
    """Four float64 components of the determinant of (..., N, N), by Bareiss' division-free elimination (1968)."""
    size = a[0].shape[-1]
    if size > MOST_ROWS:
        raise torch.linalg.LinAlgError(
            f"det of a {size} x {size} matrix that is singular, or of a condition beyond about 1e15: float64, in which "
            f"refinement starts, cannot tell which, and exact integers serve up to {MOST_ROWS} rows. Scale rows and "
            "columns by powers of two, or take the determinant of a factor"
        )
    matrices = zip(*(part.double().reshape(-1, size, size).tolist() for part in a), strict=True)
    values = [_one_determinant(parts) for parts in matrices]
    rows = torch.tensor([_floats(value) for value in values], dtype=torch.float64, device=a[0].device)
    shaped = tuple(rows[:, k].reshape(a[0].shape[:-2]) for k in range(4))
    return pointwise("renormalize", shaped, components=4, dtype=torch.float64)


def _one_determinant(parts: tuple) -> Fraction:
    """The determinant of a sum of matrices given as nested lists."""
    size = len(parts[0])
    exact = [[sum(Fraction(part[i][j]) for part in parts) for j in range(size)] for i in range(size)]
    common = max(x.denominator for row in exact for x in row)
    rows = [[int(x * common) for x in row] for row in exact]
    sign, before = 1, 1
    for k in range(size - 1):
        pivot = next((i for i in range(k, size) if rows[i][k]), None)
        if pivot is None:
            return Fraction(0)
        if pivot != k:
            rows[k], rows[pivot], sign = rows[pivot], rows[k], -sign
        for i in range(k + 1, size):
            left, top, corner = rows[i][k], rows[k], rows[k][k]
            rows[i] = [(x * corner - left * y) // before for x, y in zip(rows[i], top, strict=True)]
        before = rows[k][k]
    return Fraction(sign * rows[-1][-1], common**size)


def _floats(value: Fraction) -> list[float]:
    """Four components, each the nearest float64 to what is left."""
    out = []
    for _ in range(4):
        try:
            out.append(float(value))
        except OverflowError:
            return [float("inf") if value > 0 else float("-inf"), 0.0, 0.0, 0.0]
        value -= Fraction(out[-1])
    return out
