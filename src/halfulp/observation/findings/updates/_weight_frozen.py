"""weight-frozen: a weight that is stepped and has not moved."""

from collections.abc import Iterator

from ..._code import KAHAN, optimizer_code
from ..._dtypes import dtype_name, is_wide, precision
from ..._finding import Finding
from ..._lost_movement import keeps_the_rest
from ..._words import at_lr, confidence_of, number
from ...auditing._audit import Audit
from ...auditing._movement import frozen_weights
from ...auditing._symptom import as_findings
from ...record._record import ParameterRecord, Record
from .._kind import FindingKind, register_finding

# A smaller sample, as of a scalar, may stand still by chance for some steps.
FEWEST = 8
# Rows of an embedding that no batch has stand still in health.
DENSE = 0.5
# An element at a power of two may go down and come back: so rare, movement is no sign of somebody who writes.
MOSTLY_LOST = 0.9
FEWEST_MOVES = 16
ROUNDED = "keep it in float32, or step it with weight_update='kahan' of hu.optim"
WRITTEN_BACK = (
    "find what writes its old value back after each step (copy_, load_state_dict, a weight made anew in forward); "
    "hu.optim's weight updates need a parameter that stays"
)


@register_finding
class WeightFrozen(FindingKind):
    """A weight that the optimizer steps, with gradients that are not zero, still holds its first bits."""

    code = "weight-frozen"
    cure = ROUNDED
    says = "{place} [has|have] not moved in {sampled_steps} sampled steps: {dtype} weights{at_lr}"
    write = optimizer_code(None, {}, KAHAN)
    role = "update"
    wide_cure = "nothing, if it is at rest; else a larger learning rate, or float64"
    worst = "lost"
    explained_by = ("updates-lost", "never-stepped", "scale-collapsed", "first-nonfinite")

    def in_record(self, record: Record) -> Iterator[Finding]:
        steps = len(record.sampled_steps)
        for name, parameter in record.parameters.items():
            update = parameter.update
            if parameter.optimizer is None or parameter.moved != 0 or steps < 2:
                continue
            if number(parameter.options, "lr") == 0 or not parameter.nonzero_gradients or update.seen < FEWEST:
                continue
            rounded, moves = update.lost_share >= MOSTLY_LOST, update.seen - update.cancelled
            if not rounded and (moves < FEWEST_MOVES or not _dense(record, parameter)):
                continue
            if keeps_the_rest(parameter) and not _due(record, parameter):
                continue
            yield self.found(
                name,
                "note" if rounded and is_wide(parameter.dtype) else "error",
                confidence_of(update.seen, 32) * confidence_of(steps, 1) * (1.0 if update.known else 0.5),
                f"has not moved in {steps} sampled steps in {dtype_name(parameter.dtype)}{at_lr(parameter.options)}"
                + ("" if rounded else ", though updates changed it"),
                cure=self.cure_in(parameter.dtype) if rounded else WRITTEN_BACK,
                says=self.says if rounded else "",
                write=optimizer_code(parameter.optimizer, parameter.options, KAHAN) if rounded else "",
                moved=0.0,
                sampled_steps=steps,
                seen=update.seen,
                lost=update.lost_share,
                dtype=dtype_name(parameter.dtype),
                lr=number(parameter.options, "lr"),
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, frozen_weights(audit))


def _due(record: Record, parameter: ParameterRecord) -> bool:
    """Return whether updates that are kept until they show add up to more than the largest weight's spacing."""
    update, weight = record.tensors.get(("update", parameter.name)), record.tensors.get(("weight", parameter.name))
    digits = precision(parameter.dtype)
    if not parameter.update.known or update is None or weight is None or digits is None or is_wide(parameter.dtype):
        return False
    steps = record.history[-1].step + 1 if record.history else 0
    return steps * update.amax > 2.0 ** (1 - digits) * weight.amax


def _dense(record: Record, parameter: ParameterRecord) -> bool:
    """Return whether most elements of a parameter have gradients."""
    gradient = record.tensors.get(("weight gradient", parameter.name))
    return gradient is not None and gradient.elements - gradient.zeros > DENSE * gradient.elements
