"""overflow-near: numbers within two powers of two of a format's largest."""

from collections.abc import Iterator

from ..._finding import Finding
from ..._words import confidence_of
from ...record._record import Record
from .._kind import FindingKind, register_finding
from .._range_use import has_wide_range, loss_is_scaled, margin, storage_format, tensors, unscaled

# From step to step and from batch to batch the largest of a tensor's elements varies by a factor of two and more.
BINADES = 2.0


@register_finding
class OverflowNear(FindingKind):
    """The largest magnitude is within a factor of four of the largest number that the format holds."""

    code = "overflow-near"
    cure = (
        "compute this layer in bfloat16 or float32, or divide its inputs by a power of two; hu.scalify gives "
        "every tensor a scale"
    )
    says = "{place} [comes|come] near overflow: {role} of {amax} in {format}"
    wide_cure = "divide its inputs by a power of two, or bound what it multiplies, sums or exponentiates"
    worst = "-margin"
    explained_by = ("dtype-not-asked", "payload-saturated", "first-nonfinite")

    def in_record(self, record: Record) -> Iterator[Finding]:
        gradients = () if loss_is_scaled(record) else ("activation gradient", "weight gradient")
        for tensor in tensors(record, "activation", "weight", *gradients):
            held_in = storage_format(tensor)
            # What is stored in 8 bits has a scale that fills the range on purpose, also where nothing tells it.
            if held_in is None or tensor.dtype.itemsize < 2 or not unscaled(tensor):
                continue
            # A mask is filled with the lowest number of such a range: torch.finfo(dtype).min.
            if has_wide_range(held_in) and tensor.amax == held_in.max:
                continue
            left = margin(tensor, held_in)
            if not left < BINADES:
                continue
            yield self.found(
                tensor.name,
                "warning",
                max(0.5, confidence_of(tensor.steps, 2)),
                f"{tensor.role} reaches {tensor.amax:.4g} in {held_in.name}, {left:.2g} powers of two below its "
                "largest",
                cure=self.wide_cure if has_wide_range(held_in) else self.cure,
                role=tensor.role,
                amax=tensor.amax,
                margin=left,
                format=held_in.name,
                steps=tensor.steps,
            )
