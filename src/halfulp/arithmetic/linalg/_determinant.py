"""The determinant of a small matrix of expansions in exact integers."""

from __future__ import annotations

from fractions import Fraction

import torch

from ..expansions._pointwise import Parts, pointwise

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
