"""payload-saturated: stored numbers that were cut off at the format's largest."""

from collections.abc import Iterator

from .... import formats
from ..._finding import Finding
from ..._words import confidence_of, percent
from ...auditing._audit import Audit
from ...auditing._damage import saturated_payloads
from ...auditing._symptom import as_findings
from ...record._record import Record, TensorRecord
from .._kind import FindingKind, register_finding
from .._range_use import has_wide_range, storage_format

# A scale taken from the largest magnitude puts one element of each tensor there, and its near neighbours.
FEWEST = 8
WARNING = 0.001
# The largest elements carry most of a product: with a hundredth of them cut off the layer computes something else.
ERROR = 0.01
QUANTIZED = (
    "scale this tensor before it is rounded (hu.scalify gives every tensor a scale), or round it to mxfp8_e4m3, "
)
QUANTIZED += "whose blocks have scales, or to e5m2"


@register_finding
class PayloadSaturated(FindingKind):
    """Elements sit at the format's largest number: the scale is out of date or too small, and they were cut off."""

    code = "payload-saturated"
    cure = "a larger scale: hu.rescale(tensor) or current instead of delayed scaling, or e5m2 for this tensor"
    says = "{place} [is|are] cut off at {format}'s largest number: {saturated:share} of [its|their] {role}"
    worst = "saturated"
    explained_by = ("dtype-not-asked",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in record.tensors.values():
            yield from self._quantized(tensor)
            held_in = storage_format(tensor)
            if held_in is None or has_wide_range(held_in) or not tensor.elements:
                continue
            count = _cut_off(tensor)
            share = count / tensor.elements
            if count < FEWEST or share < WARNING:
                continue
            yield self.found(
                tensor.name,
                "error" if share >= ERROR else "warning",
                confidence_of(count, FEWEST),
                f"{percent(share)} of {tensor.role} elements are at {held_in.name}'s largest number, {held_in.max:.6g}",
                saturated=share,
                count=count,
                role=tensor.role,
                format=held_in.name,
                scale=tensor.scale,
            )

    def _quantized(self, tensor: TensorRecord) -> Iterator[Finding]:
        """Find it in what the run rounds to a narrower format afterwards; blocks take a scale from their elements."""
        asked = tensor.asked_format or ""
        counts = tensor.formats.get(asked)
        if counts is None or asked in tensor.block_hidden or not counts.elements:
            return
        share = counts.overflow / counts.elements
        if counts.overflow < FEWEST or share < WARNING:
            return
        largest = formats.get(asked).max
        yield self.found(
            tensor.name,
            "error" if share >= ERROR else "warning",
            confidence_of(counts.overflow, FEWEST),
            f"{percent(share)} of {tensor.role} elements are beyond {asked}'s largest number, "
            f"{largest:.6g}, and reach {tensor.amax:.4g}",
            cure=QUANTIZED,
            saturated=share,
            count=counts.overflow,
            role=tensor.role,
            format=tensor.asked_format,
            scale=tensor.scale,
        )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, saturated_payloads(audit))


def _cut_off(tensor: TensorRecord) -> int:
    """Return how many elements are at the largest number, but for the one per step that a scale puts there."""
    return tensor.largest - tensor.steps
