"""residual-swamped: a stream that is too large for what layers add to it."""

from collections.abc import Iterator

from ..._dtypes import dtype_name
from ..._finding import Finding
from ..._words import confidence_of, percent
from ...record._record import Record
from .._kind import FindingKind, register_finding

FEWEST = 256
# Rounding a sum is right on average while what is added is larger than half a spacing; where half is gone it is not.
WARNING = 0.5
ERROR = 0.1


@register_finding
class ResidualSwamped(FindingKind):
    """What a layer adds to a residual stream is smaller than half the spacing of the stream's numbers, and is lost."""

    code = "residual-swamped"
    cure = (
        "keep the residual stream in float32 (float32 embeddings under autocast, x.float() before the first layer), or "
        "normalize it before it grows"
    )
    worst = "-realised"
    explained_by = ("dtype-not-asked",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, residual in record.residuals.items():
            change = residual.change
            realised = change.realised_share
            if realised is None or change.seen < FEWEST or not realised < WARNING:
                continue
            yield self.found(
                name,
                "error" if realised < ERROR else "warning",
                confidence_of(change.seen, FEWEST),
                f"{percent(min(1.0, 1 - realised))} of what it adds to the residual stream is lost in "
                f"{dtype_name(residual.dtype)}: it adds {residual.added:.3g} to numbers of {residual.stream:.3g}",
                lost=change.lost_share,
                realised=realised,
                added=residual.added,
                stream=residual.stream,
                seen=change.seen,
                dtype=dtype_name(residual.dtype),
            )
