"""The pages of an audit and of a forecast, and write_page: what an instrument found as one HTML file."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...pages import Cell, Table, format_count, format_share, make_table, write_file_atomically
from .._finding import choose_headline, count_causes_in_words
from .._text import KEPT_MOVEMENT_TITLE, LOST_UPDATES_TITLE, pluralize
from ._findings import (
    CELL_OF_UNKNOWN_VALUE,
    TONE_BY_SEVERITY,
    PlainData,
    TableColumns,
    make_cause_cards,
    make_changes_lost_cell,
    make_count_cell,
    make_movement_kept_cell,
    make_number_cell,
    make_share_cell,
    render_page,
    shorten_dtype,
)
from ._observation import render_observation_page


def render_audit_page(data: PlainData) -> str:
    """Return the page of what `Audit.to_dict` gives, as text."""
    cards, count = make_cause_cards(data), pluralize(len(data["tensors"]), "tensor")
    still = Counter(one["status"] for one in data["tensors"])
    said = [count_causes_in_words(cards, f"in {count}")] if cards else []
    said += [pluralize(data["steps"], "optimizer step") + " from A to B"] if data["steps"] is not None else []
    said.append(f"{still['changed']} of {count} moved")
    said += [f"{still['unchanged']} did not move at all"] if still["unchanged"] else []
    return render_page(
        "audit.html.j2",
        cards,
        {},
        headline=choose_headline(cards, count),
        lead=" · ".join(said),
        groups=_make_groups_table(data["groups"]),
        states=_make_states_table(data["states"]),
        unseen=data["unseen"],
    )


def _make_groups_table(groups: Sequence[PlainData]) -> Table:
    def make_medians_cell(one: PlainData) -> Cell:
        return Cell(" to ".join(dict.fromkeys(make_number_cell(end).text for end in one["median_change_ulps"])))

    columns: TableColumns = [
        ("tensors", "", lambda one: Cell(one["pattern"], title=", ".join(one["names"][:40]))),
        ("verdict", "", lambda one: Cell(one["verdict"], tone=TONE_BY_SEVERITY.get(one["severity"], ""))),
        ("dtype", "", lambda one: Cell(_join_dtypes(one["dtypes"].split(" -> ")))),
        ("how many", "number", lambda one: make_count_cell(len(one["names"]))),
        ("elements", "number minor", lambda one: make_count_cell(one["numel"])),
        ("unchanged", "number", lambda one: make_share_cell(one["share_unchanged"], bar=True)),
        ("median, ulps", "number", make_medians_cell),
    ]
    return make_table("groups", "Layer by layer", groups, columns, "filter, as norm")


def _make_states_table(states: Sequence[PlainData]) -> Table:
    def make_dtypes_cell(one: PlainData) -> Cell:
        found = dict.fromkeys(_join_dtypes(pair) for pair in one["dtypes"].values())
        return Cell(", ".join(found), title="; ".join(one["dtypes"])) if found else CELL_OF_UNKNOWN_VALUE

    columns: TableColumns = [
        ("parameter", "", lambda one: Cell(one["name"])),
        ("lr", "number", lambda one: make_number_cell(one["options"].get("lr"))),
        ("weight update", "minor", lambda one: Cell(one["weight_update"] or "–", sort=one["weight_update"] or "")),
        ("states", "", make_dtypes_cell),
        (LOST_UPDATES_TITLE, "number", lambda one: make_changes_lost_cell(one["update"], bar=True)),
        (KEPT_MOVEMENT_TITLE, "number", lambda one: make_movement_kept_cell(one["update"])),
    ]
    return make_table("states", "What the optimizer's state says", states, columns)


def _join_dtypes(dtypes: Sequence[str | None]) -> str:
    return " → ".join(dict.fromkeys(map(shorten_dtype, dtypes)))


def render_forecast_page(data: PlainData) -> str:
    """Return the page of what `Forecast.to_dict` gives, as text."""
    cards, shares, layers = make_cause_cards(data, forecast=True), _make_lost_shares_chart(data), data["layers"]
    extent = pluralize(data["steps"] - data["start"], "step") + " to come"
    said = [count_causes_in_words(cards, f"in {extent}")] if cards else []
    said += [f"{data['rule']}, {data['schedule']} schedule of {pluralize(data['steps'], 'step')}"]
    said += [f"from step {format_count(data['start'])}"] if data["start"] else []
    frozen = sum(one["freeze_step"] is not None for one in layers)
    said.append(f"{frozen} of {pluralize(len(layers), 'layer')} will freeze")
    return render_page(
        "forecast.html.j2",
        cards,
        {"shares": shares} if shares else {},
        headline=choose_headline(cards, extent),
        lead=" · ".join(said),
        layers=_make_layers_table(layers),
        unseen=data["notes"],
    )


def _make_layers_table(layers: Sequence[PlainData]) -> Table:
    def make_freeze_cell(one: PlainData) -> Cell:
        step = one["freeze_step"]
        return Cell("never", sort="") if step is None else make_count_cell(step)

    columns: TableColumns = [
        ("layer", "", lambda one: Cell(one["name"])),
        ("stored in", "", lambda one: Cell(shorten_dtype(one["dtype"]))),
        ("weight update", "minor", lambda one: Cell(one["weight_update"])),
        ("elements", "number minor", lambda one: make_count_cell(one["elements"])),
        ("freezes at step", "number", make_freeze_cell),
        ("at lr", "number", lambda one: make_number_cell(one["freeze_lr"])),
        (LOST_UPDATES_TITLE, "number", lambda one: make_share_cell(one["lost_share"], bar=True, lost=True)),
        ("decay lost", "number", lambda one: make_share_cell(one["decay_lost"])),
        ("update size from", "minor", lambda one: Cell(one["updates"] or "not known", sort=one["updates"] or "")),
    ]
    first = sorted(layers, key=lambda one: float("inf") if one["freeze_step"] is None else one["freeze_step"])
    return make_table("layers", "Layers", first, columns, "filter, as norm bf16")


def _make_lost_shares_chart(data: PlainData) -> dict[str, Any] | None:
    """Return one row per layer: the share of updates lost by step, and the step at which it freezes."""
    layers = [one for one in data["layers"] if one["lost"]]
    if not layers:
        return None
    low, high = data["start"], max(data["steps"], data["start"] + 1)
    rough = max(1, (high - low) // 6)  # about six round steps
    gap = next(many * base for many in (1, 2, 5, 10) if many * (base := 10 ** (len(str(rough)) - 1)) >= rough)
    layers.sort(key=lambda one: float("inf") if one["freeze_step"] is None else one["freeze_step"])
    curve = data.get("learning_rates")
    return {
        "rows": [_make_chart_row(one, low, high) for one in layers],
        "low": low,
        "high": high,
        "ticks": [[at, format_count(at)] for at in range(-(-low // gap) * gap, high + 1, gap)],
        "columns": ["freezes at", "updates lost"],
        "title": "updates lost, by step",
        "words": "Share of updates lost by layer and step, and where each freezes; the table below has the steps.",
        "file": "forecast.svg",
        **({"curve": {"title": "learning rate", "points": curve}} if curve else {}),
    }


def _make_chart_row(one: PlainData, low: int, high: int) -> dict[str, Any]:
    lost = one["lost"]
    edges = [low, *((a[0] + b[0]) / 2 for a, b in itertools.pairwise(lost)), high]
    cells = [[edges[at], edges[at + 1], round(part, 3), "lost"] for at, (_, part) in enumerate(lost) if part > 0.001]
    frozen = one["freeze_step"]
    return {
        "name": one["name"],
        "cells": cells,
        "texts": ["never" if frozen is None else format_count(frozen), format_share(one["lost_share"])],
        "bad": frozen is not None,
        **({} if frozen is None else {"mark": frozen}),
    }


Instrument = Literal["observe", "audit", "forecast"]


def write_page(instrument: Instrument, data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what an instrument found as one self-contained HTML file, whole or not at all.

    Raises:
        ValueError: jinja2 is missing, or the file cannot be written.
    """
    pages = {"observe": render_observation_page, "audit": render_audit_page, "forecast": render_forecast_page}
    write_file_atomically(path, pages[instrument](data))
