"""The input of a running step: the parameters of one step specification with their gradients and constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...kernels import plain
from ..parameters._local_tensors import local, own_parts
from ..parameters._outside_writes import drop_stale, follow_version, mark_stepped
from ..parameters._parameter_plan import ParameterPlan, PayloadVersion
from ..parameters._payload_digests import PayloadDigests
from ..parameters._step_spec import StepSpec
from ._tables import Table

Copies = tuple[torch.Tensor, ...]


@dataclass(eq=False, slots=True)
class Batch:
    """The input of a running step for the parameters of one step specification; it lives as long as the step.

    Columns instead of one object per parameter, of which there may be 100,000.

    Attributes:
        spec: of this step, metered or not.
        table: of the parameters' plans.
        parameters: as the user holds them.
        gradients: their memory, without gaps.
        gradient_scales: what gradients are multiplied by, 1 or a scaled gradient's scale, wherever that lies.
        steps: the numbers of the step, from 1 for each parameter.
        constants: the rule's; equal ones of one group are one object.
        ages: the groups, and the numbers of the step that the rule counts, where it needs them again: its sums give
            the last constants.
        prepared: by row, what the rule's `prepare` gives, if it has one.
        copies: by row, copies without gaps of a parameter's own tensors, where these have some; the step writes to
            the copies, and `finish` copies the values back.
        recorded: the payload versions of those whose writes are tracked.
        engine: which runs the step.
        digests: of the payloads as written, if the step computed them.
        scales: of the payloads as written, on their device, if the step chose them there.
    """

    spec: StepSpec
    table: Table
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    gradient_scales: list[float | torch.Tensor]
    steps: list[int]
    constants: list[tuple[float, ...]]
    ages: list[tuple[Mapping[str, Any], int]] = field(default_factory=list)
    prepared: list[torch.Tensor] = field(default_factory=list)
    copies: dict[int, Copies] = field(default_factory=dict)
    recorded: list[PayloadVersion] = field(default_factory=list)
    engine: str = ""
    digests: PayloadDigests | None = None
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        records = self.table.records
        self.recorded = [held for record in records if (held := record.payload_version) is not None]
        for row in self.table.has_gaps:
            parts = own_parts(self.parameters[row])
            self.copies[row] = tuple(plain(part.detach()).contiguous() for part in parts)

    @property
    def plans(self) -> list[ParameterPlan]:
        """The plans of the parameters."""
        return self.table.plans

    @property
    def device(self) -> torch.device:
        """The device of the gradients and the parameters."""
        return self.gradients[0].device

    def parts(self, row: int) -> list[torch.Tensor]:
        """Return the tensors that a parameter's step reads and writes: its own without gaps, then auxiliary ones."""
        plan = self.plans[row]
        return [*self.copies[row], *plan.auxiliary_tensors] if row in self.copies else plan.parts

    def states(self, row: int) -> list[list[torch.Tensor]]:
        """Return the tensors of a parameter's states, and what is prepared for its step behind them."""
        return [*self.plans[row].states, *([one] for one in self.prepared[row : row + 1])]

    def drop_stale(self) -> None:
        """Reset the auxiliary tensors of parameters that were written from outside."""
        recorded, parameters = self.recorded, self.parameters
        versions = [held.version for held in recorded]
        if len(versions) == len(parameters) and versions == [parameter._version for parameter in parameters]:
            return
        for plan, parameter in zip(self.plans, parameters) if recorded else ():
            held = plan.payload_version
            if held is not None and held.version != parameter._version:
                drop_stale(plan)

    def finish(self) -> None:
        """Record a step that has been written."""
        stepped = self.parameters
        if not self.table.is_plain and not self.spec.scaled:
            stepped = [local(parameter) for parameter in stepped]
        torch.autograd.graph.increment_version(stepped)
        for row, copies in self.copies.items():
            for part, copy in zip(self.plans[row].payloads, copies, strict=True):
                part.copy_(copy)
        for entry, step in zip(self.table.entries, self.steps):
            entry["step"] = step
        if self.recorded:
            mark_stepped(self.plans, self.recorded, stepped, self.digests, self.scales)

    def follow_versions(self) -> None:
        """Record the versions again, once all batches are written: parameters cut from one tensor share a counter."""
        for plan in self.plans:
            follow_version(plan)
