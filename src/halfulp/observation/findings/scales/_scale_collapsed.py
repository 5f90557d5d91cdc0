"""scale-collapsed: a loss scale that fell until it scales nothing up."""

from collections.abc import Iterator

from ..._finding import Finding
from ..._words import confidence_of, percent
from ...record._record import Record
from .._kind import FindingKind, register_finding

# A loss scale is there to make gradients larger. Below 1 it makes them smaller than they are.
SCALE = 1.0
# float32 underflows 166 halvings after 2^16, and the scale is exactly 0; 2^-24 is float16's smallest number.
GONE = 2.0**-24


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

    def in_record(self, record: Record) -> Iterator[Finding]:
        read = [*(step.loss_scale for step in record.history), record.loss_scale]
        scales = [scale for scale in read if scale is not None]
        if not scales or not min(scales) < SCALE:
            return
        lowest, steps = min(scales), len(record.history)
        share = record.skipped / max(1, steps + record.skipped)
        start = f"from {max(scales):.4g} " if max(scales) > lowest else ""
        yield self.found(
            (),
            "error" if lowest < GONE or scales[-1] < SCALE else "warning",
            max(0.5, confidence_of(record.skipped, 4)),
            f"the loss scale fell {start}to {lowest:.4g}, with {percent(share)} of steps skipped",
            lowest=lowest,
            last=scales[-1],
            highest=max(scales),
            skipped=record.skipped,
        )
