"""The input of a running step: the parameters of one step specification with their gradients and constants."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...kernels import plain
from ..parameters._local_tensors import local, own_parts
from ..parameters._outside_writes import follow_version, mark_stepped
from ..parameters._parameter_plan import ParameterPlan
from ..parameters._payload_digests import PayloadDigests
from ._spec import StepSpec

Copies = tuple[torch.Tensor, ...]


@dataclass(eq=False, slots=True)
class Batch:
    """The input of a running step for the parameters of one step specification; it lives as long as the step.

    Columns instead of one object per parameter, of which there may be 100,000.

    Attributes:
        spec: of this step, metered or not.
        plans: of the parameters.
        stepping: the tensors whose version counters the step increments.
        gradients: their memory, without gaps.
        gradient_scales: what gradients are multiplied by, 1 or a scaled gradient's scale, wherever that lies.
        steps: the numbers of the step, from 1 for each parameter.
        constants: the rule's; equal ones of one group are one object.
        copies: by row, copies without gaps of a parameter's own tensors, where these have some; the step writes to
            the copies, and `finish` copies the values back.
        digests: of the payloads as written, if the step computed them.
        scales: of the payloads as written, on their device, if the step chose them there.
    """

    spec: StepSpec
    plans: list[ParameterPlan] = field(default_factory=list)
    stepping: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    gradient_scales: list[float | torch.Tensor] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    constants: list[tuple[float, ...]] = field(default_factory=list)
    copies: dict[int, Copies] = field(default_factory=dict)
    digests: PayloadDigests | None = None
    scales: torch.Tensor | None = None

    def add(
        self,
        plan: ParameterPlan,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        scale: float | torch.Tensor,
        step: int,
        constants: tuple[float, ...],
    ) -> None:
        """Add a parameter."""
        if not plan.contiguous:
            self.copies[len(self.plans)] = tuple(plain(part.detach()).contiguous() for part in own_parts(parameter))
        self.plans.append(plan)
        self.stepping.append(parameter if plan.plain or plan.spec.scaled else local(parameter))
        self.gradients.append(gradient if gradient.is_contiguous() else gradient.contiguous())
        self.gradient_scales.append(scale)
        self.steps.append(step)
        self.constants.append(constants)

    @property
    def device(self) -> torch.device:
        """The device of the gradients and the parameters."""
        return self.gradients[0].device

    def parts(self, row: int) -> list[torch.Tensor]:
        """Return the tensors that a parameter's step reads and writes: its own without gaps, then auxiliary ones."""
        plan = self.plans[row]
        return [*self.copies[row], *plan.auxiliary_tensors] if row in self.copies else plan.parts

    def finish(self) -> None:
        """Record a step that has been written."""
        torch.autograd.graph.increment_version(self.stepping)
        for row, copies in self.copies.items():
            for part, copy in zip(self.plans[row].payloads, copies, strict=True):
                part.copy_(copy)
        for plan, step in zip(self.plans, self.steps):
            plan.state["step"] = step
        mark_stepped(self.plans, self.stepping, self.digests, self.scales)

    def follow_versions(self) -> None:
        """Record the versions again, once all batches are written: parameters cut from one tensor share a counter."""
        for plan in self.plans:
            follow_version(plan)
