"""Systems that float64 cannot start: elimination in components, proved and refined with exact residuals.

An approximate inverse Z of a is made in two, three and four float64 components (Gauss and Jordan, partial pivoting),
until |Z a - 1| < 1/8 in the maximum norm, which is computed in integers and proves that a is regular. Then
x += Z (b - a x) with exact residuals gains three bits or more a step, to all digits that x has: the condition may be as
large as four components can resolve, about 1e58.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from ..expansions._pointwise import MOST, Parts, pointwise
from ..matmul._matmul import matmul
from ._refinement import LIMIT, Integers, Progress, Work, largest

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
    near = _proven(a, task, lambda components: _inverted(a, components), lambda z: z @ matrix)
    return _refined(work, task, Integers.of(near), matrix, right, a[0].device)


def _refined(work: Work, task: str, near: Integers, a: Integers, b: Integers, device: torch.device) -> Parts:
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
    return _refined(work, task, inverse @ matrix.mT, matrix, right, device)


def _inverse_of_gram(near: Integers, gram: Integers, task: str, device: torch.device) -> Integers:
    """Z with |Z G - 1| < 2^-8 from a near one whose error is small in the norm of a x only: Z -= (Z G - 1) Z."""
    one = Integers.of((torch.eye(gram.values.shape[0], dtype=_F64, device=device),))
    for _ in range(_NEWTON):
        error = near @ gram - one
        if float(error.parts(device, 1)[0].abs().sum(-1).amax()) < _GOOD:
            return near
        near = (near - error @ near).rounded(_GRAM_BITS)
    refuse("its condition is beyond about 1e58, which four components resolve", task)


def _orthonormalizer(a: Parts, gram: Integers, components: int) -> Parts | None:
    """W with a W orthonormal: R^-1 of Gram's and Schmidt's process, and once more R^-1 of what that left."""
    first = _schmidt(a, components)
    if first is None:
        return None
    near = Integers.of(first)
    root = _inverse_cholesky((near.mT @ gram @ near).parts(a[0].device, components), components)
    return None if root is None else matmul(first, tuple(part.mT for part in root), components, _F64)


def _schmidt(a: Parts, components: int) -> Parts | None:
    """R^-1 of a = Q R, column by column."""
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
    return _inverted(tuple(torch.cat(parts) for parts in zip(*rows, strict=True)), components)


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
    return None if root is None else _inverted(root, components)


def _cholesky(a: Parts, components: int) -> Parts | None:
    """Cholesky's factor in components; None where a pivot is not positive."""
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


def _inverted(a: Parts, components: int) -> Parts | None:
    """Gauss' and Jordan's elimination of [a, 1]; None where a pivot is zero or a number overflows."""
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
