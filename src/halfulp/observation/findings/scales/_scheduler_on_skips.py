"""scheduler-on-skips: a learning-rate schedule that goes on while the scaler skips steps."""

from collections.abc import Iterator

from ..._finding import Finding
from ..._words import confidence_of, percent
from ...record._record import Record
from .._kind import FindingKind, register_finding

# Until its first scale fits, a scaler skips one to three steps of every run.
USUAL = 3
# A schedule that is a hundredth ahead of its steps changes no result.
SHARE = 0.01


@register_finding
class SchedulerOnSkips(FindingKind):
    """The scheduler advances on steps that the gradient scaler skipped, so that it ends before the training does."""

    code = "scheduler-on-skips"
    cure = (
        "step the scheduler only after a step was taken: compare scaler.get_scale() before and after scaler.update(), "
        "or ask hu.AdaptiveGradScaler's scaler.last_step.applied"
    )
    explained_by = ("scale-collapsed", "site-holds-scale", "first-nonfinite")

    def in_record(self, record: Record) -> Iterator[Finding]:
        scheduled = sum(step.scheduled for step in record.history if step.scheduled is not None)
        if not record.skipped or not scheduled or not record.history:
            return
        taken = record.history[-1].step + 1
        ahead = scheduled - taken
        # One step more than was taken is what the constructor of a scheduler makes.
        if ahead <= 1 or ahead < record.skipped - USUAL:
            return
        share = record.skipped / (taken + record.skipped)
        yield self.found(
            (),
            "warning" if record.skipped > USUAL and share >= SHARE else "note",
            confidence_of(record.skipped, 1),
            f"the scheduler made {scheduled} steps and the optimizer {taken}: {record.skipped} were skipped "
            f"({percent(share)})",
            scheduled=scheduled,
            taken=taken,
            skipped=record.skipped,
        )
