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
    MOST_CORRECTIONS,
    IntegerMatrix,
    RefinementProgress,
    WorkingPrecision,
    find_maxima,
    multiply_by_power_of_two,
    refuse_infinite,
    refuse_singular,
    scale_to_unit_size,
)

MOST_ELIMINATED_ROWS = 128
_FRACTION_BITS = 1024  # behind the point: a condition of 1e58 has 193 bits, and its square twice as many
_FIRST_FRACTION_BITS = 256  # that are tried first


def solve_by_elimination(work: WorkingPrecision, a: Parts, b: Parts, task: str) -> Parts:
    """x with a x = b for one matrix (N, N) of about unit size.

    Args:
        work: how many digits are wanted.
        a: float64 components.
        b: (N, K), likewise.
        task: for errors.

    Raises:
        torch.linalg.LinAlgError: a is singular, or nearly; N > 128; the solution is beyond float64.
    """
    matrix = _convert_to_integers(a, task)
    return _round_solution(work, _find_proven_inverse(work, matrix, task) @ IntegerMatrix.of(b), b)


def solve_lstsq_by_elimination(work: WorkingPrecision, a: Parts, b: Parts, task: str) -> Parts:
    """x of least |b - a x| for one matrix (M, N): (a^T a)^-1 a^T b, of which both products are exact."""
    matrix = _convert_to_integers(a, task)
    return _round_solution(
        work, _find_proven_inverse(work, matrix.mT @ matrix, task) @ (matrix.mT @ IntegerMatrix.of(b)), b
    )


def _round_solution(work: WorkingPrecision, x: IntegerMatrix, b: Parts) -> Parts:
    parts = x.parts(b[0].device, work.components)
    refuse_infinite(parts)
    return parts


def factor_by_elimination(work: WorkingPrecision, a: Parts, task: str) -> Parts:
    """Lower L with L L^T = a for one matrix (N, N) of about unit diagonal.

    |Z a Z^T - 1| in the maximum norm for Z = L^-1, computed exactly, proves that a is positive definite and, being
    below the last digit that is wanted, that L is its factor to all of them.
    """
    matrix = _convert_to_integers(a, task)
    for bits in (_FIRST_FRACTION_BITS, _FRACTION_BITS):
        lower = _factor_integer_matrix(matrix, bits)
        near = None if lower is None else _invert_integer_matrix(lower, bits)
        if lower is not None and near is not None and _is_near_identity(near @ matrix @ near.mT, work.bits + 3):
            return lower.parts(a[0].device, work.components)
    raise_nearly_singular(_TEXT_BEYOND_INTEGERS, task)


def raise_nearly_singular(why: str, task: str) -> NoReturn:
    """Raise for a matrix that float64 takes for singular."""
    raise torch.linalg.LinAlgError(
        f"{task}: float64 cannot tell the matrix from a singular one, and {why}. Scale rows and columns, add a small "
        "multiple of the identity, or leave out dependent columns"
    )


_TEXT_BEYOND_INTEGERS = f"neither can integers of {_FRACTION_BITS} bits"


def _convert_to_integers(a: Parts, task: str) -> IntegerMatrix:
    if max(a[0].shape) > MOST_ELIMINATED_ROWS:
        why = f"elimination in integers serves up to {MOST_ELIMINATED_ROWS} rows, and this matrix has {max(a[0].shape)}"
        raise_nearly_singular(why, task)
    return IntegerMatrix.of(a)


def _find_proven_inverse(work: WorkingPrecision, a: IntegerMatrix, task: str) -> IntegerMatrix:
    for bits in (_FIRST_FRACTION_BITS, _FRACTION_BITS):
        near = _invert_integer_matrix(a, bits)
        if near is not None and _is_near_identity(near @ a, work.bits + 3):
            return near
    raise_nearly_singular(_TEXT_BEYOND_INTEGERS, task)


def _is_near_identity(a: IntegerMatrix, bits: int) -> bool:
    """Return whether |a - 1| < 2^-bits in the maximum norm."""
    off = a - IntegerMatrix(np.eye(len(a.values), dtype=object), 0)
    return bool(abs(off.values).sum(1).max() << bits < 1 << -off.power)


def _to_fixed_point(a: IntegerMatrix, bits: int) -> np.ndarray:
    """Return the values with so many bits behind the point."""
    shift = a.power + bits
    found: np.ndarray = a.values << shift if shift > 0 else a.values >> -shift
    return found


def _invert_integer_matrix(a: IntegerMatrix, bits: int) -> IntegerMatrix | None:
    """Invert a by eliminating [a, 1], with partial pivoting; None where a pivot is zero."""
    rows = len(a.values)
    table = np.concatenate([_to_fixed_point(a, bits), np.eye(rows, dtype=object) << bits], 1)
    for k in range(rows):
        pivot = k + int(np.argmax(abs(table[k:, k])))
        if not table[pivot, k]:
            return None
        table[[k, pivot]] = table[[pivot, k]]
        row = table[k, k:] = (table[k, k:] << bits) // table[k, k]
        factors = table[:, k].copy()
        factors[k] = 0
        table[:, k:] -= factors[:, None] * row >> bits
    return IntegerMatrix(table[:, rows:], -bits)


def _factor_integer_matrix(a: IntegerMatrix, bits: int) -> IntegerMatrix | None:
    """Return Cholesky's factor; None where a pivot is not positive."""
    rest = _to_fixed_point(a, bits)
    lower = np.zeros_like(rest)
    for k in range(len(rest)):
        if rest[k, k] <= 0:
            return None
        column = lower[k:, k] = (rest[k:, k] << bits) // math.isqrt(rest[k, k] << bits)
        rest[k:, k:] -= column[:, None] * column >> bits
    return IntegerMatrix(lower, -bits)


_MATRIX_DIMENSIONS = (-2, -1)


def cholesky(work: WorkingPrecision, a: Parts) -> Parts:
    """Lower L with L L^T = a, of which the lower triangle is read: L += L phi(L^-1 (a - L L^T) L^-T)."""
    a = tuple(part.tril() + part.tril(-1).mT for part in work.to_float64(a))
    diagonal = a[0].diagonal(dim1=-2, dim2=-1)
    if not bool((diagonal > 0).all()):
        _refuse_indefinite()
    # Halves of even powers of two scale L exactly.
    half = (exponent(diagonal) / 2).floor().unsqueeze(-1)
    a = multiply_by_power_of_two(multiply_by_power_of_two(a, -half), -half.mT)
    return multiply_by_power_of_two(_factor_each_matrix(work, a), half)


def _factor_each_matrix(work: WorkingPrecision, a: Parts) -> Parts:
    """Refine a float64 factor of all matrices, or, where one has none, factor each matrix by itself."""
    try:
        start, info = torch.linalg.cholesky_ex(a[0])
        refuse_singular(info, "cholesky")
        return _refine_cholesky_factor(work, a, start, "cholesky")
    except torch.linalg.LinAlgError:
        if a[0].dim() == 2:
            return factor_by_elimination(work, a, "cholesky")
    matrices = zip(*(part.reshape(-1, *part.shape[-2:]) for part in a), strict=True)
    found = [_factor_each_matrix(work, matrix) for matrix in matrices]
    return tuple(torch.stack(parts).reshape(a[0].shape) for parts in zip(*found, strict=True))


def _refuse_indefinite() -> None:
    raise torch.linalg.LinAlgError(
        "cholesky: a number on the matrix's diagonal is not positive, in float64 or at all, so that the matrix is not "
        "positive definite: add a multiple of the identity"
    )


def _refine_cholesky_factor(work: WorkingPrecision, a: Parts, start: torch.Tensor, task: str) -> Parts:
    progress, factor = RefinementProgress(work, task), work.to_float64((start,))
    for _ in range(MOST_CORRECTIONS):
        rest = work.residual(a, factor, tuple(part.mT for part in factor))
        near = torch.linalg.solve_triangular(start, rest, upper=False)
        near = torch.linalg.solve_triangular(start.mT, near, upper=True, left=False)
        lower = near.tril(-1) + torch.diag_embed(near.diagonal(dim1=-2, dim2=-1) / 2)
        factor = work.add(factor, (start @ lower,))
        if progress.is_done(
            find_maxima(near, _MATRIX_DIMENSIONS), torch.ones((), dtype=near.dtype, device=near.device)
        ):
            break
    return factor


def qr(work: WorkingPrecision, a: Parts) -> tuple[Parts, Parts]:
    """Return Q with orthonormal columns and upper R, Q R = a; the signs are LAPACK's.

    Q~ = a R0^-1 is orthonormal but for float64's rounding; Q~^T Q~ = C^T C, refined, makes R = C R0 and Q = a R^-1.
    """
    m, n = a[0].shape[-2:]
    if m < n:
        q, left = qr(work, tuple(part[..., :m] for part in a))
        right = work.matmul(tuple(part.mT for part in q), tuple(part[..., m:] for part in work.to_float64(a)))
        return q, tuple(torch.cat(parts, -1) for parts in zip(left, right, strict=True))
    a, columns = scale_to_unit_size(work.to_float64(a), -2)
    start = torch.linalg.qr(a[0]).R
    if bool((start.diagonal(dim1=-2, dim2=-1) == 0).any()):
        refuse_singular(torch.ones((), dtype=torch.float32, device="cpu"), "qr")
    near = _divide_by_upper(work, a, work.to_float64((start,)), start)
    gram = work.matmul(tuple(part.mT for part in near), near)
    lower, info = torch.linalg.cholesky_ex(gram[0])
    refuse_singular(info, "qr")
    factor = _refine_cholesky_factor(work, gram, lower, "qr")
    r = work.matmul(tuple(part.mT for part in factor), (start,))
    r = tuple(part.triu() for part in r)
    q = _divide_by_upper(work, a, r, r[0])
    return q, multiply_by_power_of_two(r, columns)


def _divide_by_upper(work: WorkingPrecision, a: Parts, r: Parts, start: torch.Tensor) -> Parts:
    """x with x r = a for an upper r whose head is `start`."""
    progress, x, rest = RefinementProgress(work, "qr"), None, a[0]
    for _ in range(MOST_CORRECTIONS):
        step = torch.linalg.solve_triangular(start, rest, upper=True, left=False)
        x = work.to_float64((step,)) if x is None else work.add(x, (step,))
        if progress.is_done(find_maxima(step, _MATRIX_DIMENSIONS), find_maxima(x[0], _MATRIX_DIMENSIONS)):
            break
        rest = work.residual(a, x, r)
    assert x is not None, "there is a first step"
    return x


def determinant(work: WorkingPrecision, a: Parts) -> Parts:
    """Return the product of U's diagonal in P a = L U, with its power of two kept apart.

    Raises:
        torch.linalg.LinAlgError: float64's factors are too far off to refine.
    """
    a, rows = scale_to_unit_size(work.to_float64(a), -1)
    a, columns = scale_to_unit_size(a, -2)
    factors, pivots, info = torch.linalg.lu_factor_ex(a[0])
    refuse_singular(info, "det")
    permutation, low, high = torch.lu_unpack(factors, pivots)
    a = tuple(permutation.mT @ part for part in a)
    lower, upper, progress = work.to_float64((low,)), work.to_float64((high,)), RefinementProgress(work, "det")
    for _ in range(MOST_CORRECTIONS):
        rest = work.residual(a, lower, upper)
        near = torch.linalg.solve_triangular(low, rest, upper=False, unitriangular=True)
        near = torch.linalg.solve_triangular(high, near, upper=True, left=False)
        lower = work.add(lower, (low @ near.tril(-1),))
        upper = work.add(upper, (near.triu() @ high,))
        if progress.is_done(
            find_maxima(near, _MATRIX_DIMENSIONS), torch.ones((), dtype=near.dtype, device=near.device)
        ):
            break
    ratio = upper[0].diagonal(dim1=-2, dim2=-1) / high.diagonal(dim1=-2, dim2=-1)
    # A pivot that was all rounding is left with the residual's rounding, however small its corrections have become.
    refuse_singular(~((ratio > 0.5) & (ratio < 2.0)), "det")
    swaps = (pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device, dtype=torch.int64)).sum(-1) % 2
    digits, k = _multiply_along_last_dimension(work, tuple(part.diagonal(dim1=-2, dim2=-1) for part in upper))
    k = k + rows.sum((-2, -1)) + columns.sum((-2, -1))
    return multiply_by_power_of_two(tuple(part * (1 - 2 * swaps) for part in digits), k)


def _multiply_along_last_dimension(work: WorkingPrecision, x: Parts) -> tuple[Parts, torch.Tensor]:
    """Return the product over the last dimension as parts near 1 and an exponent."""
    powers = torch.zeros(x[0].shape[:-1], dtype=torch.float64, device=x[0].device)
    while True:
        k = exponent(x[0])
        x, powers = multiply_by_power_of_two(x, -k), powers + k.sum(-1)
        count = x[0].shape[-1]
        if count == 1:
            return tuple(part[..., 0] for part in x), powers
        half = count // 2
        pairs = [tuple(part[..., i : i + half] for part in x) for i in (0, half)]
        made = pointwise("mul", *pairs, components=work.components, dtype=torch.float64)
        x = tuple(torch.cat((part, old[..., 2 * half :]), -1) for part, old in zip(made, x, strict=True))


MOST_DETERMINANT_ROWS = 64


def compute_exact_determinants(a: Parts) -> Parts:
    """Return four float64 components of det(..., N, N), by Bareiss' division-free elimination (1968)."""
    size = a[0].shape[-1]
    if size > MOST_DETERMINANT_ROWS:
        raise torch.linalg.LinAlgError(
            f"det of a {size} x {size} matrix that is singular, or of a condition beyond about 1e15: float64, in which "
            f"refinement starts, cannot tell which, and exact integers serve up to {MOST_DETERMINANT_ROWS} rows. Scale "
            "rows and columns by powers of two, or take the determinant of a factor"
        )
    matrices = zip(*(part.double().reshape(-1, size, size) for part in a), strict=True)
    found = [_compute_exact_determinant(IntegerMatrix.of(parts)).parts(a[0].device) for parts in matrices]
    return tuple(torch.cat(parts).reshape(a[0].shape[:-2]) for parts in zip(*found, strict=True))


def _compute_exact_determinant(matrix: IntegerMatrix) -> IntegerMatrix:
    """Return the determinant of one matrix, as a matrix of one number."""
    rows, size = matrix.values.copy(), len(matrix.values)
    sign, before = 1, 1
    for k in range(size - 1):
        pivot = next((i for i in range(k, size) if rows[i, k]), None)
        if pivot is None:
            return IntegerMatrix(np.zeros((1, 1), object), 0)
        if pivot != k:
            rows[[k, pivot]], sign = rows[[pivot, k]], -sign
        below, corner = rows[k + 1 :, k + 1 :], rows[k, k]
        below[:] = (below * corner - rows[k + 1 :, k : k + 1] * rows[k, k + 1 :]) // before
        before = corner
    return IntegerMatrix(sign * rows[-1:, -1:], matrix.power * size)
