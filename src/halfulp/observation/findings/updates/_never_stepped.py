"""never-stepped: a trainable parameter that no optimizer holds, or that never had a gradient."""

from collections.abc import Iterator

from ..._finding import Finding
from ...record._record import Record
from .._kind import FindingKind, register_finding


@register_finding
class NeverStepped(FindingKind):
    """A trainable parameter is in no optimizer, or never got a gradient, and keeps its first value."""

    code = "never-stepped"
    cure = "give it to the optimizer, or set requires_grad=False if it is to stay"

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            if not parameter.requires_grad:
                continue
            if parameter.optimizer is None:
                yield self.found(name, "error", 1.0, "trainable, but in no optimizer", numel=parameter.numel)
            # Of a shard without elements the gradient goes to other ranks.
            elif record.sampled_steps and parameter.gradients == 0 and parameter.numel:
                said = f"no gradient in any of {len(record.sampled_steps)} sampled steps"
                yield self.found(
                    name,
                    "warning",
                    1 - 0.5 ** len(record.sampled_steps),
                    said,
                    cure="see whether the loss depends on it; set requires_grad=False if it is to stay",
                    sampled_steps=len(record.sampled_steps),
                )
