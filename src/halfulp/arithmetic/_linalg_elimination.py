"""Systems that float64 cannot start: elimination in components, proved and refined with exact residuals.

An approximate inverse Z of a is made in two, three and four float64 components (Gauss and Jordan, partial pivoting),
until |Z a - 1| < 1/8 in the maximum norm, which is computed in integers and proves that a is regular. Then
x += Z (b - a x) with exact residuals gains three bits or more a step, to all digits that x has: the condition may be as
large as four components can resolve, about 1e58.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from ._linalg_integers import Integers
from ._linalg_work import LIMIT, Progress, Work, largest
from ._matmul import matmul
from ._pointwise import MOST, Parts, pointwise

MOST_ROWS = 128
_F64 = torch.float64
_CONTRACTION = 0.125
_GOOD = 2.0**-8
_SHIFTS = (0, -53, -106, -160)


def solve_by_elimination(work: Work, a: Parts, b: Parts, task: str, watched: slice = slice(None)) -> Parts:
    """x with a x = b for one matrix (N, N) of about unit size.

    Args:
        work: how many digits are wanted.
        a: float64 components.
        b: (N, K), likewise.
        task: for errors.
        watched: the rows of x whose digits decide when refinement ends.

    Raises:
        torch.linalg.LinAlgError: a is singular, or beyond four components; N > 128.
    """
    near = proven_inverse(a, task)
    matrix, right = Integers.of(a), Integers.of(b)
    device = a[0].device
    progress, x, rest = Progress(work, task), None, b
    for _ in range(LIMIT):
        step = matmul(near, rest, len(near), _F64)
        x = work.lift(step) if x is None else pointwise("add", x, step, components=len(x), dtype=_F64)
        if progress.done(largest(step[0][watched]), largest(x[0][watched])):
            break
        rest = (right - matrix @ Integers.of(x)).parts(device)
    return x


def least_squares_by_elimination(work: Work, a: Parts, b: Parts, task: str) -> Parts:
    """x of least |b - a x| for one matrix (M, N): of a x + s r = b, a^T r = 0, with a power of two s (Bjorck 1967).

    The condition of that system of M + N rows is least where s is near a's smallest singular value: s is tried.
    """
    m, n = a[0].shape
    if m == n:
        return solve_by_elimination(work, a, b, task)
    right = tuple(torch.cat([part, part.new_zeros(n, part.shape[-1])]) for part in b)
    for exponent in _SHIFTS:
        try:
            x = solve_by_elimination(work, _augmented(a, 2.0**exponent), right, task, slice(m, None))
            return tuple(part[m:] for part in x)
        except torch.linalg.LinAlgError as error:
            refused = error
    raise refused


def _augmented(a: Parts, shift: float) -> Parts:
    """[[s, a], [a^T, 0]]."""
    m, n = a[0].shape
    corner = [torch.eye(m, dtype=_F64, device=a[0].device) * shift * (k == 0) for k in range(len(a))]
    top = [torch.cat([one, part], 1) for one, part in zip(corner, a, strict=True)]
    return tuple(torch.cat([row, torch.cat([part.mT, part.new_zeros(n, n)], 1)]) for row, part in zip(top, a))


def proven_inverse(a: Parts, task: str) -> Parts:
    """Z with |Z a - 1| < 1/8, by the fewest components that reach 2^-8, or by four.

    Raises:
        torch.linalg.LinAlgError: none is found.
    """
    rows, device = a[0].shape[-1], a[0].device
    if rows > MOST_ROWS:
        refuse(f"elimination in components serves up to {MOST_ROWS} rows, and this matrix has {rows}", task)
    one, matrix = Integers.of((torch.eye(rows, dtype=_F64, device=device),)), Integers.of(a)
    for components in range(2, MOST + 1):
        near = _inverted(a, components)
        if near is None:
            continue
        off = float((Integers.of(near) @ matrix - one).parts(device, 1)[0].abs().sum(-1).amax())
        if off < (_CONTRACTION if components == MOST else _GOOD):
            return near
    refuse("its condition is beyond about 1e58, which four components resolve", task)


def cholesky_by_elimination(work: Work, a: Parts, task: str) -> Parts:
    """Lower L with L L^T = a for one matrix (N, N) of about unit diagonal: L += L0 phi(Z (a - L L^T) Z^T), Z = L0^-1.

    |Z a Z^T - 1| < 1/8 in the maximum norm, computed in integers, proves that a is positive definite.
    """
    start, near = _proven_root(a, task)
    matrix, factor, count = Integers.of(a), work.lift(start), len(start)
    transposed = tuple(part.mT for part in near)
    progress, unit = Progress(work, task), torch.ones((), dtype=_F64, device=a[0].device)
    for _ in range(LIMIT):
        known = Integers.of(factor)
        rest = (matrix - known @ known.mT).parts(a[0].device)
        off = matmul(matmul(near, rest, count, _F64), transposed, count, _F64)
        lower = tuple(part.tril(-1) + torch.diag_embed(part.diagonal() / 2) for part in off)
        step = matmul(start, lower, count, _F64)
        factor = pointwise("add", factor, step, components=len(factor), dtype=_F64)
        if progress.done(largest(off[0], (-2, -1)), unit):
            break
    return factor


def _proven_root(a: Parts, task: str) -> tuple[Parts, Parts]:
    rows, device = a[0].shape[-1], a[0].device
    if rows > MOST_ROWS:
        refuse(f"elimination in components serves up to {MOST_ROWS} rows, and this matrix has {rows}", task)
    one, matrix = Integers.of((torch.eye(rows, dtype=_F64, device=device),)), Integers.of(a)
    for components in range(2, MOST + 1):
        root = _root(a, components)
        near = None if root is None else _inverted(root, components)
        if near is None:
            continue
        left = Integers.of(near)
        off = float((left @ matrix @ left.mT - one).parts(device, 1)[0].abs().sum(-1).amax())
        if off < (_CONTRACTION if components == MOST else _GOOD):
            return root, near
    refuse("it is not positive definite, or its condition is beyond about 1e58", task)


def _root(a: Parts, components: int) -> Parts | None:
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
    table = pointwise("renormalize", a, components=components, dtype=_F64)
    table = [torch.cat([part, right if k == 0 else torch.zeros_like(right)], 1) for k, part in enumerate(table)]
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
