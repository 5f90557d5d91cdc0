"""Findings about loss scales and gradient exponents: collapsed, held down, out of step with a schedule."""

import math
from collections.abc import Iterator
from typing import Any

from .._finding import Finding, Severity
from .._record import Record
from .._text import compute_confidence, format_percent
from ._kind import FindingKind, register_finding
from ._ranges import (
    count_nonzero,
    estimate_vanished_share,
    get_storage_format,
    has_gradient_scaler,
    list_tensor_records_of_roles,
    measure_overflow_margin,
    measure_subnormal_share,
)

# A loss scale is there to make gradients larger. Below 1 it makes them smaller than they are.
SMALLEST_USEFUL_LOSS_SCALE = 1.0
# float32 underflows 166 halvings after 2^16, and the scale is exactly 0; 2^-24 is float16's smallest number.
VANISHED_LOSS_SCALE = 2.0**-24


@register_finding
class ScaleCollapsed(FindingKind):
    """The loss scale was halved again and again, to below 1 or to 0, since gradients stayed infinite at every scale."""

    code = "scale-collapsed"
    cure = (
        "find what is infinite at every scale (first-nonfinite names it, torch.autograd.detect_anomaly the line), and "
        "stop a run whose scale falls below 1; hu.AdaptiveGradScaler names the sites that overflow in scaler.last_step"
    )
    explained_by = ("first-nonfinite", "eps-zero", "dtype-not-asked")
    spreads = True

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        read = [*(step.loss_scale for step in record.history), record.loss_scale]
        scales = [scale for scale in read if scale is not None]
        if not scales or not min(scales) < SMALLEST_USEFUL_LOSS_SCALE:
            return
        lowest, steps = min(scales), len(record.history)
        share = record.skipped / max(1, steps + record.skipped)
        start = f"from {max(scales):.4g} " if max(scales) > lowest else ""
        is_lasting = lowest < VANISHED_LOSS_SCALE or scales[-1] < SMALLEST_USEFUL_LOSS_SCALE
        severity: Severity = "error" if is_lasting else "warning"
        said = f"the loss scale fell {start}to {lowest:.4g}, with {format_percent(share)} of steps skipped"
        evidence: dict[str, Any] = {
            "lowest": lowest,
            "last": scales[-1],
            "highest": max(scales),
            "skipped": record.skipped,
        }
        yield self.found((), severity, max(0.5, compute_confidence(record.skipped, 4)), said, **evidence)


# Until its first scale fits, a scaler skips one to three steps of every run.
USUAL_SKIPPED_STEPS_AT_START = 3
# A schedule that is a hundredth ahead of its steps changes no result.
SKIPPED_STEPS_SHARE_WARNING = 0.01


@register_finding
class SchedulerOnSkips(FindingKind):
    """The scheduler advances on steps that the gradient scaler skipped, so that it ends before the training does."""

    code = "scheduler-on-skips"
    cure = (
        "step the scheduler only after a step was taken: compare scaler.get_scale() before and after scaler.update(), "
        "or ask hu.AdaptiveGradScaler's scaler.last_step.applied"
    )
    explained_by = ("scale-collapsed", "site-holds-scale", "first-nonfinite")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        scheduled = sum(step.scheduled for step in record.history if step.scheduled is not None)
        if not record.skipped or not scheduled or not record.history:
            return
        taken = record.history[-1].step + 1
        ahead = scheduled - taken
        # One step more than was taken is what the constructor of a scheduler makes.
        if ahead <= 1 or ahead < record.skipped - USUAL_SKIPPED_STEPS_AT_START:
            return
        share = record.skipped / (taken + record.skipped)
        is_unusual = record.skipped > USUAL_SKIPPED_STEPS_AT_START and share >= SKIPPED_STEPS_SHARE_WARNING
        severity: Severity = "warning" if is_unusual else "note"
        said = f"the scheduler made {scheduled} steps and the optimizer {taken}: {record.skipped} were skipped "
        said += f"({format_percent(share)})"
        evidence: dict[str, Any] = {"scheduled": scheduled, "taken": taken, "skipped": record.skipped}
        yield self.found((), severity, compute_confidence(record.skipped, 1), said, **evidence)


# A dynamic scale is the largest at which nothing overflows. What is this near to the largest number stops it, by itself
# or in a weight gradient, which is its sum over a batch.
SMALL_OVERFLOW_MARGIN_BINADES = 6.0
# Everything else could take a scale larger by as many powers of two.
LEAST_MARGIN_DIFFERENCE_BINADES = 6.0
# Harm done, which a larger scale would save of another tensor.
HARMFUL_VANISHED_SHARE = 0.05
HARMFUL_SUBNORMAL_SHARE = 0.5


@register_finding
class SiteHoldsScale(FindingKind):
    """One layer's gradient is so much larger than all others that their loss scale is too small for them."""

    code = "site-holds-scale"
    cure = "hu.AdaptiveGradScaler, which gives each layer its own scale, or compute this layer in float32"
    role = "activation gradient"
    explained_by = ("first-nonfinite",)
    spreads = True

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        if not has_gradient_scaler(record) or record.sites:
            return
        room = [
            (tensor, held_in)
            for tensor in list_tensor_records_of_roles(record, "activation gradient")
            # A loss scale is there for formats without float32's range.
            if (held_in := get_storage_format(tensor)) is not None and held_in.emin > -100 and tensor.amax > 0
        ]
        if len(room) < 3:
            return
        room.sort(key=lambda pair: measure_overflow_margin(*pair))
        # The widest gap in the half that is nearer to overflow: a large gradient goes on to the layers before it until
        # one makes it small, so that several may be as large.
        margins = [measure_overflow_margin(*pair) for pair in room]
        gap = max(range(1, len(room) // 2 + 1), key=lambda i: margins[i] - margins[i - 1])
        apart = margins[gap] - margins[gap - 1]
        vanished = max(estimate_vanished_share(*pair) for pair in room[gap:])
        subnormal = max(measure_subnormal_share(*pair) for pair in room[gap:])
        is_harmful = vanished >= HARMFUL_VANISHED_SHARE or subnormal >= HARMFUL_SUBNORMAL_SHARE
        if margins[0] <= SMALL_OVERFLOW_MARGIN_BINADES and apart >= LEAST_MARGIN_DIFFERENCE_BINADES and is_harmful:
            names = [tensor.name for tensor, _ in room[:gap]]
            sure = compute_confidence(min(count_nonzero(tensor) for tensor, _ in room), 32)
            said = f"gradients 2^{math.floor(apart)} times the next; at the scale that it allows "
            said += f"{format_percent(subnormal)} of another layer's are subnormal"
            evidence: dict[str, Any] = {
                "margin": margins[0],
                "apart": apart,
                "vanished": vanished,
                "subnormal": subnormal,
            }
            yield self.found(names, "warning", sure, said, **evidence)
