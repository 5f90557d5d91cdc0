"""What was seen of a script: its trainings, their findings merged, as text, plain data and a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._finding import Finding, plain_causes
from ..findings._kind import causes_first
from ..page import write_page
from ._training import Training


@dataclass
class Report:
    """The ended trainings of a script.

    Attributes:
        trainings: in order, each with at least one step.
        unseen: sentences that say what could not be observed.
        interval: one step in so many was sampled.
        ended: how the script ended, if somebody has said so.
    """

    trainings: Sequence[Training]
    unseen: list[str] = field(default_factory=list)
    interval: int = 50
    ended: str | None = None

    @property
    def findings(self) -> list[Finding]:
        """Those of all trainings, the worst first."""
        return causes_first(finding for training in self.trainings for finding in training.findings)

    @property
    def steps(self) -> int:
        """Optimizer steps that were seen."""
        return sum(map(len, self.trainings))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold: the findings of all, and the training of most steps.

        Under `trainings` stands each: number, names of its model and optimizers, steps, the numbers of those whose
        steps lie between its own, its findings, and, but for the one that the rest is of, its record.
        """
        if not self.trainings:
            return {"findings": [], "steps": 0, "interval": self.interval, "record": {"unseen": self.unseen}}
        longest = max(self.trainings, key=len)
        of_each = [[finding.to_dict() for finding in training.findings] for training in self.trainings]
        found = longest.to_dict()
        findings = self.findings
        found["findings"] = [_of_trainings(finding.to_dict(), of_each) for finding in findings]
        found["causes"] = plain_causes(findings)
        found["ended"] = self.ended
        found["trainings"] = [
            self._entry(number, training, findings, training is longest)
            for number, (training, findings) in enumerate(zip(self.trainings, of_each), 1)
        ]
        found["record"]["unseen"] = [*self.unseen, *found["record"].get("unseen", ())]
        return found

    def _entry(self, number: int, training: Training, findings: list[dict[str, Any]], shown: bool) -> dict[str, Any]:
        others = enumerate(self.trainings, 1)
        entry = {
            "number": number,
            "model": training.model,
            "optimizers": training.kinds,
            "steps": len(training),
            "overlaps": [k for k, other in others if other is not training and training.overlaps(other)],
            "shown": shown,
            "findings": findings,
        }
        if not shown:
            full = training.to_dict()
            entry |= {key: full[key] for key in ("interval", "overhead", "record")}
        return entry

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all.

        Raises:
            ValueError: jinja2 is missing, or the file cannot be written.
        """
        write_page("observe", self.to_dict(), path)

    def __str__(self) -> str:
        if len(self.trainings) == 1:
            return "\n".join([str(self.trainings[0]), *(f"not observed: {said}" for said in self.unseen)])
        return "\n\n".join([*self._each(), *(f"not observed: {said}" for said in self.unseen)])

    def _each(self) -> list[str]:
        """Each training under a line that says which it is; in full where its findings are not those of one before."""
        said: list[str] = []
        before: dict[tuple[Any, ...], int] = {}
        for number, training in enumerate(self.trainings, 1):
            with_ = [
                str(k) for k, one in enumerate(self.trainings, 1) if one is not training and training.overlaps(one)
            ]
            beside = f", beside training {', '.join(with_)}" if with_ else ""
            head = f"training {number} of {len(self.trainings)}: {training.model}, {', '.join(training.kinds)}{beside}"
            key = (training.model, *((one.code, one.severity, one.where) for one in training.findings))
            first = before.setdefault(key, number)
            alike = f"{head}; {len(training)} steps, whose findings are those of training {first}"
            said.append(f"{head}\n{training}" if first == number else alike)
        return said


def _of_trainings(finding: dict[str, Any], of_each: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """A finding with the numbers of the trainings that have it, where there are several."""
    if len(of_each) == 1:
        return finding
    return finding | {
        "trainings": [k for k, own in enumerate(of_each, 1) if any(_is_part(one, finding) for one in own)]
    }


def _is_part(one: dict[str, Any], merged: dict[str, Any]) -> bool:
    same = (one["code"], one["severity"], one["cure"]) == (merged["code"], merged["severity"], merged["cure"])
    return same and (one["where"] == merged["where"] or bool(set(one["where"]) & set(merged["where"])))
