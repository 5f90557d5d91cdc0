"""accumulation-swamped: gradients of micro-batches that a narrow sum no longer takes."""

from collections.abc import Iterator

from ..._dtypes import dtype_name, is_wide
from ..._finding import Finding, Severity
from ..._words import confidence_of, percent
from ...record._record import ParameterRecord, Record
from .._kind import FindingKind, register_finding

FEWEST = 32
# What rounding takes of a sum of a few gradients is below a hundredth; a tenth of the batch is a smaller batch.
WARNING = 0.9
ERROR = 0.5
# Sums of 8 gradients of many examples in bfloat16 are off by 0.4%, of 96 by 1.2%; a fiftieth is the work of sums that
# grow until what is added to them is about their spacing.
OFF = 0.02


@register_finding
class AccumulationSwamped(FindingKind):
    """Gradients that are added to a sum in a narrow type are smaller than half its spacing, and are dropped."""

    code = "accumulation-swamped"
    cure = "accumulate in float32: hu.float32_gradients(model), or float32 parameters under autocast"
    write = "import halfulp as hu\nhu.float32_gradients(model)  # before the first backward"
    role = "weight gradient"
    wide_cure = "fewer micro-batches, or each divided by their number before its backward pass"
    worst = "error"

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            sums = parameter.accumulation
            severity = _severity(parameter)
            if sums is None or severity is None:
                continue
            held_in, realised = parameter.gradient_dtype or parameter.dtype, sums.realised_share
            dtype, off = dtype_name(held_in), parameter.accumulation_error
            assert realised is not None
            said = f"{percent(max(0.0, 1 - realised))} of what is added to .grad is lost in {dtype}"
            if realised >= WARNING and off is not None:
                said = f"sums in .grad are off by {percent(min(1.0, off))} in {dtype}"
            yield self.found(
                name,
                severity,
                confidence_of(sums.seen, FEWEST),
                said,
                cure=self.cure_in(held_in),
                lost=sums.lost_share,
                realised=realised,
                error=off,
                seen=sums.seen,
                dtype=dtype,
            )


def _severity(parameter: ParameterRecord) -> Severity | None:
    """Return how bad it is: by the share of what is added that is lost, and by how far the sums are off."""
    sums = parameter.accumulation
    realised = None if sums is None else sums.realised_share
    if sums is None or realised is None or sums.seen < FEWEST:
        return None
    if realised < WARNING:
        return "error" if realised < ERROR else "warning"
    # In float32 sums are off where they cancel: there the exact sum is small, and not the error large.
    off = parameter.accumulation_error
    return (
        "warning"
        if off is not None and off >= OFF and not is_wide(parameter.gradient_dtype or parameter.dtype)
        else None
    )
