"""weight-frozen: a weight that is stepped and has not moved."""

from collections.abc import Iterator

from ..._finding import Finding
from ...record._record import Record
from .._kind import FindingKind, register_finding
from .._words import at_lr, confidence_of, dtype_name, number

# A smaller sample, as of a scalar, may stand still by chance for some steps.
FEWEST = 8


@register_finding
class WeightFrozen(FindingKind):
    """A weight that the optimizer steps, with gradients that are not zero, still holds its first bits."""

    code = "weight-frozen"
    cure = "keep it in float32, or step it with weight_update='kahan' of hu.optim"
    explained_by = ("updates-lost", "never-stepped", "scale-collapsed", "first-nonfinite")

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            update, steps = parameter.update, len(record.sampled_steps)
            if parameter.optimizer is None or parameter.moved != 0 or steps < 2:
                continue
            if number(parameter.options, "lr") == 0 or not parameter.nonzero_gradients:
                continue
            if update.seen < FEWEST or update.cancelled < update.seen:
                continue
            yield self.found(
                name,
                "error",
                confidence_of(update.seen, 32) * confidence_of(steps, 1) * (1.0 if update.known else 0.5),
                f"has not moved in {steps} sampled steps in {dtype_name(parameter.dtype)}{at_lr(parameter.options)}",
                moved=0.0,
                sampled_steps=steps,
                seen=update.seen,
                dtype=dtype_name(parameter.dtype),
            )
