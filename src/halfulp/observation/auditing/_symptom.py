"""What an audit shows of one code, before it has the code's name and cure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ... import formats
from .._finding import Finding, Severity

# Bits of the significand, the implicit one included, from which a lost change is no practical loss.
WIDE = 24


@dataclass(frozen=True, slots=True)
class Symptom:
    """Where something is wrong, how badly, how surely, in words and numbers.

    Attributes:
        where: qualified names.
        severity, confidence, summary: as of a Finding.
        evidence: the numbers.
        cure: what to do, None for what the code's class says.
    """

    where: tuple[str, ...]
    severity: Severity
    confidence: float
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cure: str | None = None


def precision(dtype: torch.dtype | None) -> int | None:
    """Return the bits of a dtype's significand with the implicit one, None where it is no floating-point format.

    >>> precision(torch.bfloat16), precision(torch.float32), precision(torch.int8)
    (8, 24, None)
    """
    try:
        return None if dtype is None else formats.get(dtype).precision
    except ValueError:
        return None


def is_narrow(dtype: torch.dtype | None) -> bool:
    """Return whether it is a floating-point dtype with fewer digits than float32."""
    bits = precision(dtype)
    return bits is not None and bits < WIDE


def format_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype's format, its own where it has none."""
    if dtype is None:
        return "no dtype"
    try:
        return formats.get(dtype).name
    except ValueError:
        return str(dtype).removeprefix("torch.")


def percentage(share: float) -> str:
    """Return a share in per cent that is 0% or 100% only where it is exact.

    >>> percentage(1.0), percentage(0.9999), percentage(0.25), percentage(1e-9)
    ('100%', '>99.9%', '25%', '<0.1%')
    """
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.3g}%"


class Kind(Protocol):
    """A class of `findings` that makes findings of its code."""

    def found(
        self,
        where: tuple[str, ...],
        severity: Severity,
        confidence: float,
        summary: str,
        *,
        cure: str | None = None,
        **evidence: Any,
    ) -> Finding:
        """Return a finding of its code."""


def as_findings(kind: Kind, symptoms: Iterable[Symptom]) -> Iterator[Finding]:
    """Yield the findings that symptoms make under a code."""
    for one in symptoms:
        yield kind.found(one.where, one.severity, one.confidence, one.summary, cure=one.cure, **one.evidence)
