"""When two float32 results of one computation agree: the same bits, or what another order of a sum may change."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import same_bits
from ._record import relative

# Two results agree if their bits do or, behind a sum in another order, their leading 20 bits.
NEAR = 1e-6
# An element may be off by this many times what float32 itself is off by among elements of its size.
_ROOM = 16.0
# Elements up to this many binades larger count as of its size.
_BINADES = 3
# Beyond float32's binades, for 0.
_ZERO = -1100


def agrees(wanted: Tensor | None, got: Tensor | None, exact: Tensor | None) -> bool:
    """Whether a result is plain float32's up to the order of sums, element by element.

    The norm of the difference must be within `NEAR` of the norm. That says nothing of elements far below the largest,
    so each element is compared with a run in float64: its error must be within 2^-20 of its value, or within 16 times
    the largest that plain float32 makes among elements of up to eight times its size. Without such a run, elements may
    not become 0, nor cease to be.

    Args:
        wanted: of plain float32; None where there is none.
        got: to be judged, of the same shape.
        exact: of the same computation in float64; None where it cannot run there.

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
    if not relative(wanted, got) <= NEAR:
        return False
    wanted, got = wanted.double().flatten(), got.double().flatten()
    finite = wanted.isfinite() & got.isfinite()
    wanted, got = wanted[finite], got[finite]
    if exact is None or exact.numel() != finite.numel():
        return not bool(((wanted == 0) != (got == 0)).any())
    exact = exact.double().flatten()[finite]
    if not exact.numel():
        return True
    allowed = torch.maximum(NEAR * exact.abs(), _ROOM * _error_of_size(wanted, exact))
    return bool(((got - exact).abs() <= allowed).all())


def _error_of_size(wanted: Tensor, exact: Tensor) -> Tensor:
    """For each element, the largest error of those that are no more than eight times as large."""
    errors = (wanted - exact).abs()
    binades = torch.where(exact == 0, _ZERO, torch.frexp(exact).exponent.long()) - _ZERO
    largest = torch.zeros(int(binades.max()) + 1 + _BINADES, dtype=torch.float64, device=errors.device)
    largest.scatter_reduce_(0, binades, errors, "amax")
    return torch.cummax(largest, 0).values[binades + _BINADES]
