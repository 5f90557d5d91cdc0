"""What an audit shows of one code, before it has the code's name and cure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .._finding import Finding, Severity


@dataclass(frozen=True, slots=True)
class Symptom:
    """Where something is wrong, how badly, how surely, in words and numbers.

    Attributes:
        where: qualified names.
        severity, confidence, summary: as of a Finding.
        evidence: the numbers.
        cure: what to do, None for what the code's class says.
        dtype: of the numbers, where the class has another cure for wide ones.
        write: lines of code that are the cure, None for what the code's class says.
    """

    where: tuple[str, ...]
    severity: Severity
    confidence: float
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cure: str | None = None
    dtype: torch.dtype | None = None
    write: str | None = None


class SymptomKind(Protocol):
    """A class of `findings` that makes findings of its code."""

    def cure_in(self, dtype: torch.dtype | None) -> str:
        """Return what to do about numbers of a dtype."""

    def found(
        self,
        where: tuple[str, ...],
        severity: Severity,
        confidence: float,
        summary: str,
        *,
        cure: str | None = None,
        write: str | None = None,
        **evidence: Any,
    ) -> Finding:
        """Return a finding of its code."""


def as_findings(kind: SymptomKind, symptoms: Iterable[Symptom]) -> Iterator[Finding]:
    """Yield the findings that symptoms make under a code."""
    for one in symptoms:
        yield kind.found(
            one.where,
            one.severity,
            one.confidence,
            one.summary,
            cure=one.cure or kind.cure_in(one.dtype),
            write=one.write,
            **one.evidence,
        )
