"""The pages of an audit and of a forecast, and write_page: what an instrument found as one HTML file."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...pages import Cell, Table, count, make_table, number, share, write_whole
from .._finding import counted, headline
from .._text import KEPT, LOST, plural
from ._findings import (
    TONES,
    UNSEEN,
    Columns,
    Plain,
    cause_cards,
    change_cell,
    count_cell,
    dtype_word,
    kept_cell,
    lost_cell,
    number_cell,
    render_page,
    shape_words,
    share_cell,
)
from ._observation import observation_html

_STATUS = {"nonfinite": "bad", "dtype-changed": "open", "unchanged": "bad", "barely-moved": "open", "constant": "open"}


_CONTRACT: Columns = [
    ("name", "", lambda one: Cell(one["name"])),
    ("difference", "", lambda one: Cell(one["difference"])),
]


def audit_html(data: Plain) -> str:
    """Return the page of what `Audit.to_dict` gives, as text."""
    cards, tensors = cause_cards(data), data["tensors"]
    return render_page(
        "audit.html.j2",
        cards,
        {},
        headline=headline(cards, plural(len(tensors), "tensor")),
        lead=_audit_lead(cards, data),
        groups=_groups(data["groups"]),
        states=_states(data["states"]),
        tensors=_tensors(tensors),
        share=data["share"],
        contract=make_table("contract", "Precision contracts that differ", data["contract"], _CONTRACT),
        unseen=data["unseen"],
    )


def _audit_lead(cards: Sequence[Plain], data: Plain) -> str:
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
        (
            "median, ulps",
            "number",
            lambda one: Cell(" to ".join(dict.fromkeys(map(number, one["median_change_ulps"])))),
        ),
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

    columns: Columns = [
        ("parameter", "", lambda one: Cell(one["name"])),
        ("lr", "number", lambda one: number_cell(one["options"].get("lr"))),
        ("weight update", "minor", lambda one: Cell(one["weight_update"] or "–", sort=one["weight_update"] or "")),
        ("states", "", kinds),
        (LOST, "number", lambda one: change_cell(one["update"], bar=True)),
        (KEPT, "number", lambda one: kept_cell(one["update"])),
        ("decay lost", "number", lambda one: change_cell(one["decay"])),
        ("would keep it", "minor", lambda one: UNSEEN if one["update"] is None else _remedy(one)),
    ]
    return make_table("states", "What the optimizer's state says", states, columns)


def _remedy(state: Plain) -> Cell:
    """Return the weight updates that lose less than a hundredth (or a tenth) of what rounding to nearest loses."""
    limit = max(0.01, state["update"]["lost_share"] / 10)
    return Cell(", ".join(name for name, part in state["lost_by"].items() if part <= limit) or "–")


def _both(dtypes: Sequence[str | None]) -> str:
    return " → ".join(dict.fromkeys(map(dtype_word, dtypes)))


def forecast_html(data: Plain) -> str:
    """Return the page of what `Forecast.to_dict` gives, as text."""
    cards, shares = cause_cards(data, forecast=True), _loss_shares(data)
    return render_page(
        "forecast.html.j2",
        cards,
        {"shares": shares} if shares else {},
        headline=headline(cards, _extent(data)),
        lead=_forecast_lead(cards, data),
        layers=_layers(data["layers"]),
        unseen=data["notes"],
    )


def _extent(data: Plain) -> str:
    return plural(data["steps"] - data["start"], "step") + " to come"


def _forecast_lead(cards: Sequence[Plain], data: Plain) -> str:
    layers = data["layers"]
    frozen = sum(one["freeze_step"] is not None for one in layers)
    said = [counted(cards, f"in {_extent(data)}")] if cards else []
    said += [f"{data['rule']}, {data['schedule']} schedule of {plural(data['steps'], 'step')}"]
    said += [f"from step {count(data['start'])}"] if data["start"] else []
    said.append(f"{frozen} of {plural(len(layers), 'layer')} will freeze")
    return " · ".join(said)


def _layers(layers: Sequence[Plain]) -> Table:
    columns: Columns = [
        ("layer", "", lambda one: Cell(one["name"])),
        ("stored in", "", lambda one: Cell(dtype_word(one["dtype"]))),
        ("weight update", "minor", lambda one: Cell(one["weight_update"])),
        ("elements", "number minor", lambda one: count_cell(one["elements"])),
        ("freezes at step", "number", _freeze),
        ("at lr", "number", lambda one: number_cell(one["freeze_lr"])),
        (LOST, "number", lambda one: lost_cell(one["lost_share"], bar=True)),
        ("decay lost", "number", lambda one: share_cell(one["decay_lost"])),
        ("update size from", "minor", lambda one: Cell(one["updates"] or "not known", sort=one["updates"] or "")),
    ]
    first = sorted(layers, key=lambda one: float("inf") if one["freeze_step"] is None else one["freeze_step"])
    return make_table("layers", "Layers", first, columns, "filter, as norm bf16")


def _loss_shares(data: Plain) -> dict[str, Any] | None:
    """Return one row per layer: the share of updates lost by step, and the step at which it freezes."""
    layers = [one for one in data["layers"] if one["lost"]]
    if not layers:
        return None
    low, high = data["start"], max(data["steps"], data["start"] + 1)
    layers.sort(key=lambda one: float("inf") if one["freeze_step"] is None else one["freeze_step"])
    curve = data.get("learning_rates")
    return {
        "rows": [_row(one, low, high) for one in layers],
        "low": low,
        "high": high,
        "ticks": [[at, count(at)] for at in _ticks(low, high)],
        "columns": ["freezes at", "updates lost"],
        "title": "updates lost, by step",
        "words": "Share of updates lost by layer and step, and where each freezes; the table below has the steps.",
        "file": "forecast.svg",
        **({"curve": {"title": "learning rate", "points": curve}} if curve else {}),
    }


def _row(one: Plain, low: int, high: int) -> dict[str, Any]:
    lost = one["lost"]
    edges = [low, *((a[0] + b[0]) / 2 for a, b in itertools.pairwise(lost)), high]
    cells = [[edges[at], edges[at + 1], round(part, 3), "lost"] for at, (_, part) in enumerate(lost) if part > 0.001]
    frozen = one["freeze_step"]
    return {
        "name": one["name"],
        "cells": cells,
        "texts": ["never" if frozen is None else count(frozen), share(one["lost_share"])],
        "bad": frozen is not None,
        **({} if frozen is None else {"mark": frozen}),
    }


def _ticks(low: int, high: int) -> list[int]:
    """Round steps, about six of them."""
    rough = max(1, (high - low) // 6)
    base = 10 ** (len(str(rough)) - 1)
    gap = next(many * base for many in (1, 2, 5, 10) if many * base >= rough)
    return list(range(-(-low // gap) * gap, high + 1, gap))


def _freeze(one: Plain) -> Cell:
    if one["freeze_step"] is None:
        return Cell("never", sort="")
    between = one["freeze_range"]
    said = ""
    if between is not None:
        first, last = ("beyond the schedule" if end is None else count(end) for end in between)
        said = f"between {first} and {last}, 9 times in 10"
    return Cell(count(one["freeze_step"]), sort=one["freeze_step"], title=said)


Instrument = Literal["observe", "audit", "forecast"]


def write_page(instrument: Instrument, data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what an instrument found as one self-contained HTML file, whole or not at all.

    Raises:
        ValueError: jinja2 is missing, or the file cannot be written.
    """
    make = {"observe": observation_html, "audit": audit_html, "forecast": forecast_html}[instrument]
    write_whole(path, make(data))
