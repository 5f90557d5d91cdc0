"""loss-cancels: a loss whose changes are smaller than the spacing of its dtype."""

import math
from collections.abc import Iterator

from ..._dtypes import dtype_name
from ..._finding import Finding
from ..._words import confidence_of
from ...record._record import Record
from .._kind import FindingKind, register_finding

# Where neighbouring numbers are as far apart as the loss changes from step to step, half of its changes are not seen.
GAP = 1.0
FEWEST = 4


@register_finding
class LossCancels(FindingKind):
    """The loss is rounded more coarsely than it changes: large terms cancel, or its dtype is too narrow."""

    code = "loss-cancels"
    cure = (
        "compute the loss in float32 (logits.float()), and as a mean of small terms instead of a difference "
        "of large ones"
    )
    wide_cure = "compute the loss as a mean of small terms instead of a difference of large ones, or in float64"
    explained_by = ("dtype-not-asked",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        losses, gap = sum(step.loss is not None for step in record.history), record.loss_gap
        if gap is None or losses < FEWEST or not gap >= GAP:
            return
        dtype = dtype_name(record.loss_dtype)
        often = f"are {gap:.3g} times as far apart as the loss changes from step to step"
        said = f"neighbouring losses in {dtype} " + (
            often if math.isfinite(gap) else "are so far apart that the loss stands still"
        )
        sure, cure = confidence_of(losses, FEWEST), self.cure_in(record.loss_dtype)
        yield self.found((), "warning", sure, said, cure=cure, gap=gap, dtype=dtype, losses=losses)
