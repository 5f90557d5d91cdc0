"""block-hidden: the largest element of a block makes zeros of the rest."""

from collections.abc import Iterator

from ..._finding import Finding
from ..._words import confidence_of, percent
from ...record._record import Record
from .._kind import FindingKind, register_finding
from .._range_use import nonzero

FEWEST = 64
# Of normally distributed numbers 4-bit blocks hide up to 12%; twice that is one large element in most blocks.
WARNING = 0.25
ERROR = 0.5


@register_finding
class BlockHidden(FindingKind):
    """One element of a block is so much larger that the scale it sets sends the others to zero."""

    code = "block-hidden"
    cure = (
        "a format with smaller blocks (nvfp4 for mxfp4) or more exponent bits (mxfp8_e5m2), or leave this "
        "layer out of emulation"
    )
    worst = "hidden"
    explained_by = ("quantized-to-zero",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in record.tensors.values():
            count = nonzero(tensor)
            hidden = tensor.block_hidden.get(tensor.asked_format or "")
            if hidden is None or count < FEWEST:
                continue
            share = min(1.0, hidden / count)
            if share < WARNING:
                continue
            yield self.found(
                tensor.name,
                "error" if share >= ERROR else "warning",
                confidence_of(count, FEWEST),
                f"{percent(share)} of nonzero elements of {tensor.role} become 0 beside their block's largest in "
                f"{tensor.asked_format}",
                hidden=share,
                role=tensor.role,
                format=tensor.asked_format,
                seen=count,
            )
