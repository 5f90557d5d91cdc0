"""Tools of iterative refinement: working precision, exact scaling, convergence tests."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels import power
from . import _exact_products as slicing
from ._matmul import matmul
from ._pointwise import MOST, PRECISION, Parts, pointwise

MOST_CORRECTIONS = 60  # corrections; each one that counts brings at least two bits
_TEXT_NEARLY_SINGULAR = (
    "float64, in which refinement starts, sees no regular matrix: its condition is beyond about 1e15. Scale rows and "
    "columns, add a small multiple of the identity, or leave out dependent columns"
)


@dataclass(frozen=True)
class WorkingPrecision:
    """Float64 components that carry a result and about 50 bits more, so that a residual keeps the result's digits."""

    components: int
    bits: int

    @classmethod
    def for_result(cls, components: int, dtype: torch.dtype) -> WorkingPrecision:
        """Return the working precision for results of so many components of a dtype."""
        bits = components * PRECISION[dtype]
        return cls(min(MOST, -(-(bits + 50) // 53)), bits)

    def to_float64(self, parts: Parts) -> Parts:
        """Return operands as float64 components, as many as the work has or more."""
        return pointwise("renormalize", parts, components=max(self.components, len(parts)), dtype=torch.float64)

    def add(self, x: Parts, y: Parts) -> Parts:
        """x + y."""
        return pointwise("add", x, y, components=self.components, dtype=torch.float64)

    def sub(self, x: Parts, y: Parts) -> Parts:
        """x - y."""
        return pointwise("sub", x, y, components=self.components, dtype=torch.float64)

    def matmul(self, x: Parts, y: Parts) -> Parts:
        """x @ y."""
        return matmul(x, y, self.components, torch.float64)

    def residual(self, b: Parts, x: Parts, y: Parts) -> torch.Tensor:
        """b - x @ y, rounded to float64 at the end."""
        return self.sub(b, self.matmul(x, y))[0]


class RefinementProgress:
    """Decides after each correction whether it was the last one.

    Args:
        work: how many bits are wanted.
        task: for the error, what is being computed.
    """

    def __init__(self, work: WorkingPrecision, task: str) -> None:
        # One more correction than the largest entries need serves entries that are smaller by up to 2^-50.
        self._enough = 2.0 ** -(work.bits + 3)
        self._acceptable = 2.0 ** -(min(work.bits, 53 * work.components - 50) - 4)
        self._before: torch.Tensor | None = None
        self._count = 0
        self._task = task

    def is_done(self, step: torch.Tensor, size: torch.Tensor) -> bool:
        """Return whether every correction, of largest entry `step`, is small enough against what it corrects.

        Raises:
            torch.linalg.LinAlgError: corrections do not shrink.
        """
        relative = torch.where(step == 0, 0.0, step / size)
        fine = relative <= self._enough
        if bool(fine.all()):
            return True
        before, self._before, self._count = self._before, relative, self._count + 1
        stuck = ~relative.isfinite()
        # The first solution may be all rounding, where it is small beside the right-hand side; then so is its error.
        if before is not None and self._count > 2:
            stuck |= ~(relative <= before / 4)
        if bool((stuck & ~(relative <= self._acceptable)).any()):
            raise torch.linalg.LinAlgError(f"{self._task} does not converge: {_TEXT_NEARLY_SINGULAR}")
        return bool((stuck | fine).all())


def refuse_singular(info: torch.Tensor, task: str) -> None:
    """Raise for a matrix in which LAPACK found a pivot of zero."""
    if bool((info != 0).any()):
        raise torch.linalg.LinAlgError(f"{task} met a pivot of zero: {_TEXT_NEARLY_SINGULAR}")


def prove_regular(a: Parts, near: torch.Tensor, task: str) -> None:
    """Prove by |near a - 1| < 1/2 in the maximum norm that a is regular; `near` is about the inverse.

    Refinement alone does not: where b lies in the range of a singular matrix it converges, to any of the solutions.
    """
    one = torch.eye(a[0].shape[-1], dtype=near.dtype, device=near.device)
    off = (near @ a[0] - one).abs() + (near.abs() @ a[0].abs()) * (4 * near.shape[-1] * 2.0**-53)
    if not _is_norm_below_half(off):
        exact = matmul((near,), a, 2, torch.float64)
        if not _is_norm_below_half((pointwise("sub", exact, (one,), components=1, dtype=torch.float64)[0]).abs()):
            raise torch.linalg.LinAlgError(
                f"{task} cannot tell the matrix from a singular one: {_TEXT_NEARLY_SINGULAR}"
            )


def _is_norm_below_half(x: torch.Tensor) -> bool:
    return bool((x.sum(-1) < 0.5).all())


def find_maxima(x: torch.Tensor, dims: tuple[int, ...] = (-2,)) -> torch.Tensor:
    """Return the largest magnitude of each column, or of each matrix."""
    return x.abs().amax(dims)


def scale_to_unit_size(parts: Parts, dim: int) -> tuple[Parts, torch.Tensor]:
    """Scale rows (dim = -1) or columns (dim = -2) by 2^-k to a largest magnitude in [1/2, 1); return them and k."""
    k, first, second = slicing.find_row_exponents(parts[0], dim)
    return multiply_by_factors(parts, first, second), k


def multiply_by_factors(parts: Parts, first: torch.Tensor, second: torch.Tensor) -> Parts:
    """Multiply the parts by two powers of two, one after the other."""
    return tuple(part * first * second for part in parts)


def multiply_by_power_of_two(parts: Parts, k: torch.Tensor) -> Parts:
    """Multiply by 2^k for integer k of any size, without over- or underflow on the way."""
    out = parts
    for _ in range(3):
        step = k.clamp(-1000, 1000)
        out, k = tuple(part * power(step.double()) for part in out), k - step
    sound = torch.isfinite(out[0])
    return (out[0], *(torch.where(sound, part, 0.0) for part in out[1:]))


class IntegerMatrix:
    """A matrix of expansions as Python integers times one power of two.

    >>> third = IntegerMatrix.of((torch.tensor([[0.75]], dtype=torch.float64),))
    >>> (third @ third).parts(torch.device("cpu"))[0]
    tensor([[0.5625]], dtype=torch.float64)
    """

    def __init__(self, values: np.ndarray, power: int) -> None:
        self.values, self.power = values, power

    @classmethod
    def of(cls, parts: Parts) -> IntegerMatrix:
        """Return the exact sum of finite float64 components."""
        refuse_infinite(parts)
        fractions, exponents = zip(*(np.frexp(part.detach().cpu().numpy()) for part in parts), strict=True)
        power = min(int(np.min(e, where=f != 0, initial=0)) for f, e in zip(fractions, exponents, strict=True)) - 53
        values: np.ndarray = np.zeros(parts[0].shape, dtype=object)
        for fraction, exponent in zip(fractions, exponents, strict=True):
            shifts = np.where(fraction == 0, 0, exponent - 53 - power).astype(object)
            values = values + (np.ldexp(fraction, 53).astype(np.int64).astype(object) << shifts)
        bits = functools.reduce(operator.or_, values.flat, 0)
        zeros = max(0, (bits & -bits).bit_length() - 1)  # behind the last digit of all
        return cls(values >> zeros, power + zeros)

    @property
    def mT(self) -> IntegerMatrix:
        """The transpose."""
        return IntegerMatrix(self.values.T, self.power)

    def __matmul__(self, other: IntegerMatrix) -> IntegerMatrix:
        return IntegerMatrix(self.values @ other.values, self.power + other.power)

    def __sub__(self, other: IntegerMatrix) -> IntegerMatrix:
        power = min(self.power, other.power)
        left, right = (x.values * (1 << (x.power - power)) for x in (self, other))
        return IntegerMatrix(left - right, power)

    def parts(self, device: torch.device, components: int = MOST) -> Parts:
        """Return the matrix rounded to float64 components."""
        rows = [_round_to_floats(int(value), self.power, components) for value in self.values.flat]
        wide = torch.tensor(rows, dtype=torch.float64, device=device).reshape(*self.values.shape, components)
        return pointwise("renormalize", tuple(wide.unbind(-1)), components=components, dtype=torch.float64)


def refuse_infinite(parts: Parts) -> None:
    """Raise for a side of a system that is not finite."""
    if not all(bool(part.isfinite().all()) for part in parts):
        raise torch.linalg.LinAlgError("a solution is beyond float64's largest number: scale both sides")


def _round_to_floats(value: int, power: int, components: int) -> list[float]:
    """Return components of value 2^power, each the nearest float64 to what is left; behind an infinity follow zeros."""
    out: list[float] = []
    value, behind = value << max(0, power), max(0, -power)
    for _ in range(components):
        try:
            head = value / (1 << behind)  # Python divides integers with one rounding, of subnormals too
        except OverflowError:
            return [math.inf if value > 0 else -math.inf, *[0.0] * (components - 1)]
        out.append(head)
        above, below = head.as_integer_ratio()
        value -= (above << behind) // below
    return out
