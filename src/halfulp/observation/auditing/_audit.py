"""What `hu.audit` measured of two checkpoints: plain data that findings, tables and pages read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..._qualified_names import make_name_pattern
from .._finding import Finding, Severity, describe_names, find_worst_severity, format_findings, group_causes_as_dicts
from .._record import RealisedChanges, to_plain_data
from ..page import write_page
from ._tensors import (
    WORDS_BY_TENSOR_STATUS,
    TensorAudit,
)


@dataclass(frozen=True, slots=True)
class ParameterStateAudit:
    """The facts about one parameter from the optimizers' states.

    Attributes:
        name: of the parameter.
        options: numbers of its group in B: lr, weight_decay, betas, eps, momentum.
        steps: its step in A and B; None where it is not known.
        dtypes: of each of its states of its own shape in A and B; None where one has none.
        weight_update: of an optimizer of halfulp; None of any other.
        compensated: whether low bits, a residual or master weights lie beside the parameter.
        compensation_moved: whether those changed, or A has none.
        shapes_match: whether its moments have the parameter's shape.
        all_zero: whether its first moment is all zeros: no gradient has arrived for long.
        update: the last update, computed from B's states and learning rate, under nearest rounding.
    """

    name: str
    options: Mapping[str, Any]
    steps: tuple[int | None, int | None]
    dtypes: Mapping[str, tuple[torch.dtype | None, torch.dtype | None]]
    weight_update: str | None = None
    compensated: bool = False
    compensation_moved: bool = False
    shapes_match: bool = True
    all_zero: bool = False
    update: RealisedChanges | None = None

    @property
    def steps_between(self) -> int | None:
        """Steps made from A to B, None where not known."""
        before, after = self.steps
        return None if before is None or after is None else after - before


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Tensors of one kind over all layers, and what is to be said of them.

    Attributes:
        pattern: their names in words.
        names: of the tensors.
        dtypes: of A and B, in words.
        numel: elements of all.
        share_unchanged: of their elements.
        median_change_ulps: the smallest and the largest of their medians.
        verdict: in words.
        severity: of the worst finding that names one of them.
    """

    pattern: str
    names: tuple[str, ...]
    dtypes: str
    numel: int
    share_unchanged: float
    median_change_ulps: tuple[float, float]
    verdict: str
    severity: Severity | None


@dataclass(frozen=True)
class Audit:
    """Two checkpoints of one run, compared tensor by tensor.

    Attributes:
        tensors: by name, in the order of the files.
        states: what optimizer states say, by parameter; empty where a checkpoint holds none.
        unseen: sentences that say what could not be compared, and why.
        findings: what is wrong, the worst first.
        states_complete: whether each of B's optimizer states found its parameter; where not, a parameter without states
            may be one that is stepped.
    """

    tensors: Mapping[str, TensorAudit]
    states: Mapping[str, ParameterStateAudit] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    states_complete: bool = True

    @property
    def passed(self) -> bool:
        """Whether nothing above a note was found."""
        return find_worst_severity(self.findings) not in ("warning", "error")

    @property
    def steps_between(self) -> int | None:
        """Optimizer steps from A to B: the most of any parameter; None where not known."""
        return max((one for state in self.states.values() if (one := state.steps_between) is not None), default=None)

    def list_layer_groups(self) -> list[LayerGroup]:
        """Return the tensors joined over layers of one kind, those with the worst findings first."""
        kinds: dict[tuple[object, ...], list[TensorAudit]] = {}
        worst = {name: finding for finding in reversed(self.findings) for name in finding.where}
        for name, row in self.tensors.items():
            found = worst.get(name)
            key = make_name_pattern(name), row.a.dtype, row.b.dtype, row.status, found.code if found else ""
            kinds.setdefault(key, []).append(row)
        made = [_make_layer_group(rows, worst.get(rows[0].name)) for rows in kinds.values()]
        order = {"error": 0, "warning": 1, "note": 2, None: 3}
        return sorted(made, key=lambda group: order[group.severity])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON can hold."""
        return {
            "findings": [finding.to_dict() for finding in self.findings],
            "causes": group_causes_as_dicts(self.findings),
            "tensors": [row.to_dict() for row in self.tensors.values()],
            "states": [to_plain_data(state) for state in self.states.values()],
            "groups": [to_plain_data(group) for group in self.list_layer_groups()],
            "steps": self.steps_between,
            "unseen": list(self.unseen),
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all.

        Raises:
            ValueError: jinja2 is missing, or the file cannot be written.
        """
        write_page("audit", self.to_dict(), path)

    def __str__(self) -> str:
        """Return the findings, the worst first, then what is to be said of each group of tensors."""
        groups = [f"{group.pattern} ({group.dtypes}): {group.verdict}" for group in self.list_layer_groups()]
        return "\n".join([*format_findings(self.findings), *(groups or ["no tensors"]), *self.unseen])


def _make_layer_group(rows: list[TensorAudit], found: Finding | None) -> LayerGroup:
    first, numel = rows[0], sum(row.numel for row in rows)
    names = tuple(row.name for row in rows)
    unchanged = sum(row.unchanged for row in rows) / numel if numel else 1.0
    medians = [row.median for row in rows if not math.isnan(row.median)]
    ends = (min(medians), max(medians)) if medians else (math.nan, math.nan)
    dtypes = " -> ".join(dict.fromkeys(to_plain_data([first.a.dtype, first.b.dtype])))
    if found is not None:
        verdict = found.summary
    elif not first.numel:
        verdict = "empty"
    elif first.status != "changed":
        verdict = WORDS_BY_TENSOR_STATUS[first.status]
    elif not medians or first.role == "buffer":
        verdict = f"moved in {1 - unchanged:.3g} of its elements"
    else:
        median = " to ".join(dict.fromkeys(f"{end:.3g}" for end in ends))
        verdict = f"moved: {100 * unchanged:.3g}% unchanged, median {median} ulps"
    severity = found.severity if found is not None else None
    return LayerGroup(describe_names(names), names, dtypes, numel, unchanged, ends, verdict, severity)
