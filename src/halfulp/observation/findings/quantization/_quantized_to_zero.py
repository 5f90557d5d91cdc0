"""quantized-to-zero: a quantizer whose output is all zeros."""

from collections.abc import Iterator

from ..._dtypes import dtype_name
from ..._finding import Finding
from ..._words import confidence_of
from ...auditing._audit import Audit
from ...auditing._damage import zeroed_tensors
from ...auditing._symptom import as_findings
from ...record._record import Record, TensorRecord
from .._kind import FindingKind, register_finding
from .._range_use import tensors


@register_finding
class QuantizedToZero(FindingKind):
    """A quantizer makes zeros of everything: its scale is too large, or its format too coarse."""

    code = "quantized-to-zero"
    cure = (
        "take the scale from the data (largest magnitude over the format's largest number): hu.quantize with "
        "a block format, or hu.scalify"
    )
    role = "activation"
    worst = "elements"
    explained_by = ("activation-underflow", "dtype-not-asked")

    def in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in tensors(record, "activation"):
            entered = tensor.input_amax
            if not _quantizes(tensor) or not tensor.elements or tensor.zeros < tensor.elements or not entered:
                continue
            yield self.found(
                tensor.name,
                "error",
                confidence_of(tensor.elements, 8),
                f"all {tensor.elements} outputs in {dtype_name(tensor.dtype)} are 0, of inputs up to {entered:.3g}",
                elements=tensor.elements,
                input_amax=entered,
                steps=tensor.steps,
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, zeroed_tensors(audit))


def _quantizes(tensor: TensorRecord) -> bool:
    """Return whether zeros are the work of a quantizer, and not of a ReLU, a mask or a zero weight."""
    return tensor.dtype.itemsize == 1 or "quant" in tensor.kind.lower()
