"""Reports of a scaler's steps and sites: LastStep and SiteTable."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterator
from typing import Any

from ..formats import get
from ._site import Site, Sites


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

    @property
    def underflow(self) -> float | None:
        """Share of elements that are stored as zero or as subnormals; None of what no narrow format stores."""
        if self.format is None or self.zero is None or self.subnormal is None:
            return None
        return self.zero + self.subnormal

    @property
    def margin(self) -> float | None:
        """The powers of two by which the largest stored gradient could grow until it overflows the format.

        None of what no narrow format stores, and of zeros.
        """
        largest = max((value for value in self.amax.values() if value), default=None)
        if self.format is None or largest is None:
            return None
        return math.log2(get(self.format).max) - math.log2(largest) - self.exponent

    @classmethod
    def from_site(cls, site: Site) -> SiteRow:
        """Return the row of a site."""
        readings = site.readings
        elements = sum(reading.elements for reading in readings.values())

        def average(field: str) -> float | None:
            total = sum(getattr(one, field) * one.elements for one in readings.values())
            return total / elements if elements else None

        return cls(
            site=site.key,
            exponent=site.exponent,
            amax={
                kind: readings[kind].amax if kind in readings and readings[kind].is_finite else None
                for kind in _GRADIENT_KINDS
            },
            zero=average("zero"),
            subnormal=average("subnormal"),
            elements=elements,
            format=site.format.name if site.format else None,
            overflows=site.overflows,
            merged=site.merged,
        )


@dataclasses.dataclass(frozen=True)
class SiteTable:
    """Sites of a scaler; ``print`` it for a table.

    Attributes:
        rows: In the order of their first use, the global one first, or as they were sorted.
        total: How many sites the scaler has.
    """

    rows: tuple[SiteRow, ...]
    total: int = 0

    @classmethod
    def from_sites(cls, sites: Sites, pattern: str | None, sort: str | None) -> SiteTable:
        """Return the table of the sites that are asked for; see `AdaptiveGradScaler.sites`."""
        if sort is not None and sort not in _SORT_KEYS:
            raise ValueError(f"sort is {', '.join(map(repr, _SORT_KEYS))} or None, got {sort!r}")
        chosen = list(sites)
        if pattern is not None:
            # The key of a site, of its module, or of the layer that it calls.
            patterns = [pattern + rest for rest in ("", ".*", "#*")]
            chosen = [site for site in sites if any(fnmatch.fnmatchcase(site.key, one) for one in patterns)]
        rows = [SiteRow.from_site(site) for site in chosen]
        if sort is not None:
            rows.sort(key=_SORT_KEYS[sort])
        return cls(tuple(rows), len(sites))

    def __getitem__(self, key: str | int | slice) -> Any:
        """Return a site's row by its key or position, or a table of several; ValueError where there is none."""
        if isinstance(key, slice):
            return dataclasses.replace(self, rows=self.rows[key])
        if isinstance(key, int):
            return self.rows[key]
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
        if not self.rows:
            return f"none of {self.total} sites"
        lines = [_format_row_cells(row) for row in self.rows]
        headers = list(lines[0])
        widths = [max(len(header), *(len(line[header]) for line in lines)) for header in headers]
        table = [dict(zip(headers, headers)), dict(zip(headers, ("─" * width for width in widths))), *lines]
        text = "\n".join("  ".join(line[h].ljust(w) for h, w in zip(headers, widths)).rstrip() for line in table)
        return text if len(self) >= self.total else f"{text}\n({len(self)} of {self.total} sites)"


def _make_sort_key(field: str, sign: int) -> Callable[[SiteRow], tuple[bool, float]]:
    """Return a sort key by which the worst rows come first, and rows without measurements last."""

    def key(row: SiteRow) -> tuple[bool, float]:
        found = getattr(row, field)
        return found is None, sign * (found or 0)

    return key


_SORT_KEYS: dict[str, Callable[[SiteRow], Any]] = {
    "underflow": _make_sort_key("underflow", -1),
    "margin": _make_sort_key("margin", 1),
    "overflows": _make_sort_key("overflows", -1),
    "exponent": _make_sort_key("exponent", 1),
    "site": lambda row: row.site,
}


def _format_row_cells(row: SiteRow) -> dict[str, str]:
    amax = {f"amax {kind}": "–" if value is None else f"{value:.2g}" for kind, value in row.amax.items()}
    return {
        "site": row.site,
        "exponent": "global" if row.merged else str(row.exponent),
        **amax,
        "zero": _format_percent(row.zero),
        "subnormal": _format_percent(row.subnormal),
        "margin": "–" if row.margin is None else f"{row.margin:.1f}",
        "format": row.format or "wide",
        "overflows": str(row.overflows or ""),
    }


def _format_percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}%"
