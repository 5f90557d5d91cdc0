"""first-nonfinite: where NaN or infinity came from."""

import math
from collections.abc import Iterator

from ..._finding import Finding
from ..._words import plural
from ...auditing._audit import Audit
from ...auditing._damage import nonfinite_tensors
from ...auditing._symptom import as_findings
from ...record._record import Record, TensorRecord
from .._kind import FindingKind, register_finding
from .._range_use import GRADIENTS, has_wide_range, loss_is_scaled, storage_format

# A loss scale makes gradients overflow now and then; what it cannot mend is there in every step.
STEPS = 3
FORWARD = "compute this layer in float32 or bfloat16, or bound what it divides by or exponentiates"
FORWARD_WIDE = "bound what this layer divides by or exponentiates, or takes the root or the logarithm of"
BACKWARD = "see what this layer's backward pass divides by (sqrt, norm or log at 0), and add an eps inside"
LOSS = "see what the loss divides by in its backward pass (sqrt, norm or log at 0), and add an eps inside"
STORED = "load the last clean checkpoint, which `halfulp audit` finds"
BETWEEN = STORED + ", and observe from there with interval=1 to see where the first one comes from"


@register_finding
class FirstNonfinite(FindingKind):
    """NaN or infinity appeared; this is the first module or tensor that had it."""

    code = "first-nonfinite"
    cure = FORWARD
    says = "{place} [has|have] the first NaN or infinity: [its|their] {role}, in step {step}"
    wide_cure = FORWARD_WIDE
    explained_by = ("eps-zero",)
    spreads = True

    def in_record(self, record: Record) -> Iterator[Finding]:
        found = [tensor for tensor in record.tensors.values() if tensor.first_nonfinite is not None]
        outputs_alone = all(tensor.role == "activation" for tensor in found)
        if loss_is_scaled(record):
            found = [tensor for tensor in found if tensor.role not in GRADIENTS or _in_every_step(tensor)]
        if not found:
            return
        first = min(found, key=_when)
        step, others = _when(first)[0], len(found) - 1
        broken = [one for one in found if one.role == "weight" and _when(one)[0] == step]
        if broken:
            yield self._stored(record, broken, first, len(found))
            return
        # Attention masks of -inf are infinite, and neither the loss nor a gradient that they lead to is.
        finite = all(one.loss is None or math.isfinite(one.loss) for one in record.history)
        alone = outputs_alone and finite and (not others or _have_gradients(record))
        counted = f"{first.nonfinite} of {first.elements} elements since step {step}"
        yield self.found(
            first.sources or first.name,
            "note" if alone else "error",
            1 - 0.5 ** (1 + others),
            f"{_made(first)} the first NaN or infinity, {counted}; {others} more tensors have some since",
            cure=_cure(first),
            step=step,
            role=first.role,
            nonfinite=first.nonfinite,
            elements=first.elements,
            tensors=len(found),
        )

    def _stored(self, record: Record, broken: list[TensorRecord], first: TensorRecord, tensors: int) -> Finding:
        """Weights are looked at as a step finds them: one that is broken in the first such step was so before it."""
        own = [one for one in broken if one.name.rpartition(".")[0] == first.name]
        weight = min(own or broken, key=_when)
        step, others = _when(first)[0], len(broken) - 1
        before = max((one for one in record.sampled_steps if one < step), default=None)
        also = f", as {plural(others, 'other weight')} did" if others else ""
        clean = "" if before is None else f"; at step {before}, the sampled one before, none did"
        return self.found(
            weight.name,
            "error",
            1 - 0.5**tensors,
            f"held NaN or infinity before step {step} began{also}{clean}",
            cure=STORED if before is None else BETWEEN,
            step=step,
            role=weight.role,
            nonfinite=weight.nonfinite,
            elements=weight.elements,
            weights=len(broken),
            tensors=tensors,
        )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, nonfinite_tensors(audit))


def _made(tensor: TensorRecord) -> str:
    """Return who made the first ones: of an output's gradient the backward pass of what took the output."""
    if tensor.role != "activation gradient":
        return f"{tensor.role} has"
    to = f"the gradient of the output of {tensor.name}" if tensor.name else "the gradient of the model's output"
    return f"the backward pass {'' if tensor.sources else 'of the loss '}gives {to}"


def _cure(tensor: TensorRecord) -> str:
    if tensor.role == "activation":
        return FORWARD_WIDE if has_wide_range(storage_format(tensor)) else FORWARD
    if tensor.role == "activation gradient" and not tensor.sources:
        return LOSS
    return BACKWARD if tensor.role in GRADIENTS else STORED


def _have_gradients(record: Record) -> bool:
    return any(role in GRADIENTS for role, _ in record.tensors)


def _when(tensor: TensorRecord) -> tuple[int, int]:
    return tensor.first_nonfinite or (0, 0)


def _in_every_step(tensor: TensorRecord) -> bool:
    return tensor.nonfinite_steps == tensor.steps >= STEPS
