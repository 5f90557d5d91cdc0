"""positions-collide: positions that were counted in a type that lacks whole numbers of their size."""

from collections.abc import Iterator

from ..._dtypes import dtype_name, precision
from ..._finding import Finding
from ...record._record import Record
from .._kind import FindingKind, register_finding


@register_finding
class PositionsCollide(FindingKind):
    """Neighbouring positions have one code: they were counted, or multiplied by frequencies, in 16 bits."""

    code = "positions-collide"
    cure = (
        "count positions in int64 and compute their angles in float32, outside of autocast; round sines and cosines "
        "alone"
    )
    explained_by = ("dtype-not-asked",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, positions in record.positions.items():
            digits = precision(positions.dtype)
            assert digits is not None
            dtype, counted = dtype_name(positions.dtype), 2**digits
            said = f"of {positions.length} positions those from {counted} on are rounded to {dtype}'s whole numbers"
            yield self.found(name, "error", 1.0, said, length=positions.length, counted=counted, dtype=dtype)
