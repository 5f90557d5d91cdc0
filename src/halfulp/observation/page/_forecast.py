"""The page of a forecast."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...pages import Cell, Table, count, make_table, share
from .._finding import counted, headline
from .._text import LOST, bytes_in_words, plural
from ._findings import (
    UNSEEN,
    cause_cards,
    count_cell,
    dtype_word,
    lost_cell,
    number_cell,
    render_page,
    share_cell,
)

Plain = Mapping[str, Any]
Columns = list[tuple[str, str, Callable[[Plain], Cell]]]


def forecast_html(data: Plain) -> str:
    """Return the page of a forecast as text; it refers to nothing outside itself.

    Args:
        data: what `Forecast.to_dict` gives, also when read back from JSON.

    Raises:
        ValueError: jinja2 is missing.
    """
    cards, shares = cause_cards(data, forecast=True), _shares(data)
    return render_page(
        "forecast.html.j2",
        cards,
        {"shares": shares} if shares else {},
        headline=headline(cards, _extent(data)),
        lead=_lead(cards, data),
        layers=_layers(data["layers"]),
        layers_words="Share of updates lost: those that change nothing, each step weighed by its learning rate.",
        costs=_costs(data["costs"]),
        unseen=data["notes"],
    )


def _extent(data: Plain) -> str:
    return plural(data["steps"] - data["start"], "step") + " to come"


def _lead(cards: Sequence[Plain], data: Plain) -> str:
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
        ("noise = drift after", "number minor", lambda one: _steps(one["noise_steps"])),
        ("update size from", "minor", lambda one: Cell(one["updates"] or "not known", sort=one["updates"] or "")),
    ]
    first = sorted(layers, key=lambda one: float("inf") if one["freeze_step"] is None else one["freeze_step"])
    return make_table("layers", "Layers", first, columns, "filter, as norm bf16")


def _costs(costs: Sequence[Plain]) -> Table:
    tones = {"yes": "good", "no": "bad", "on average": "open"}
    columns: Columns = [
        ("weight update", "", lambda one: Cell(one["weight_update"])),
        ("bytes / parameter", "number", lambda one: number_cell(one["bytes_per_parameter"])),
        ("in all", "number", lambda one: Cell(bytes_in_words(one["total"]), sort=one["total"])),
        ("keeps the smallest", "", lambda one: Cell(one["keeps"], tone=tones.get(one["keeps"], ""))),
    ]
    return make_table("costs", "What a remedy costs", costs, columns)


def _shares(data: Plain) -> dict[str, Any] | None:
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


def _steps(value: Any) -> Cell:
    return Cell(f"{value:,.0f} steps", sort=value) if isinstance(value, int | float) else UNSEEN
