"""Findings as cards of a page, and the words and cells that all pages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ... import __version__, formats
from ..._names import read_registered_descriptions
from ...pages import Cell, format_count, format_number, format_share, render_template
from .._finding import describe_names

PlainData = Mapping[str, Any]
TableColumns = list[tuple[str, str, Callable[[PlainData], Cell]]]
_MOST_SHOWN_NAMES = 60
# What fewer elements or steps than these show is said to rest on few.
_LEAST_CONFIDENCE_CALLED_SURE = 0.9


def make_cause_cards(data: PlainData, forecast: bool = False) -> list[dict[str, Any]]:
    """Return the cards of the causes for the template, the worst first."""
    cards = []
    for cause in data["causes"]:
        by_code: dict[str, list[PlainData]] = {cause["code"]: []}
        for k in cause["findings"]:
            by_code.setdefault(data["findings"][k]["code"], []).append(data["findings"][k])
        own, following = by_code.pop(cause["code"]), []
        for code, findings in by_code.items():  # the first in words, the others counted
            names, there = ([name for one in some for name in one["where"]] for some in (findings, own))
            following.append(
                {
                    "code": code,
                    "where": "" if set(names) <= set(there) else describe_names(names),
                    "summary": findings[0]["summary"],
                    "more": len(findings) - 1 if len({one["summary"] for one in findings}) > 1 else 0,
                    "lines": [_make_finding_line(one, forecast) for one in findings],
                }
            )
        few = min(one["confidence"] for one in own) < _LEAST_CONFIDENCE_CALLED_SURE
        sure = "of few samples" if few else ""
        lines = [_make_finding_line(one, forecast) for one in own]
        cards.append({**cause, "sure": "forecast" if forecast else sure, "lines": lines, "following": following})
    return cards


def render_page(template: str, cards: Sequence[PlainData], charts: PlainData, **words: Any) -> str:
    """Return a page of what an instrument found, as text; it refers to nothing outside itself."""
    from ..findings._kind import FINDING_KINDS  # whose package makes pages by way of audits

    # A code that a user registered has no page in the documentation.
    own = {code for code, kind in FINDING_KINDS.items() if kind.__module__.startswith("halfulp.")}
    meanings = read_registered_descriptions("finding")
    named = [code for card in cards for code in (card["code"], *(one["code"] for one in card["following"]))]
    codes = [(code, meanings.get(code, ""), code in own) for code in dict.fromkeys(named)]
    given = {"findings": cards, "codes": codes, "versions": f"halfulp {__version__}", "data": charts}
    return render_template(__package__, template, **given, **words)


_TITLE_BY_EVIDENCE_NAME = {"lost": "share lost", "realised": "movement kept", "seen": "elements sampled"}


def _make_finding_line(one: PlainData, forecast: bool) -> dict[str, Any]:
    evidence = [
        (_TITLE_BY_EVIDENCE_NAME.get(key, key.replace("_", " ")), _format_evidence(value))
        for key, value in one["evidence"].items()
    ]
    if not forecast:
        # A sample is never wholly sure.
        sure = one["confidence"]
        evidence.append(("how sure", "over 99%" if sure > 0.99 else f"{100 * sure:.0f}%"))
    shown = [name or "(model)" for name in one["where"][:_MOST_SHOWN_NAMES]]
    left = len(one["where"]) - _MOST_SHOWN_NAMES
    return {
        "where": describe_names(one["where"]),
        "summary": one["summary"],
        "names": [*shown, f"and {left} more"] if left > 0 else shown,
        "evidence": evidence,
    }


def _format_evidence(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_count(value)
    if isinstance(value, list):
        return ", ".join(map(_format_evidence, value))
    return format_number(value)


def shorten_dtype(dtype: str | None) -> str:
    """Return the short name of a dtype given by torch's.

    >>> shorten_dtype("bfloat16"), shorten_dtype("int8"), shorten_dtype(None)
    ('bf16', 'int8', '–')
    """
    if dtype is None:
        return "–"
    try:
        return formats.get(dtype).name
    except ValueError:
        return dtype


CELL_OF_UNKNOWN_VALUE = Cell("–", sort="")
TONE_BY_SEVERITY = {"error": "bad", "warning": "open", "note": "quiet"}


def make_number_cell(value: Any) -> Cell:
    """Return the cell of a number, of anything else one without."""
    return Cell(format_number(value), sort=value) if isinstance(value, int | float) else CELL_OF_UNKNOWN_VALUE


def make_count_cell(value: int, title: str = "") -> Cell:
    """Return the cell of a count."""
    return Cell(format_count(value), sort=value, title=title)


def make_share_cell(part: float | None, bar: bool = False, lost: bool = False, title: str = "") -> Cell:
    """Return the cell of a share, which may be negative; the bar of a lost one has the colour of how bad it is."""
    if part is None:
        return CELL_OF_UNKNOWN_VALUE
    said, tone = format_share(part) if part >= 0 else f"{100 * part:.3g}%", ""
    if bar and lost and part >= 0.1:
        tone = "bad" if part >= 0.5 else "open"
    return Cell(said, sort=part, bar=min(1, max(0, part)) if bar else None, tone=tone, title=title)


def make_changes_lost_cell(realised: PlainData | None, bar: bool = False) -> Cell:
    """Return the cell of the share that rounding lost of some changes, a `RealisedChanges` as plain data."""
    if realised is None or not realised["seen"]:
        return CELL_OF_UNKNOWN_VALUE
    said = f"{format_count(realised['cancelled'])} of {format_count(realised['seen'])} sampled"
    said += "" if realised["known"] else "; counted where the gradient is not zero"
    return make_share_cell(realised["lost_share"], bar, lost=True, title=said)


def make_movement_kept_cell(realised: PlainData | None) -> Cell:
    """Return the cell of the share of a wanted movement that took place, of a `RealisedChanges` as plain data."""
    if realised is None:
        return CELL_OF_UNKNOWN_VALUE
    part = realised["realised_share"]
    if not isinstance(part, int | float):
        return Cell("not known", sort="", title="the optimizer's class computes no update that could be predicted")
    return make_share_cell(part, bar=True)
