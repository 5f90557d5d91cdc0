"""average-stuck: a running average that stands still."""

from collections.abc import Iterator

from ..._dtypes import dtype_name, is_wide
from ..._finding import Finding
from ..._words import confidence_of, percent
from ...auditing._audit import Audit
from ...auditing._movement import stuck_averages
from ...auditing._symptom import as_findings
from ...record._record import Record
from .._kind import FindingKind, register_finding

FEWEST = 16
# An average that takes half of its changes lags behind; one that takes a tenth stays where it began.
WARNING = 0.5
ERROR = 0.1


@register_finding
class AverageStuck(FindingKind):
    """A running average, as of an EMA or a normalization, loses its changes to rounding and stays where it was."""

    code = "average-stuck"
    cure = "keep the average in float32, or use hu.optim.EMA, whose weight_update keeps what rounding would lose"
    says = "the average {place} stands still: {lost:share} of its changes are lost in {dtype}"
    wide_cure = "a step that keeps less of the average, or an average in float64"
    worst = "lost"
    explained_by = ("dtype-not-asked", "dtype-changed-on-resume")

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, average in record.averages.items():
            change = average.change
            realised = change.realised_share
            if change.seen < FEWEST or realised is None or not realised < WARNING:
                continue
            retention = "" if average.retention is None else f", of which a step keeps {average.retention:.6g}"
            yield self.found(
                name,
                "note" if is_wide(average.dtype) else "error" if realised < ERROR else "warning",
                confidence_of(change.seen, FEWEST),
                f"{percent(change.lost_share)} of changes lost in {dtype_name(average.dtype)}{retention}",
                cure=self.cure_in(average.dtype),
                lost=change.lost_share,
                realised=realised,
                seen=change.seen,
                retention=average.retention,
                dtype=dtype_name(average.dtype),
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, stuck_averages(audit))
