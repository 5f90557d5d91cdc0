"""Whether two float32 results of one computation agree, up to the order of their sums."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import same_bits

# Two results agree if their bits do or, behind a sum in another order, their leading 20 bits.
NEAR = 1e-6
# An element may be off by this many times what float32 itself is off by among elements of its size.
_ROOM = 32.0
# Elements up to this many binades larger count as of its size.
_BINADES = 6
# Beyond float32's binades, for 0.
_ZERO = -1100


def agrees(wanted: Tensor | None, got: Tensor | None, exact: Tensor | None) -> bool:
    """Whether a result is plain float32's up to the order of sums, element by element.

    The error against float64 must be within 1e-6 of the norm, or within 32 times plain float32's own. That says nothing
    of elements far below the largest, so each one's error must be within 1e-6 of its value, or within 32 times the
    largest that plain float32 makes among elements of up to 64 times its size. Without a result in float64, the norm
    of the difference must be within 1e-6 of the norm, and elements may not become 0, nor cease to be.

    Args:
        wanted: of plain float32; None where there is none.
        got: to be judged, of the same shape.
        exact: of the same computation in float64, or with other rounding errors; None where there is no such run.

    >>> a = torch.tensor([1.0, 1e-7]).repeat(8)
    >>> agrees(a, a * (1 + 1e-7), a.double()), agrees(a, torch.where(a < 1e-6, 0.0, a), a.double())
    (True, False)
    """
    if wanted is None or got is None:
        return wanted is got
    if wanted.shape != got.shape:
        return False
    if same_bits(wanted, got):
        return True
    if _not_finite(wanted, got):
        return False
    wanted, got = wanted.double().flatten(), got.double().flatten()
    finite = wanted.isfinite()
    wanted, got = wanted[finite], got[finite]
    if exact is None or exact.numel() != finite.numel():
        return relative(wanted, got) <= NEAR and not bool(((wanted == 0) != (got == 0)).any())
    exact = exact.double().flatten()[finite]
    if not exact.numel():
        return True
    if (got - exact).norm() > max(NEAR * exact.norm(), _ROOM * (wanted - exact).norm()):
        return False
    allowed = torch.maximum(NEAR * exact.abs(), _ROOM * _error_of_size(wanted, exact))
    return bool(((got - exact).abs() <= allowed).all())


def _error_of_size(wanted: Tensor, exact: Tensor) -> Tensor:
    """For each element, the largest error of those that are no more than 64 times as large."""
    errors = (wanted - exact).abs()
    binades = torch.where(exact == 0, _ZERO, torch.frexp(exact).exponent.long()) - _ZERO
    largest = torch.zeros(int(binades.max()) + 1 + _BINADES, dtype=torch.float64, device=errors.device)
    largest.scatter_reduce_(0, binades, errors, "amax")
    return torch.cummax(largest, 0).values[binades + _BINADES]


def relative(wanted: Tensor, got: Tensor) -> float:
    """The norm of the difference over the norm of what was wanted; infinite where infinities or NaN differ.

    >>> inf = float("inf")
    >>> relative(torch.tensor([4.0, inf]), torch.tensor([3.0, inf])), relative(torch.tensor(inf), torch.tensor(-inf))
    (0.25, inf)
    """
    if _not_finite(wanted, got):
        return float("inf")
    wanted, got = wanted.double(), got.double()
    finite = wanted.isfinite()
    norm = torch.where(finite, wanted, 0.0).norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.where(finite, wanted - got, 0.0).norm() / norm)


def _not_finite(wanted: Tensor, got: Tensor) -> bool:
    """Whether infinities or NaN differ."""
    finite = wanted.isfinite() & got.isfinite()
    return not bool((finite | (wanted == got) | (wanted.isnan() & got.isnan())).all())
