"""site-holds-scale: one tensor's gradient holds the loss scale of all down."""

import math
from collections.abc import Iterator

from ....formats import Format
from ..._finding import Finding
from ..._words import confidence_of, percent
from ...record._record import Record, TensorRecord
from .._kind import FindingKind, register_finding
from .._range_use import loss_is_scaled, margin, nonzero, storage_format, subnormal_share, tensors, vanished_share

# A dynamic scale is the largest at which nothing overflows. What is this near to the largest number stops it, by itself
# or in a weight gradient, which is its sum over a batch.
HOLDS = 6.0
# Everything else could take a scale larger by as many powers of two.
APART = 6.0
# Harm done, which a larger scale would save of another tensor.
VANISHED = 0.05
SUBNORMAL = 0.5


@register_finding
class SiteHoldsScale(FindingKind):
    """One layer's gradient is so much larger than all others that their loss scale is too small for them."""

    code = "site-holds-scale"
    cure = "hu.AdaptiveGradScaler, which gives each layer its own scale, or compute this layer in float32"
    role = "activation gradient"
    explained_by = ("first-nonfinite",)
    spreads = True

    def in_record(self, record: Record) -> Iterator[Finding]:
        if not loss_is_scaled(record) or record.sites:
            return
        room = [(tensor, held_in) for tensor in tensors(record, "activation gradient") if (held_in := _narrow(tensor))]
        if len(room) < 3:
            return
        room.sort(key=lambda pair: margin(*pair))
        gap = _largest_gap(room)
        holding, others = room[:gap], room[gap:]
        if not holding or margin(*holding[0]) > HOLDS:
            return
        vanished = max(vanished_share(*pair) for pair in others)
        subnormal = max(subnormal_share(*pair) for pair in others)
        apart = margin(*others[0]) - margin(*holding[-1])
        if apart < APART or (vanished < VANISHED and subnormal < SUBNORMAL):
            return
        yield self.found(
            [tensor.name for tensor, _ in holding],
            "warning",
            confidence_of(min(nonzero(tensor) for tensor, _ in room), 32),
            f"gradients 2^{math.floor(apart)} times the next; at the scale that it allows {percent(subnormal)} "
            "of another layer's are subnormal",
            margin=margin(*holding[0]),
            apart=apart,
            vanished=vanished,
            subnormal=subnormal,
        )


def _narrow(tensor: TensorRecord) -> Format | None:
    """Return the format of a gradient that a loss scale is there for, None where it has none or float32's range."""
    held_in = storage_format(tensor)
    return held_in if held_in is not None and held_in.emin > -100 and tensor.amax > 0 else None


def _largest_gap(room: list[tuple[TensorRecord, Format]]) -> int:
    """Return how many of the tensors, nearest to overflow first, lie before the widest gap in their nearer half.

    A large gradient goes on to the layers before it until one makes it small, so that several may be as large.
    """
    margins = [margin(*pair) for pair in room]
    return max(range(1, len(room) // 2 + 1), key=lambda i: margins[i] - margins[i - 1])
