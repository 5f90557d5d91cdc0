"""accumulation-swamped: gradients of micro-batches that a narrow sum no longer takes."""

from collections.abc import Iterator

from ..._dtypes import dtype_name
from ..._finding import Finding
from ..._words import confidence_of, percent
from ...record._record import Record
from .._kind import FindingKind, register_finding

FEWEST = 32
# What rounding takes of a sum of a few gradients is below a hundredth; a tenth of the batch is a smaller batch.
WARNING = 0.9
ERROR = 0.5


@register_finding
class AccumulationSwamped(FindingKind):
    """Gradients that are added to a sum in a narrow type are smaller than half its spacing, and are dropped."""

    code = "accumulation-swamped"
    cure = "accumulate in float32: hu.float32_gradients(model), or float32 parameters under autocast"
    write = "import halfulp as hu\nhu.float32_gradients(model)  # before the first backward"
    role = "weight gradient"

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            sums = parameter.accumulation
            realised = None if sums is None else sums.realised_share
            if sums is None or realised is None or sums.seen < FEWEST or not realised < WARNING:
                continue
            dtype = dtype_name(parameter.gradient_dtype or parameter.dtype)
            yield self.found(
                name,
                "error" if realised < ERROR else "warning",
                confidence_of(sums.seen, FEWEST),
                f"{percent(1 - realised)} of what is added to .grad is lost in {dtype}",
                lost=sums.lost_share,
                realised=realised,
                seen=sums.seen,
                dtype=dtype,
            )
