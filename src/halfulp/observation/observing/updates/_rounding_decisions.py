"""Directions of stochastic rounding: whether they are as likely as they should be, and drawn anew at every step."""

from __future__ import annotations

import torch

from ....optim import Optimizer
from ..._record import ParameterRecord, RoundingRecord

FEWEST = 64
_WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


def draws(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether an optimizer rounds updates of a parameter stochastically, as far as it says so."""
    if isinstance(optimizer, Optimizer):
        plan = optimizer._plans.get(parameter)
        if plan is None or plan.spec.scaled or plan.spec.in_parameter or plan.spec.auxiliary_names:
            return False
        return plan.spec.store.dtype in _WORDS and bool(plan.spec.update.draws(plan.spec.store))
    return parameter.dtype in _WORDS and bool(getattr(optimizer, "bf16_stochastic_round", False))


class RoundingDecisions:
    """Follows the directions in which one parameter's sampled elements are rounded, at the same places every time.

    Attributes:
        errors: of the last step, float64: 1 where an element was rounded away from zero, 0 where towards it, less the
            probability of going away from it, since random bits are added to magnitudes; NaN where nothing was rounded.
    """

    __slots__ = ("_before", "errors")

    def __init__(self) -> None:
        self.errors: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    def take_errors(self) -> torch.Tensor | None:
        """Return the errors of the last step, once."""
        errors, self.errors = self.errors, None
        return errors

    def add(self, record: ParameterRecord, dtype: torch.dtype, wanted: torch.Tensor, after: torch.Tensor) -> None:
        """Count the directions of one step.

        Args:
            record: of the parameter.
            dtype: that the wanted values were rounded to.
            wanted, after: float64 values before rounding, and what was stored.
        """
        low, high = neighbours(wanted, dtype)
        up = after == high
        probability = (wanted - low) / (high - low)
        decided = (low < wanted) & (wanted < high) & (up | (after == low)) & (high - low).isfinite()
        p, went_up = probability[decided], up[decided].double()
        rounding = record.rounding = record.rounding or RoundingRecord()
        rounding.seen += len(p)
        rounding.excess += float((went_up - p).sum())
        rounding.variance += float((p * (1 - p)).sum())
        errors = torch.where(decided, up.double() - probability, torch.nan)
        self.errors = errors * wanted.sign()
        surprise = errors / (probability * (1 - probability)).sqrt()
        if self._before is not None and len(self._before) == len(surprise):
            products = self._before * surprise
            products = products[products.isfinite()]
            if len(products) >= FEWEST:
                correlation = float(products.mean())
                rounding.repeated = correlation if rounding.repeated is None else max(rounding.repeated, correlation)
        self._before = surprise


def neighbours(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest numbers of a 16-bit dtype at or below and above float64 values, as float64.

    >>> low, high = neighbours(torch.tensor([1.001, -1.001], dtype=torch.float64), torch.bfloat16)
    >>> low.tolist(), high.tolist()
    ([1.0, -1.0078125], [1.0078125, -1.0])
    """
    near = x.to(dtype)
    below = torch.where(near.double() > x, _next(near, -1), near).double()
    return below, _next(below.to(dtype), 1).double()


def _next(x: torch.Tensor, direction: int) -> torch.Tensor:
    """The neighbouring number upwards (1) or downwards (-1), by its bits in order."""
    bits = x.view(torch.int16).to(torch.int32)
    ordered = torch.where(bits < 0, -(bits & 0x7FFF), bits) + direction
    return torch.where(ordered < 0, -ordered | 0x8000, ordered).to(torch.int16).view(x.dtype)
