"""SiteTable: what is known of every site, as text and as plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from ._site import Reading, Site, Sites

_KINDS = ("received", "passed", "weight")


@dataclasses.dataclass(frozen=True)
class SiteRow:
    """One site as it was last measured.

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
    def of(cls, site: Site) -> SiteRow:
        """What a site holds."""
        readings = site.readings
        return cls(
            site=site.key,
            exponent=site.exponent,
            amax={kind: _finite(readings[kind].amax) if kind in readings else None for kind in _KINDS},
            zero=_share(readings, "zero"),
            subnormal=_share(readings, "subnormal"),
            elements=sum(reading.elements for reading in readings.values()),
            format=site.format and site.format.name,
            overflows=site.overflows,
            merged=site.merged,
        )


@dataclasses.dataclass(frozen=True)
class SiteTable:
    """Every site of a scaler; ``print`` it for a table.

    Attributes:
        rows: In the order of their first use, the global one first.
    """

    rows: tuple[SiteRow, ...]

    @classmethod
    def of(cls, sites: Sites) -> SiteTable:
        """The table of all sites."""
        return cls(tuple(SiteRow.of(site) for site in sites))

    def __getitem__(self, key: str) -> SiteRow:
        """The row of a site by its key; ValueError where there is none."""
        for row in self.rows:
            if row.site == key:
                return row
        raise ValueError(f"no site {key!r}; the sites are {', '.join(row.site for row in self.rows)}")

    def __iter__(self) -> Iterator[SiteRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {"sites": [dataclasses.asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [_cells(row) for row in self.rows]
        headers = list(lines[0])
        widths = [max(len(header), *(len(line[header]) for line in lines)) for header in headers]
        table = [dict(zip(headers, headers)), dict(zip(headers, ("─" * width for width in widths))), *lines]
        return "\n".join("  ".join(line[h].ljust(w) for h, w in zip(headers, widths)).rstrip() for line in table)


def _cells(row: SiteRow) -> dict[str, str]:
    amax = {f"amax {kind}": "–" if value is None else f"{value:.2g}" for kind, value in row.amax.items()}
    return {
        "site": row.site,
        "exponent": "global" if row.merged else str(row.exponent),
        **amax,
        "zero": _percent(row.zero),
        "subnormal": _percent(row.subnormal),
        "format": row.format or "wide",
        "overflows": str(row.overflows or ""),
    }


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}%"


def _share(readings: dict[str, Reading], field: str) -> float | None:
    total = sum(reading.elements for reading in readings.values())
    return sum(getattr(one, field) * one.elements for one in readings.values()) / total if total else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
