"""The pages of observe, audit and forecast: their findings as cards, their tables and charts, and write_page."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from ... import __version__
from ..._names import read_registered_descriptions
from ...pages import (
    MISSING_VALUE_TEXT,
    Cell,
    Table,
    format_count,
    format_number,
    format_share,
    make_table,
    render_template,
    write_file_atomically,
)
from .._finding import choose_headline, describe_counts_by_severity, describe_names
from .._record import Role
from .._text import (
    KEPT_MOVEMENT_TITLE,
    LOST_AND_KEPT_EXPLANATION,
    LOST_UPDATES_TITLE,
    find_format,
    format_multiple,
    name_dtype,
    pluralize,
)

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
        (_TITLE_BY_EVIDENCE_NAME.get(key, key.replace("_", " ")), _format_evidence_value(value))
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


def _format_evidence_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_count(value)
    if isinstance(value, list):
        return ", ".join(map(_format_evidence_value, value))
    return format_number(value)


CELL_OF_UNKNOWN_VALUE = Cell(MISSING_VALUE_TEXT, sort="")
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


# Formats that the map shows tensors in, whatever stores them.
FORMATS_MARKED_ON_PAGE = ("fp16", "bf16", "e5m2", "e4m3fn")


def render_observation_page(data: PlainData) -> str:
    """Return the page of what `Observation.to_dict` gives, as text."""
    record, cards = data.get("record", {}), make_cause_cards(data)
    parameters = record.get("parameters", [])
    # The role of the tensors that show the first cause, and its names.
    first = [data["findings"][k] for card in cards[:1] for k in card["findings"]]
    first = [one for one in first if one["code"] == cards[0]["code"]]
    role, where = first[0].get("role", "") if first else "", [name for one in first for name in one["where"]]
    charts: dict[str, Any] = make_magnitude_map_data(record.get("tensors", ()), parameters, role, where)
    has_map, curves = bool(charts["tensors"]), make_history_panels(record.get("history", []))
    every = f"Tensors of one step in {data['interval']:,} were looked at. " if data.get("interval") else ""
    overhead = data.get("overhead")
    nothing = "Nothing was observed: no optimizer stepped"
    elements = sum(one["numel"] for one in parameters)
    optimizers = dict.fromkeys(one["optimizer"] for one in parameters if one["optimizer"])
    said = [describe_counts_by_severity(cards, f"after {pluralize(data['steps'], 'step')}")] if cards else []
    said.append(f"{pluralize(len(record.get('sampled_steps', ())), 'step')} sampled")
    said.append(f"{pluralize(len(parameters), 'parameter tensor')} of {pluralize(elements, 'element')}")
    said += [", ".join(optimizers)] if optimizers else ["no optimizer"]
    rank, ranks = record.get("replica_of", (0, 1))
    said += [f"rank {rank} of {ranks}"] if ranks > 1 else []
    return render_page(
        "observation.html.j2",
        cards,
        (charts if has_map else {}) | ({"history": curves} if curves else {}),
        headline=choose_headline(cards, pluralize(data["steps"], "step")) if cards or data["steps"] else nothing,
        lead=" · ".join(said),
        has_map=has_map,
        updates=make_updates_table(parameters),
        updates_words=LOST_AND_KEPT_EXPLANATION,
        history_words=curves["words"] if curves else "",
        storage=make_storage_table(record),
        unseen=record.get("unseen", []),
        cost="" if overhead is None else f"{every}Observing took {format_multiple(overhead)} the run's own time.",
    )


def make_magnitude_map_data(
    tensors: Iterable[PlainData], parameters: Iterable[PlainData] = (), role: str = "", where: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the data of the map's script, which opens on tensors of a role at or below the names `where`."""
    sampled = [one for one in tensors if one["sampled"]]
    updates = {one["name"]: one["update"] for one in parameters}
    keys = ("role", "name", "kind", "order", "sampled", "elements", "nonfinite", "amax")
    rows = []
    for one in sampled:
        bins = sorted([int(bin), many] for bin, many in one["histogram"].items())
        row = {key: one[key] for key in keys} | {"dtype": name_dtype(one["dtype"]), "bins": bins}
        row |= {"amin": 2.0 ** bins[0][0] if bins else 0}
        update = updates.get(one["name"]) if one["role"] == "update" else None
        if update is not None and update["seen"]:
            row["lost"] = [update["seen"], update["cancelled"]]
        rows.append(row)
    named = dict.fromkeys(
        [*FORMATS_MARKED_ON_PAGE, *(row["dtype"] for row in rows), *(one["asked_format"] for one in sampled)]
    )
    order = {role: place for place, role in enumerate(get_args(Role))}
    roles = sorted({row["role"] for row in rows}, key=lambda role: order.get(role, len(order)))
    for row in rows:
        row["found"] = row["role"] == role and any(f"{row['name']}.".startswith(f"{one}.") for one in where)
    found, stored = any(row["found"] for row in rows), {}
    for each in roles:  # the format that stores the tensors of the first cause, or most of the rows
        own = [row for row in rows if row["role"] == each]
        held_in = Counter(row["dtype"] for row in [row for row in own if row["found"]] or own)
        stored[each] = held_in.most_common(1)[0][0]
    return {
        "tensors": sorted(rows, key=lambda row: row["order"]),
        "formats": [limits for name in named if (limits := find_format_range(name)) is not None],
        "stored": stored,
        "roles": roles,
        "role": role if found else (roles[0] if roles else ""),
        "order": "lost" if found else "model",
    }


def find_format_range(name: str | None) -> dict[str, Any] | None:
    """Return where a format's magnitudes begin and end, as powers of two under rounding to nearest.

    `zero` is the power below which all becomes zero, `normal` that from which numbers are normal, `over` the logarithm
    of the smallest magnitude beyond the largest number. None of an unknown format and of one in blocks.

    >>> limits = find_format_range("fp16")
    >>> limits["zero"], limits["normal"], round(limits["over"], 4)
    (-25, -14, 15.9996)
    """
    if (found := find_format(name)) is None:
        return None
    beyond = found.max + math.ldexp(0.5, found.emax - found.mantissa_bits)
    return {
        "name": name,
        "title": f"{name}: {found.smallest_subnormal:.3g} to {found.max:.6g}",
        "zero": math.frexp(found.smallest_subnormal)[1] - 2,
        "normal": found.emin,
        "over": math.log2(found.max if math.isinf(beyond) else beyond),
    }


NONFINITE_TEXT = "NaN or infinity"
CurvePoints = list[tuple[int, float | None]]


def make_history_panels(history: Sequence[PlainData]) -> dict[str, Any] | None:
    """Return the panels that `StepRecord`s as plain data have values for; None without any."""
    skipped = [int(one["step"]) for one in history if one["skipped"]]
    total = sum(one["skipped"] for one in history)
    panels: list[dict[str, Any]] = []
    if loss := _list_curve_points(history, "loss"):
        broken = [step for step, value in loss if value is None]
        note = f"× {pluralize(len(broken), 'step')} with NaN or infinity" if broken else ""
        panels.append({"title": "loss", "lines": [_make_curve("", loss, "--c0")], "crosses": broken, "note": note})
    scales = [(step, math.log2(value) if value else None) for step, value in _list_curve_points(history, "loss_scale")]
    if any(value is not None for _, value in scales):
        note = f"▲ {pluralize(total, 'step')} skipped" if total else "no step skipped"
        lines = [_make_curve("", scales, "--c6")]
        panels.append({"title": "loss scale", "log": True, "lines": lines, "marks": skipped, "note": note})
    if pairs := [(int(one["step"]), *one["exponents"]) for one in history if one["exponents"]]:
        lines = [
            _make_curve("largest", [(step, high) for step, _, high in pairs], "--c5"),
            _make_curve("smallest", [(step, low) for step, low, _ in pairs], "--c4", True),
        ]
        panels.append({"title": "gradient exponents of the sites", "log": True, "lines": lines})
    if rates := _list_curve_points(history, "lr"):
        panels.append({"title": "learning rate", "zero": True, "lines": [_make_curve("", rates, "--c1")]})
    if not panels:
        return None
    return {"steps": [int(one["step"]) for one in history], "panels": panels, "words": describe_history(history)}


def describe_history(history: Sequence[PlainData]) -> str:
    """Return a description of the curves in words, for readers of the page who cannot see them."""
    said = [f"{len(history):,} steps on record"]
    for key, word in (("loss", "loss"), ("loss_scale", "loss scale"), ("lr", "learning rate")):
        points = [value for _, value in _list_curve_points(history, key)]
        if points:
            first, last = (NONFINITE_TEXT if end is None else f"{end:.4g}" for end in (points[0], points[-1]))
            said.append(f"{word} from {first} to {last}")
    total = sum(one["skipped"] for one in history)
    return "; ".join([*said, f"{total} skipped by the scaler"] if total else said) + "."


def _make_curve(name: str, points: CurvePoints, colour: str, dash: bool = False) -> dict[str, Any]:
    return {"name": name, "points": points, "colour": colour, "dash": dash}


def _list_curve_points(history: Sequence[PlainData], key: str) -> CurvePoints:
    """Return the steps that have a value, with it in 5 digits; None where it is NaN or infinite."""
    found = ((int(one["step"]), one[key]) for one in history if one[key] is not None)
    return [(step, float(f"{value:.5g}") if isinstance(value, int | float) else None) for step, value in found]


def make_updates_table(parameters: Sequence[PlainData]) -> Table:
    """Return a table of each updated parameter's share of updates lost and share of movement kept."""
    found = sorted((one for one in parameters if one["update"]["seen"]), key=lambda one: -one["update"]["lost_share"])
    columns: TableColumns = [
        ("parameter", "", lambda one: Cell(one["name"])),
        ("stored in", "minor", lambda one: Cell(name_dtype(one["dtype"]))),
        ("weight update", "minor", lambda one: Cell(one["weight_update"])),
        ("lr", "number minor", lambda one: make_number_cell(one["options"].get("lr"))),
        (LOST_UPDATES_TITLE, "number", lambda one: make_changes_lost_cell(one["update"], bar=True)),
        (KEPT_MOVEMENT_TITLE, "number", lambda one: make_movement_kept_cell(one["update"])),
        ("decay lost", "number", lambda one: make_changes_lost_cell(one["decay"])),
        ("states lost", "number minor", lambda one: _make_states_lost_cell(one["states"])),
        ("moved", "number", lambda one: make_share_cell(one["moved"])),
    ]
    return make_table("updates", "Updates by parameter", found, columns, "filter, as norm bf16")


def make_storage_table(data: PlainData) -> Table:
    """Return a table of parameters: the dtype asked for, the one found, and the optimizer."""
    expected = data.get("expectations", ())
    asked = {name: one["asked"] for one in expected for name in one["matched"]}
    unmet = {name for one in expected for name in one["other"]}

    def make_optimizer_cell(one: PlainData) -> Cell:
        if not one["requires_grad"]:
            return Cell("frozen", sort="", tone="quiet")
        return Cell("none", tone="bad") if one["optimizer"] is None else Cell(one["optimizer"])

    columns: TableColumns = [
        ("parameter", "", lambda one: Cell(one["name"])),
        ("class", "minor", lambda one: Cell(one["kind"])),
        ("asked", "", lambda one: Cell(name_dtype(asked.get(one["name"]), MISSING_VALUE_TEXT))),
        ("there", "", lambda one: Cell(name_dtype(one["dtype"]), tone="bad" if one["name"] in unmet else "")),
        (
            "elements",
            "number minor",
            lambda one: make_count_cell(one["numel"], " × ".join(map(str, one["shape"])) or "one number"),
        ),
        ("gradient", "minor", lambda one: Cell(name_dtype(one["gradient_dtype"], MISSING_VALUE_TEXT))),
        ("optimizer", "", make_optimizer_cell),
        ("weight update", "", lambda one: Cell(one["weight_update"]) if one["optimizer"] else CELL_OF_UNKNOWN_VALUE),
        ("states", "", _make_state_dtypes_cell),
    ]
    return make_table("storage", "What is stored how", data.get("parameters", ()), columns, "filter, as norm float32")


def _make_state_dtypes_cell(one: PlainData) -> Cell:
    states: dict[str, list[str]] = {}
    for name, dtype in one["state_dtypes"].items():
        states.setdefault(name_dtype(dtype), []).append(name)
    said = "; ".join(f"{key}: {', '.join(names)}" for key, names in states.items())
    return Cell(", ".join(states), title=said) if states else CELL_OF_UNKNOWN_VALUE


def _make_states_lost_cell(states: Mapping[str, PlainData]) -> Cell:
    found = {name: one["lost_share"] for name, one in states.items() if one["seen"]}
    if not found:
        return CELL_OF_UNKNOWN_VALUE
    worst = max(found, key=lambda name: found[name])
    return Cell(format_share(found[worst]), sort=found[worst], title=f"the worst, {worst}")


def render_audit_page(data: PlainData) -> str:
    """Return the page of what `Audit.to_dict` gives, as text."""
    cards, count = make_cause_cards(data), pluralize(len(data["tensors"]), "tensor")
    still = Counter(one["status"] for one in data["tensors"])
    said = [describe_counts_by_severity(cards, f"in {count}")] if cards else []
    said += [pluralize(data["steps"], "optimizer step") + " from A to B"] if data["steps"] is not None else []
    said.append(f"{still['changed']} of {count} moved")
    said += [f"{still['unchanged']} did not move at all"] if still["unchanged"] else []
    return render_page(
        "audit.html.j2",
        cards,
        {},
        headline=choose_headline(cards, count),
        lead=" · ".join(said),
        groups=_make_tensor_groups_table(data["groups"]),
        states=_make_states_table(data["states"]),
        unseen=data["unseen"],
    )


def _make_tensor_groups_table(groups: Sequence[PlainData]) -> Table:
    def make_median_change_cell(one: PlainData) -> Cell:
        return Cell(" to ".join(dict.fromkeys(make_number_cell(end).text for end in one["median_change_ulps"])))

    columns: TableColumns = [
        ("tensors", "", lambda one: Cell(one["pattern"], title=", ".join(one["names"][:40]))),
        ("verdict", "", lambda one: Cell(one["verdict"], tone=TONE_BY_SEVERITY.get(one["severity"], ""))),
        ("dtype", "", lambda one: Cell(_join_dtypes(one["dtypes"].split(" -> ")))),
        ("how many", "number", lambda one: make_count_cell(len(one["names"]))),
        ("elements", "number minor", lambda one: make_count_cell(one["numel"])),
        ("unchanged", "number", lambda one: make_share_cell(one["share_unchanged"], bar=True)),
        ("median, ulps", "number", make_median_change_cell),
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
    return " → ".join(dict.fromkeys(name_dtype(one, MISSING_VALUE_TEXT) for one in dtypes))


def render_forecast_page(data: PlainData) -> str:
    """Return the page of what `Forecast.to_dict` gives, as text."""
    cards, shares, layers = make_cause_cards(data, forecast=True), _make_lost_shares_chart(data), data["layers"]
    extent = pluralize(data["steps"] - data["start"], "step") + " to come"
    said = [describe_counts_by_severity(cards, f"in {extent}")] if cards else []
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
        ("stored in", "", lambda one: Cell(name_dtype(one["dtype"]))),
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


InstrumentName = Literal["observe", "audit", "forecast"]


def write_page(instrument: InstrumentName, data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what an instrument found as one self-contained HTML file, whole or not at all.

    Raises:
        ValueError: jinja2 is missing, or the file cannot be written.
    """
    pages = {"observe": render_observation_page, "audit": render_audit_page, "forecast": render_forecast_page}
    write_file_atomically(path, pages[instrument](data))
