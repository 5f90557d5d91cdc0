"""LastStep: whether an optimizer's step was applied, and why not."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LastStep:
    """The outcome of the last ``scaler.step(optimizer)``.

    Attributes:
        applied: Whether the optimizer stepped.
        reason: Why it did not, in words; empty where it did.
        overflow_sources: The sites that overflowed, each with the exponent that it had.
    """

    applied: bool
    reason: str = ""
    overflow_sources: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return "applied" if self.applied else f"skipped: {self.reason}"
