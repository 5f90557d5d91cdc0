"""Systems that float64 cannot start, by elimination in integers of many bits; factors and determinants.

Gauss and Jordan's elimination with many bits behind the point makes an approximate inverse Z. |Z a - 1| in the maximum
norm, computed exactly, proves that a is regular and, being below the last digit that is wanted, that Z b has all.
"""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np
import torch

from ..kernels import exponent
from ._pointwise import Parts, pointwise
from ._refinement import (
    LIMIT,
    Integers,
    Progress,
    Work,
    largest,
    refuse_infinite,
    refuse_singular,
    scaled,
    times_power_of_two,
)

MOST_ROWS = 128
_BITS = 1024  # behind the point: a condition of 1e58 has 193 bits, and its square twice as many
_FEWER_BITS = 256  # that are tried first


def solve_by_elimination(work: Work, a: Parts, b: Parts, task: str) -> Parts:
    """x with a x = b for one matrix (N, N) of about unit size.

    Args:
        work: how many digits are wanted.
        a: float64 components.
        b: (N, K), likewise.
        task: for errors.

    Raises:
        torch.linalg.LinAlgError: a is singular, or nearly; N > 128; the solution is beyond float64.
    """
    matrix = _integers(a, task)
    return _to_solution(work, _inverse(work, matrix, task) @ Integers.of(b), b)


def least_squares_by_elimination(work: Work, a: Parts, b: Parts, task: str) -> Parts:
    """x of least |b - a x| for one matrix (M, N): (a^T a)^-1 a^T b, of which both products are exact."""
    matrix = _integers(a, task)
    return _to_solution(work, _inverse(work, matrix.mT @ matrix, task) @ (matrix.mT @ Integers.of(b)), b)


def _to_solution(work: Work, x: Integers, b: Parts) -> Parts:
    parts = x.parts(b[0].device, work.components)
    refuse_infinite(parts)
    return parts


def cholesky_by_elimination(work: Work, a: Parts, task: str) -> Parts:
    """Lower L with L L^T = a for one matrix (N, N) of about unit diagonal.

    |Z a Z^T - 1| in the maximum norm for Z = L^-1, computed exactly, proves that a is positive definite and, being
    below the last digit that is wanted, that L is its factor to all of them.
    """
    matrix = _integers(a, task)
    for bits in (_FEWER_BITS, _BITS):
        lower = _cholesky(matrix, bits)
        near = None if lower is None else _invert(lower, bits)
        if lower is not None and near is not None and _is_near_one(near @ matrix @ near.mT, work.bits + 3):
            return lower.parts(a[0].device, work.components)
    refuse(_BEYOND, task)


def refuse(why: str, task: str) -> NoReturn:
    """Raise for a matrix that float64 takes for singular."""
    raise torch.linalg.LinAlgError(
        f"{task}: float64 cannot tell the matrix from a singular one, and {why}. Scale rows and columns, add a small "
        "multiple of the identity, or leave out dependent columns"
    )


_BEYOND = f"neither can integers of {_BITS} bits"


def _integers(a: Parts, task: str) -> Integers:
    if max(a[0].shape) > MOST_ROWS:
        refuse(f"elimination in integers serves up to {MOST_ROWS} rows, and this matrix has {max(a[0].shape)}", task)
    return Integers.of(a)


def _inverse(work: Work, a: Integers, task: str) -> Integers:
    for bits in (_FEWER_BITS, _BITS):
        near = _invert(a, bits)
        if near is not None and _is_near_one(near @ a, work.bits + 3):
            return near
    refuse(_BEYOND, task)


def _is_near_one(a: Integers, bits: int) -> bool:
    """Return whether |a - 1| < 2^-bits in the maximum norm."""
    off = a - Integers(np.eye(len(a.values), dtype=object), 0)
    return bool(abs(off.values).sum(1).max() << bits < 1 << -off.power)


def _fixed_point(a: Integers, bits: int) -> np.ndarray:
    """Return the values with so many bits behind the point."""
    shift = a.power + bits
    found: np.ndarray = a.values << shift if shift > 0 else a.values >> -shift
    return found


def _invert(a: Integers, bits: int) -> Integers | None:
    """Invert a by eliminating [a, 1], with partial pivoting; None where a pivot is zero."""
    rows = len(a.values)
    table = np.concatenate([_fixed_point(a, bits), np.eye(rows, dtype=object) << bits], 1)
    for k in range(rows):
        pivot = k + int(np.argmax(abs(table[k:, k])))
        if not table[pivot, k]:
            return None
        table[[k, pivot]] = table[[pivot, k]]
        row = table[k, k:] = (table[k, k:] << bits) // table[k, k]
        factors = table[:, k].copy()
        factors[k] = 0
        table[:, k:] -= factors[:, None] * row >> bits
    return Integers(table[:, rows:], -bits)


def _cholesky(a: Integers, bits: int) -> Integers | None:
    """Return Cholesky's factor; None where a pivot is not positive."""
    rest = _fixed_point(a, bits)
    lower = np.zeros_like(rest)
    for k in range(len(rest)):
        if rest[k, k] <= 0:
            return None
        column = lower[k:, k] = (rest[k:, k] << bits) // math.isqrt(rest[k, k] << bits)
        rest[k:, k:] -= column[:, None] * column >> bits
    return Integers(lower, -bits)


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
    return times_power_of_two(_factor_from_float64(work, a), half)


def _factor_from_float64(work: Work, a: Parts) -> Parts:
    """Refine a float64 factor of all matrices, or, where one has none, factor each matrix by itself."""
    try:
        start, info = torch.linalg.cholesky_ex(a[0])
        refuse_singular(info, "cholesky")
        return _refined_cholesky(work, a, start, "cholesky")
    except torch.linalg.LinAlgError:
        if a[0].dim() == 2:
            return cholesky_by_elimination(work, a, "cholesky")
    matrices = zip(*(part.reshape(-1, *part.shape[-2:]) for part in a), strict=True)
    found = [_factor_from_float64(work, matrix) for matrix in matrices]
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
    """Return Q with orthonormal columns and upper R, Q R = a; the signs are LAPACK's.

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
    near = _divide_by_upper(work, a, work.to_float64((start,)), start)
    gram = work.matmul(tuple(part.mT for part in near), near)
    lower, info = torch.linalg.cholesky_ex(gram[0])
    refuse_singular(info, "qr")
    factor = _refined_cholesky(work, gram, lower, "qr")
    r = work.matmul(tuple(part.mT for part in factor), (start,))
    r = tuple(part.triu() for part in r)
    q = _divide_by_upper(work, a, r, r[0])
    return q, times_power_of_two(r, columns)


def _divide_by_upper(work: Work, a: Parts, r: Parts, start: torch.Tensor) -> Parts:
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
    """Return the product of U's diagonal in P a = L U, with its power of two kept apart.

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
    digits, k = _multiply_last(work, tuple(part.diagonal(dim1=-2, dim2=-1) for part in upper))
    k = k + rows.sum((-2, -1)) + columns.sum((-2, -1))
    return times_power_of_two(tuple(part * (1 - 2 * swaps) for part in digits), k)


def _multiply_last(work: Work, x: Parts) -> tuple[Parts, torch.Tensor]:
    """Return the product over the last dimension as parts near 1 and an exponent."""
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


MOST_EXACT_ROWS = 64


def exact_determinant(a: Parts) -> Parts:
    """Return four float64 components of det(..., N, N), by Bareiss' division-free elimination (1968)."""
    size = a[0].shape[-1]
    if size > MOST_EXACT_ROWS:
        raise torch.linalg.LinAlgError(
            f"det of a {size} x {size} matrix that is singular, or of a condition beyond about 1e15: float64, in which "
            f"refinement starts, cannot tell which, and exact integers serve up to {MOST_EXACT_ROWS} rows. Scale rows "
            "and columns by powers of two, or take the determinant of a factor"
        )
    matrices = zip(*(part.double().reshape(-1, size, size) for part in a), strict=True)
    found = [_one_determinant(Integers.of(parts)).parts(a[0].device) for parts in matrices]
    return tuple(torch.cat(parts).reshape(a[0].shape[:-2]) for parts in zip(*found, strict=True))


def _one_determinant(matrix: Integers) -> Integers:
    """Return the determinant of one matrix, as a matrix of one number."""
    rows, size = matrix.values.copy(), len(matrix.values)
    sign, before = 1, 1
    for k in range(size - 1):
        pivot = next((i for i in range(k, size) if rows[i, k]), None)
        if pivot is None:
            return Integers(np.zeros((1, 1), object), 0)
        if pivot != k:
            rows[[k, pivot]], sign = rows[[pivot, k]], -sign
        below, corner = rows[k + 1 :, k + 1 :], rows[k, k]
        below[:] = (below * corner - rows[k + 1 :, k : k + 1] * rows[k, k + 1 :]) // before
        before = corner
    return Integers(sign * rows[-1:, -1:], matrix.power * size)
