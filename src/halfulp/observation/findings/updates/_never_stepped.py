"""never-stepped: a trainable parameter that no optimizer holds, or that never had a gradient."""

from collections.abc import Iterator

from ..._finding import Finding
from ...record._record import Record
from .._kind import FindingKind, register_finding

COPY = "set requires_grad=False if it is a copy of weights; else see whether the loss depends on it"


@register_finding
class NeverStepped(FindingKind):
    """A trainable parameter is in no optimizer, or never got a gradient, and keeps its first value."""

    code = "never-stepped"
    cure = "give it to the optimizer, or set requires_grad=False if it is to stay"
    role = "weight"

    def in_record(self, record: Record) -> Iterator[Finding]:
        # An observation without an optimizer says nothing of who steps what.
        if all(parameter.optimizer is None for parameter in record.parameters.values()):
            return
        for name, parameter in record.parameters.items():
            if not parameter.requires_grad:
                continue
            if parameter.optimizer is None:
                yield self._left_out(record, name, parameter.numel)
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

    def _left_out(self, record: Record, name: str, numel: int) -> Finding:
        """Of a parameter in no optimizer: whether the loss depends on it tells a forgotten one from a copy."""
        steps, gradient = len(record.sampled_steps), record.tensors.get(("weight gradient", name))
        if not steps or (gradient is not None and gradient.zeros < gradient.elements):
            return self.found(name, "error", 1.0, "trainable, but in no optimizer", numel=numel)
        said = f"trainable, in no optimizer, and no gradient in any of {steps} sampled steps, as of a target or average"
        return self.found(name, "note", 1 - 0.5**steps, said, cure=COPY, numel=numel, sampled_steps=steps)
