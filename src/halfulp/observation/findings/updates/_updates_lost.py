"""updates-lost: rounding the weight cancels its updates."""

from collections.abc import Iterator

from ..._code import KAHAN, optimizer_code
from ..._dtypes import dtype_name, is_wide
from ..._finding import Finding, Severity
from ..._lost_movement import FEWEST, LITTLE_LOST, keeps_the_rest, may_be_chance, severity_of_loss
from ..._words import at_lr, confidence_of, number, percent
from ...auditing._audit import Audit
from ...auditing._movement import lost_updates
from ...auditing._symptom import as_findings
from ...record._record import ParameterRecord, Record
from .._kind import FindingKind, register_finding

# Without a computed update only the count of unchanged elements is left; half of them is more than a schedule explains.
UNKNOWN = 0.5


@register_finding
class UpdatesLost(FindingKind):
    """Updates are smaller than half the gap to the weights' neighbouring numbers: rounding puts the weights back."""

    code = "updates-lost"
    cure = "weight_update='kahan' of hu.optim, or keep these in float32"
    says = "{place} [loses|lose] {lost:share} of [its|their] updates: {dtype} weights{at_lr}"
    write = optimizer_code(None, {}, KAHAN)
    role = "update"
    wide_cure = "nothing, if these are at rest; else a larger learning rate, or float64"
    worst = "lost"
    explained_by = ("dtype-not-asked", "dtype-changed-on-resume")

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            update = parameter.update
            if parameter.optimizer is None or update.seen < FEWEST or not update.cancelled:
                continue
            severity = _severity(parameter)
            if severity is None:
                continue
            realised = update.realised_share
            said, smaller = f"{percent(update.lost_share)} of updates lost in {dtype_name(parameter.dtype)}", ""
            if realised is None:
                said = f"{percent(update.lost_share)} of elements with a gradient unchanged"
            elif realised >= LITTLE_LOST:
                smaller = f", the smaller ones, though {percent(min(1.0, realised))} of the movement took place"
            yield self.found(
                name,
                severity,
                confidence_of(update.seen, FEWEST) * (1.0 if update.known else 0.5),
                said + at_lr(parameter.options) + smaller,
                cure=self.cure_in(parameter.dtype),
                says=self.says if update.known else "",
                write=optimizer_code(parameter.optimizer, parameter.options, KAHAN),
                lost=update.lost_share,
                realised=realised,
                seen=update.seen,
                dtype=dtype_name(parameter.dtype),
                lr=number(parameter.options, "lr"),
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, lost_updates(audit))


def _severity(parameter: ParameterRecord) -> Severity | None:
    """Return how bad it is; None where stochastic rounding cancels updates and is right on average, or few are lost."""
    update = parameter.update
    if not update.known:
        if keeps_the_rest(parameter):
            return None
        lr = parameter.options.get("lr", 1.0)
        severity: Severity = "note" if is_wide(parameter.dtype) else "warning"
        return severity if lr != 0 and update.lost_share >= UNKNOWN else None
    realised = update.realised_share
    to_nearest = parameter.rounding is None and parameter.weight_update == "nearest"
    found = severity_of_loss(parameter.dtype, realised, update.lost_share if to_nearest else 0.0)
    if realised is None or parameter.rounding is None:
        return found
    # Of so many that are kept by chance, as variance tells for small probabilities, none is left in e^-16 of the cases.
    none_kept = update.cancelled == update.seen and parameter.rounding.variance < 16
    return None if none_kept or may_be_chance(update, realised, spread=3.0) else found
