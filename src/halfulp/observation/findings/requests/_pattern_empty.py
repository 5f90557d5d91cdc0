"""pattern-empty: a filter or a conversion that matches nothing."""

from collections.abc import Iterator

from ..._finding import Finding
from ...record._record import Record
from .._kind import FindingKind, register_finding


@register_finding
class PatternEmpty(FindingKind):
    """A pattern that was to choose modules or parameters matches none, so that nothing was done."""

    code = "pattern-empty"
    cure = (
        "take names from model.named_modules(), with * for a layer's number; the `where=` of hu.scalify and "
        "hu.multicomponent raise where nothing matches"
    )

    def in_record(self, record: Record) -> Iterator[Finding]:
        for asked in record.expectations:
            if not asked.matched:
                said = f"{asked.pattern!r} matches no name, where {asked.asked} was asked for ({asked.source})"
                yield self.found((), "error", 1.0, said, pattern=asked.pattern, asked=asked.asked, source=asked.source)
