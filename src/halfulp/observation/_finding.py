"""A finding: what is wrong, where, how surely, the numbers that show it, and the cure."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .._qualified_names import braced, pattern_of
from ._code import for_groups
from .record._plain import plain

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """Something that the numbers of a run, a checkpoint or a plan show to be wrong.

    Attributes:
        code: a stable name of what is wrong, with a page of its own in the docs.
        where: qualified names of the parameters, modules or tensors.
        severity: "note", "warning" or "error".
        confidence: from 0 to 1.
        evidence: the numbers that show it; for several names those of the worst.
        cure: what to do.
        summary: the evidence in words.
        says: a template of the diagnosis over all that one cause explains (`_causes`); empty for place and summary.
        write: lines of code that are the cure, to copy; empty where words alone say it.
        role: of the tensors that show it (`record.Role`); empty where none do.
        explained_by: codes of which this one is the same cause at the same place.
        kind: class name of the modules, where it is known, else what else tells a norm from a linear layer: findings
            of one kind are joined.

    >>> print(
    ...     Finding(
    ...         "updates-lost",
    ...         ("layers.0.norm.weight", "layers.1.norm.weight"),
    ...         "error",
    ...         1.0,
    ...         {"lost": 1.0},
    ...         "weight_update='kahan', or keep these in float32",
    ...         "100% of updates lost in bf16 at lr 3e-05",
    ...     )
    ... )
    layers.{0,1}.norm.weight: 100% of updates lost in bf16 at lr 3e-05; weight_update='kahan', or keep these in float32
    """

    code: str
    where: tuple[str, ...]
    severity: Severity
    confidence: float
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cure: str = ""
    summary: str = ""
    says: str = field(default="", repr=False)
    write: str = field(default="", repr=False)
    role: str = field(default="", repr=False)
    explained_by: tuple[str, ...] = field(default=(), repr=False)
    kind: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity {self.severity!r}: give one of {', '.join(SEVERITIES)}")
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence {self.confidence}: give a number from 0 to 1")

    def __str__(self) -> str:
        """One line: where, what is wrong, what to do."""
        head = f"{in_words(self.where)}: " if self.where else ""
        return f"{head}{self.summary}" + (f"; {self.cure}" if self.cure else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data that JSON can hold; numbers that JSON has no word for become strings."""
        return {
            "code": self.code,
            "where": list(self.where),
            "severity": self.severity,
            "confidence": self.confidence,
            "evidence": plain(self.evidence),
            "cure": self.cure,
            "summary": self.summary,
            "write": self.write,
            "role": self.role,
        }


def in_words(names: Iterable[str]) -> str:
    """Return names as few words: those that differ in numbers alone as one, with the numbers in braces.

    >>> in_words(["head.weight"]), in_words(["layers.0.bias", "layers.1.bias", "head.bias"])
    ('head.weight', 'layers.{0,1}.bias, head.bias')
    """
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(pattern_of(name), []).append(name)
    said = [braced(group) for group in grouped.values()]
    return ", ".join(said[:4]) + (f" and {len(said) - 4} more" if len(said) > 4 else "")


def ranked(
    findings: Iterable[Finding],
    causes: Mapping[str, Iterable[str]] | None = None,
    spreading: Container[str] = (),
    worst: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Join findings of one code over layers of one kind, and return the worst first, each consequence after its cause.

    What is joined says the numbers of the worst, and is as sure as the surest.

    Args:
        findings: in any order.
        causes: code -> codes that explain it where both are found at one place. A cause is as bad as what follows
            from it, and goes before it.
        spreading: codes whose consequences show at other places too.
        worst: code -> the number among its evidence that is largest where it is worst, with "-" where it is smallest.

    >>> lost = Finding("updates-lost", ("norm.weight",), "warning", 0.9)
    >>> frozen = Finding("weight-frozen", ("norm.weight",), "error", 1.0)
    >>> [finding.code for finding in ranked([frozen, lost], {"weight-frozen": ["updates-lost"]})]
    ['updates-lost', 'weight-frozen']
    """
    merged: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.severity, finding.cure, finding.kind, frozenset(map(pattern_of, finding.where)))
        there = merged.get(key)
        merged[key] = finding if there is None else _join(there, finding, (worst or {}).get(finding.code, ""))
    found = list(merged.values())
    follows: dict[int, list[int]] = {i: [] for i in range(len(found))}
    for i, consequence in enumerate(found):
        codes = set((causes or {}).get(consequence.code, ()))
        for j, cause in enumerate(found):
            if cause.code in codes and (cause.code in spreading or meet(cause.where, consequence.where)):
                follows[j].append(i)
    explained = {i for consequences in follows.values() for i in consequences}

    def badness(i: int) -> int:
        return max(SEVERITIES.index(found[each].severity) for each in [i, *_all_from(i, follows)])

    def rank(i: int) -> tuple[object, ...]:
        finding = found[i]
        return -badness(i), i in explained, -finding.confidence, -len(finding.where), finding.code

    return [found[i] for i in sorted(follows, key=rank)]


def _all_from(start: int, follows: Mapping[int, Iterable[int]]) -> set[int]:
    """Return what follows from a finding, directly or not."""
    found: set[int] = set()
    left = [start]
    while left:
        new = set(follows[left.pop()]) - found
        found |= new
        left += new
    return found


def meet(names: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether two sets of names have a place in common: a name, or a module and what lies in it."""
    mine, theirs = set(names), set(others)
    if not mine or not theirs or mine & theirs:
        return True
    return any(_within(name, theirs) for name in mine) or any(_within(name, mine) for name in theirs)


def _within(name: str, others: set[str]) -> bool:
    """Return whether a module around a name is among others; "" is the whole model."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in others for count in range(len(parts)))


def _join(one: Finding, other: Finding, measure: str) -> Finding:
    worst = max(one, other, key=lambda finding: (_measured(finding, measure), finding.confidence))
    where = tuple(dict.fromkeys([*one.where, *other.where]))
    write = worst.write if one.write == other.write else for_groups(worst.write)
    return replace(worst, where=where, confidence=max(one.confidence, other.confidence), write=write)


def _measured(finding: Finding, measure: str) -> float:
    """Return how bad a finding is by a number among its evidence; minus infinity where it has none."""
    value = finding.evidence.get(measure.removeprefix("-"))
    if not isinstance(value, int | float) or math.isnan(value):
        return -math.inf
    return -value if measure.startswith("-") else value


def worst_severity(findings: Iterable[Finding]) -> Severity | None:
    """Return the highest severity among findings, None without any."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default=None)
