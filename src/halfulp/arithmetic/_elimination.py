"""Systems that float64 cannot start: elimination in components, proved and refined with exact residuals.

An approximate inverse Z of a is made in two, three and four float64 components (Gauss and Jordan, partial pivoting),
until |Z a - 1| < 1/8 in the maximum norm, which is computed in integers and proves that a is regular. Then
x += Z (b - a x) with exact residuals gains three bits or more a step, to all digits that x has: the condition may be as
large as four components can resolve, about 1e58.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NoReturn

import torch

from ..kernels import exponent
from ._matmul import matmul
from ._pointwise import MOST, Parts, pointwise
from ._refinement import LIMIT, Integers, Progress, Work, largest, refuse_singular, scaled, times_power_of_two

MOST_ROWS = 128
_F64 = torch.float64
_CONTRACTION = 0.125
_GOOD = 2.0**-8
_GRAM_BITS = 1000  # the condition's square has 400 at most
_NEWTON = 12  # each step squares an error that begins below 1/8 but for the condition


def solve_by_elimination(work: Work, a: Parts, b: Parts, task: str) -> Parts:
    """x with a x = b for one matrix (N, N) of about unit size.

    Args:
        work: how many digits are wanted.
        a: float64 components.
        b: (N, K), likewise.
        task: for errors.

    Raises:
        torch.linalg.LinAlgError: a is singular, or beyond four components; N > 128.
    """
    matrix, right = Integers.of(a), Integers.of(b)
    near = _proven(a, task, lambda components: _invert(a, components), lambda z: z @ matrix)
    return _refine(work, task, Integers.of(near), matrix, right, a[0].device)


def _refine(work: Work, task: str, near: Integers, a: Integers, b: Integers, device: torch.device) -> Parts:
    """x += Z (b - a x), of which nothing is rounded but x and the correction."""
    progress, x = Progress(work, task), (near @ b).parts(device, work.components)
    for _ in range(LIMIT):
        step = (near @ (b - a @ Integers.of(x))).parts(device)
        x = pointwise("add", x, step, components=len(x), dtype=_F64)
        if progress.done(largest(step[0]), largest(x[0])):
            break
    return x


def least_squares_by_elimination(work: Work, a: Parts, b: Parts, task: str) -> Parts:
    """x of least |b - a x| for one matrix (M, N): x += W W^T a^T (b - a x) for W = R^-1, a = Q R (Bjorck 1987).

    |W^T a^T a W - 1| < 1/8 in the maximum norm, computed in integers, proves that the columns are independent.
    """
    matrix, right, device = Integers.of(a), Integers.of(b), a[0].device
    gram = matrix.mT @ matrix
    near = _proven(a, task, lambda components: _orthonormalizer(a, gram, components), lambda w: w.mT @ gram @ w)
    left = Integers.of(near)
    inverse = _inverse_of_gram(left @ left.mT, gram, task, device)
    return _refine(work, task, inverse @ matrix.mT, matrix, right, device)


def _inverse_of_gram(near: Integers, gram: Integers, task: str, device: torch.device) -> Integers:
    """Return Z with |Z G - 1| < 2^-8 from an approximate inverse that is near in the norm of a x: Z -= (Z G - 1) Z."""
    one = Integers.of((torch.eye(gram.values.shape[0], dtype=_F64, device=device),))
    for _ in range(_NEWTON):
        error = near @ gram - one
        if float(error.parts(device, 1)[0].abs().sum(-1).amax()) < _GOOD:
            return near
        near = (near - error @ near).rounded(_GRAM_BITS)
    refuse("its condition is beyond about 1e58, which four components resolve", task)


def _orthonormalizer(a: Parts, gram: Integers, components: int) -> Parts | None:
    """Return W with a W orthonormal: R^-1 by Gram and Schmidt, then R^-1 of what that left."""
    first = _schmidt(a, components)
    if first is None:
        return None
    near = Integers.of(first)
    root = _inverse_cholesky((near.mT @ gram @ near).parts(a[0].device, components), components)
    return None if root is None else matmul(first, tuple(part.mT for part in root), components, _F64)


def _schmidt(a: Parts, components: int) -> Parts | None:
    """Return R^-1 of a = Q R, column by column."""
    table = pointwise("renormalize", a, components=components, dtype=_F64)
    rows = []
    for k in range(a[0].shape[-1]):
        column = tuple(part[:, k : k + 1] for part in table)
        square = matmul(tuple(part.mT for part in column), column, components, _F64)
        length = pointwise("sqrt", square, components=components, dtype=_F64)
        if not bool(length[0] > 0):
            return None
        unit = pointwise("div", column, length, components=components, dtype=_F64)
        row = matmul(tuple(part.mT for part in unit), table, components, _F64)
        for part, own in zip(row, length, strict=True):
            part[:, :k] = 0.0
            part[:, k] = own[0]
        rows.append(row)
        row = tuple(-part for part in row)
        table = pointwise("addcmul", table, unit, row, components=components, dtype=_F64)
    return _invert(tuple(torch.cat(parts) for parts in zip(*rows, strict=True)), components)


def _proven(a: Parts, task: str, make: Callable, unit: Callable) -> Parts:
    """Call `make` with ever more components until `unit` proves the result to 2^-8, or 1/8 for four.

    Raises:
        torch.linalg.LinAlgError: none does.
    """
    rows, device = a[0].shape[-1], a[0].device
    if max(a[0].shape) > MOST_ROWS:
        refuse(f"elimination in components serves up to {MOST_ROWS} rows, and this matrix has {max(a[0].shape)}", task)
    one = Integers.of((torch.eye(rows, dtype=_F64, device=device),))
    for components in range(2, MOST + 1):
        made = make(components)
        if made is None:
            continue
        off = float((unit(Integers.of(made)) - one).parts(device, 1)[0].abs().sum(-1).amax())
        if off < (_CONTRACTION if components == MOST else _GOOD):
            return made
    refuse("its condition is beyond about 1e58, which four components resolve", task)


def cholesky_by_elimination(work: Work, a: Parts, task: str) -> Parts:
    """Lower L with L L^T = a for one matrix (N, N) of about unit diagonal: L += L0 phi(Z (a - L L^T) Z^T), Z = L0^-1.

    |Z a Z^T - 1| < 1/8 in the maximum norm, computed in integers, proves that a is positive definite.
    """
    matrix, device = Integers.of(a), a[0].device
    near = _proven(a, task, lambda components: _inverse_cholesky(a, components), lambda z: z @ matrix @ z.mT)
    count = len(near)
    start, transposed = _cholesky(a, count), tuple(part.mT for part in near)
    assert start is not None, "its inverse has been made"
    progress, factor = Progress(work, task), work.to_float64(start)
    for _ in range(LIMIT):
        known = Integers.of(factor)
        rest = (matrix - known @ known.mT).parts(device)
        off = matmul(matmul(near, rest, count, _F64), transposed, count, _F64)
        lower = tuple(part.tril(-1) + torch.diag_embed(part.diagonal() / 2) for part in off)
        step = matmul(start, lower, count, _F64)
        factor = pointwise("add", factor, step, components=len(factor), dtype=_F64)
        if progress.done(largest(step[0], (-2, -1)), largest(factor[0], (-2, -1))):
            break
    return factor


def _inverse_cholesky(a: Parts, components: int) -> Parts | None:
    root = _cholesky(a, components)
    return None if root is None else _invert(root, components)


def _cholesky(a: Parts, components: int) -> Parts | None:
    """Return Cholesky's factor in components, or None where a pivot is not positive."""
    table = pointwise("renormalize", a, components=components, dtype=_F64)
    columns = []
    for k in range(a[0].shape[-1]):
        if not bool(table[0][k, k] > 0):
            return None
        head = pointwise("sqrt", tuple(part[k : k + 1, k : k + 1] for part in table), components=components, dtype=_F64)
        column = tuple(part[:, k : k + 1].clone() for part in table)
        for part in column:
            part[:k] = 0.0
        column = pointwise("div", column, head, components=components, dtype=_F64)
        columns.append(column)
        row = tuple(part.mT for part in column)
        table = pointwise("addcmul", table, tuple(-part for part in column), row, components=components, dtype=_F64)
    return tuple(torch.cat(parts, 1) for parts in zip(*columns, strict=True))


def refuse(why: str, task: str) -> NoReturn:
    """Raise for a matrix that float64 takes for singular."""
    raise torch.linalg.LinAlgError(
        f"{task}: float64 cannot tell the matrix from a singular one, and {why}. Scale rows and columns, add a small "
        "multiple of the identity, or leave out dependent columns"
    )


def _invert(a: Parts, components: int) -> Parts | None:
    """Invert a by eliminating [a, 1] (Gauss and Jordan); None where a pivot is zero or a number overflows."""
    rows, device = a[0].shape[-1], a[0].device
    right = torch.eye(rows, dtype=_F64, device=device)
    left = pointwise("renormalize", a, components=components, dtype=_F64)
    table = [torch.cat([part, right if k == 0 else torch.zeros_like(right)], 1) for k, part in enumerate(left)]
    for k in range(rows):
        pivot = k + int(table[0][k:, k].abs().argmax())
        if not bool(table[0][pivot, k] != 0):
            return None
        if pivot != k:
            for part in table:
                part[[k, pivot]] = part[[pivot, k]]
        head = tuple(part[k : k + 1, k : k + 1] for part in table)
        row = pointwise("div", tuple(part[k : k + 1] for part in table), head, components=components, dtype=_F64)
        factor = tuple(-part[:, k : k + 1] for part in table)
        for part in factor:
            part[k] = 0.0
        table = list(pointwise("addcmul", tuple(table), factor, row, components=components, dtype=_F64))
        for part, own in zip(table, row, strict=True):
            part[k] = own[0]
    return tuple(part[:, rows:] for part in table) if bool(table[0].isfinite().all()) else None


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
    matrices = zip(*(part.double().reshape(-1, size, size).tolist() for part in a), strict=True)
    values = [_one_determinant(parts) for parts in matrices]
    rows = torch.tensor([_floats(value) for value in values], dtype=torch.float64, device=a[0].device)
    shaped = tuple(rows[:, k].reshape(a[0].shape[:-2]) for k in range(4))
    return pointwise("renormalize", shaped, components=4, dtype=torch.float64)


def _one_determinant(parts: tuple) -> Fraction:
    """Return the determinant of a sum of matrices given as nested lists."""
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
