"""An observation as a few lines for a person: findings, what was seen, what was not, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

from .._finding import Finding, listing
from .._record import Record
from .._text import times

ROLES = ("activation", "weight", "activation gradient", "weight gradient", "update", "first moment", "second moment")


def summary(record: Record, findings: Sequence[Finding], steps: int, interval: int, overhead: float | None) -> str:
    """Return the lines."""
    return "\n".join([*listing(findings), "", *_seen(record, steps, interval), *_unseen(record), *_cost(overhead)])


def _seen(record: Record, steps: int, interval: int) -> list[str]:
    skipped = f", {record.skipped} skipped by the gradient scaler" if record.skipped else ""
    lines = [f"{steps} steps{skipped}; {len(record.sampled_steps)} sampled (one in {interval})"]
    if not record.tensors:
        return lines
    lines.append(f"{'role':<20} {'tensors':>7} {'largest':>10} {'smallest':>10} {'zeros':>7} {'not finite':>10}")
    for role in ROLES:
        found = [tensor for (of, _), tensor in record.tensors.items() if of == role]
        if found:
            elements = max(1, sum(tensor.elements for tensor in found))
            zeros = sum(tensor.zeros for tensor in found) / elements
            amax, amin = max(t.amax for t in found), min(t.amin for t in found)
            broken = sum(tensor.nonfinite for tensor in found)
            lines.append(f"{role:<20} {len(found):>7} {amax:>10.3g} {amin:>10.3g} {zeros:>7.1%} {broken:>10}")
    seen = sum(p.update.seen for p in record.parameters.values())
    if seen:
        lost = sum(p.update.cancelled for p in record.parameters.values())
        lines.append(f"updates: {lost / seen:.1%} of {seen} sampled nonzero ones left their weight as it was")
    return lines


def _unseen(record: Record) -> list[str]:
    return [f"not observed: {sentence}" for sentence in record.unseen]


def _cost(overhead: float | None) -> list[str]:
    return [] if overhead is None else [f"time spent observing: {times(overhead)} the run's own"]
