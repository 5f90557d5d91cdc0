"""Reports of a scaler's steps and sites: LastStep and SiteTable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .._messages import align_columns
from ._site import Site


@dataclasses.dataclass(frozen=True)
class LastStep:
    """The outcome of the last ``scaler.step(optimizer)``.

    Attributes:
        applied: Whether the optimizer stepped.
        reason: Why it did not, in words; empty where it did.
        overflow_sources: The sites that overflowed, each with the exponent that it had.
    """

    applied: bool
    reason: str = ""
    overflow_sources: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return "applied" if self.applied else f"skipped: {self.reason}"


_GRADIENT_KINDS = ("received", "passed", "weight")


@dataclasses.dataclass(frozen=True)
class SiteRow:
    """The last measurement of one site.

    Attributes:
        site: Its key.
        exponent: Gradients there are stored as 2^exponent times the true ones.
        amax: Largest true gradient by kind: what arrives, what its product passes on, and its parameters'.
        zero, subnormal: Share of elements that are stored as zero and as subnormals, all kinds together.
        elements: How many elements were looked at.
        format: The narrow format that stores them; None where none does.
        overflows: How often this site's overflow made a step be skipped.
        merged: Why it follows the global exponent; None where it has its own.
    """

    site: str
    exponent: int
    amax: dict[str, float | None]
    zero: float | None
    subnormal: float | None
    elements: int
    format: str | None
    overflows: int
    merged: str | None

    @classmethod
    def from_site(cls, site: Site) -> SiteRow:
        """Return the row of a site."""
        readings = site.readings
        elements = sum(reading.element_count for reading in readings.values())

        def average(field: str) -> float | None:
            total = sum(getattr(one, field) * one.element_count for one in readings.values())
            return total / elements if elements else None

        return cls(
            site=site.key,
            exponent=site.exponent,
            amax={
                kind: readings[kind].amax if kind in readings and readings[kind].is_finite else None
                for kind in _GRADIENT_KINDS
            },
            zero=average("zero_share"),
            subnormal=average("subnormal_share"),
            elements=elements,
            format=site.format.name if site.format else None,
            overflows=site.overflow_count,
            merged=site.merge_reason,
        )


@dataclasses.dataclass(frozen=True)
class SiteTable:
    """Sites of a scaler; ``print`` it for a table.

    Attributes:
        rows: In the order of their first use, the global one first.
    """

    rows: tuple[SiteRow, ...]

    def __getitem__(self, key: str) -> SiteRow:
        """Return a site's row by its key; ValueError where there is none."""
        for row in self.rows:
            if row.site == key:
                return row
        raise ValueError(f"no site {key!r}; the sites are {', '.join(row.site for row in self.rows)}")

    def __iter__(self) -> Iterator[SiteRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data that JSON can hold."""
        return {"sites": [dataclasses.asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [
            {
                "site": row.site,
                "exponent": "global" if row.merged else str(row.exponent),
                **{f"amax {kind}": "–" if amax is None else f"{amax:.2g}" for kind, amax in row.amax.items()},
                "zero": "–" if row.zero is None else f"{row.zero:.2%}",
                "subnormal": "–" if row.subnormal is None else f"{row.subnormal:.2%}",
                "format": row.format or "wide",
                "overflows": str(row.overflows or ""),
            }
            for row in self.rows
        ]
        rows = [list(lines[0]), *(list(line.values()) for line in lines)]
        rows.insert(1, ["─" * max(map(len, column)) for column in zip(*rows)])
        return "\n".join(align_columns(rows))
