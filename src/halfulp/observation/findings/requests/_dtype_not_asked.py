"""dtype-not-asked: a precision that was asked for, and another that is there."""

from collections.abc import Iterator

from ..._finding import Finding
from ...record._record import Record
from .._kind import FindingKind, register_finding


@register_finding
class DtypeNotAsked(FindingKind):
    """Tensors have another dtype or format than was asked for."""

    code = "dtype-not-asked"
    cure = (
        "set the dtype where it is used (model.to, torch.autocast) and look again: a device, a filter or a "
        "wrapper may turn a request off without a word; hu.convert raises where a recipe cannot be had"
    )

    def in_record(self, record: Record) -> Iterator[Finding]:
        for asked in record.expectations:
            if asked.source == "contract" or not asked.other:
                continue
            there = ", ".join(dict.fromkeys(asked.other.values()))
            yield self.found(
                tuple(asked.other),
                "error",
                1.0,
                f"{asked.asked} was asked for ({asked.source}); {len(asked.other)} have {there}",
                asked=asked.asked,
                there=there,
                other=len(asked.other),
                matched=len(asked.matched),
                pattern=asked.pattern,
            )
