"""The page of an audit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...pages import Cell, Table, make_table, number, share
from .._finding import counted, headline
from .._text import KEPT, LOST, plural
from ._findings import (
    TONES,
    UNSEEN,
    cause_cards,
    count_cell,
    dtype_word,
    lost_cell,
    number_cell,
    render_page,
    shape_words,
    share_cell,
)

Plain = Mapping[str, Any]
Columns = list[tuple[str, str, Callable[[Plain], Cell]]]
_STATUS = {"nonfinite": "bad", "dtype-changed": "open", "unchanged": "bad", "barely-moved": "open", "constant": "open"}
# Shares from this power of ten to 30% are told apart by how deep their colour is.
_FAINTEST = -4


def audit_html(data: Plain) -> str:
    """Return the page of an audit as text; it refers to nothing outside itself.

    Args:
        data: what `Audit.to_dict` gives, also when read back from JSON.

    Raises:
        ValueError: jinja2 is missing.
    """
    cards, tensors = cause_cards(data), data["tensors"]
    shares = _shares(data["groups"], {one["name"]: one for one in tensors})
    return render_page(
        "audit.html.j2",
        cards,
        {"shares": shares} if shares else {},
        headline=headline(cards, plural(len(tensors), "tensor")),
        lead=_lead(cards, data),
        groups=_groups(data["groups"]),
        states=_states(data["states"]),
        tensors=_tensors(tensors),
        share_words=f"Hardly moved: less than {data['share']:g} ulp on average.",
        contract=_contract(data["contract"]),
        unseen=data["unseen"],
    )


def _lead(cards: Sequence[Plain], data: Plain) -> str:
    still = Counter(one["status"] for one in data["tensors"])
    said = [counted(cards, f"in {plural(len(data['tensors']), 'tensor')}")] if cards else []
    said += [plural(data["steps"], "optimizer step") + " from A to B"] if data["steps"] is not None else []
    said.append(f"{still['changed']} of {plural(len(data['tensors']), 'tensor')} moved")
    said += [f"{still['unchanged']} did not move at all"] if still["unchanged"] else []
    return " · ".join(said)


def _groups(groups: Sequence[Plain]) -> Table:
    columns: Columns = [
        ("tensors", "", lambda one: Cell(one["pattern"], title=", ".join(one["names"][:40]))),
        ("verdict", "", lambda one: Cell(one["verdict"], tone=TONES.get(one["severity"], ""))),
        ("dtype", "", lambda one: Cell(_both(one["dtypes"].split(" -> ")))),
        ("how many", "number", lambda one: count_cell(len(one["names"]))),
        ("elements", "number minor", lambda one: count_cell(one["numel"])),
        ("unchanged", "number", lambda one: share_cell(one["share_unchanged"], bar=True)),
    ]
    return make_table("groups", "Layer by layer", groups, columns, "filter, as norm")


def _tensors(tensors: Sequence[Plain]) -> Table:
    columns: Columns = [
        ("tensor", "", lambda one: Cell(one["name"])),
        ("status", "", lambda one: Cell(one["status"].replace("-", " "), tone=_STATUS.get(one["status"], ""))),
        ("dtype", "", lambda one: Cell(_both(one["dtypes"]))),
        ("elements", "number minor", lambda one: count_cell(math.prod(one["shape"]), shape_words(one["shape"]))),
        ("unchanged", "number", lambda one: share_cell(one["share_unchanged"])),
        ("median, ulps", "number", lambda one: number_cell(one["median_change_ulps"])),
        ("mean, ulps", "number minor", lambda one: number_cell(one["mean_change_ulps"])),
        ("largest, ulps", "number", lambda one: number_cell(one["largest_change_ulps"])),
        ("NaN or inf", "number minor", lambda one: count_cell(one["nan"][1] + one["infinite"][1])),
    ]
    return make_table("tensors", "All tensors", tensors, columns, "filter, as unchanged bf16")


def _states(states: Sequence[Plain]) -> Table:
    def kinds(one: Plain) -> Cell:
        found = dict.fromkeys(_both(pair) for pair in one["dtypes"].values())
        return Cell(", ".join(found), title="; ".join(one["dtypes"])) if found else UNSEEN

    def kept(one: Plain) -> Cell:
        update = one["update"]
        return UNSEEN if update is None else Cell(f"{100 * update['realised']:.3g}%", sort=update["realised"])

    columns: Columns = [
        ("parameter", "", lambda one: Cell(one["name"])),
        ("lr", "number", lambda one: number_cell(one["options"].get("lr"))),
        ("weight update", "minor", lambda one: Cell(one["weight_update"] or "–", sort=one["weight_update"] or "")),
        ("states", "", kinds),
        (LOST, "number", lambda one: _lost(one["update"], bar=True)),
        (KEPT, "number", kept),
        ("decay lost", "number", lambda one: _lost(one["decay"])),
        ("would keep it", "minor", lambda one: UNSEEN if one["update"] is None else _remedy(one["update"])),
    ]
    return make_table("states", "What the optimizer's state says", states, columns)


def _lost(lost: Plain | None, bar: bool = False) -> Cell:
    return UNSEEN if lost is None or not lost["wanted"] else lost_cell(lost["lost"], bar)


def _remedy(update: Plain) -> Cell:
    """Return the weight updates that lose less than a hundredth (or a tenth) of what rounding to nearest loses."""
    limit = max(0.01, update["lost"] / 10)
    return Cell(", ".join(name for name, part in update["lost_by"].items() if part <= limit) or "–")


def _contract(differences: Sequence[Plain]) -> Table:
    columns: Columns = [
        ("name", "", lambda one: Cell(one["name"])),
        ("difference", "", lambda one: Cell(one["difference"])),
    ]
    return make_table("contract", "Precision contracts that differ", differences, columns)


def _shares(groups: Sequence[Plain], tensors: Mapping[str, Plain]) -> dict[str, Any] | None:
    """Return one row per group: its changes by power of two of an ulp, unchanged elements in their own column."""
    rows, bins = [], set()
    for one in groups:
        found: Counter[int] = Counter()
        for name in one["names"]:
            found.update({int(bin): many for bin, many in tensors[name]["histogram"].items()})
        if one["numel"]:
            rows.append((one, found))
            bins |= set(found)
    if not rows:
        return None
    low, high = min(bins, default=0), max(bins, default=0) + 1
    stayed = low - 3
    step = max(1, (high - low) // 12)
    median = [one["median_change_ulps"] for one, _ in rows]
    return {
        "rows": [
            {
                "name": one["pattern"],
                "cells": [
                    *_unchanged_cell(one["share_unchanged"], stayed),
                    *([at, at + 1, _depth(many / one["numel"]), "kept"] for at, many in sorted(found.items())),
                ],
                "texts": [share(one["share_unchanged"]), _range(ulps)],
                "bad": one["share_unchanged"] == 1,
            }
            for (one, found), ulps in zip(rows, median)
        ],
        "low": stayed - 0.5,
        "high": high + 0.5,
        "ticks": [[stayed + 1, "stayed"], *([at, _power(at)] for at in range(low, high + 1) if at % step == 0)],
        "columns": ["unchanged", "median, ulps"],
        "title": "change, in ulps",
        "words": "Changes of the elements in ulps, by group of tensors; the table above has the shares that stayed.",
        "file": "changes.svg",
    }


def _depth(part: float) -> float:
    return round(0.14 + 0.86 * min(1.0, max(0.0, (math.log10(part) - _FAINTEST) / 3.5)), 3) if part else 0.0


def _unchanged_cell(part: float, at: int) -> list[list[Any]]:
    """Return the cell of the elements that stayed, if any, the darker the more."""
    return [[at, at + 2, round(0.14 + 0.86 * part, 3), "lost"]] if part else []


def _power(exponent: int) -> str:
    return str(2**exponent) if 0 <= exponent <= 10 else f"1/{2**-exponent}" if -6 <= exponent < 0 else f"2^{exponent}"


def _range(ends: Sequence[Any]) -> str:
    low, high = number(ends[0]), number(ends[1])
    return low if low == high else f"{low} to {high}"


def _both(dtypes: Sequence[str | None]) -> str:
    return " → ".join(dict.fromkeys(map(dtype_word, dtypes)))
