"""The page of an observation: magnitudes, storage and history."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from ... import formats
from ...pages import Cell, Table, format_share, make_table
from .._finding import choose_headline, count_causes_in_words
from .._record import Role
from .._text import KEPT_MOVEMENT_TITLE, LOST_AND_KEPT_EXPLANATION, LOST_UPDATES_TITLE, format_multiple, pluralize
from ._findings import (
    CELL_OF_UNKNOWN_VALUE,
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
    charts: dict[str, Any] = make_magnitude_map(record.get("tensors", ()), parameters, role, where)
    has_map, curves = bool(charts["tensors"]), make_history_panels(record.get("history", []))
    every = f"Tensors of one step in {data['interval']:,} were looked at. " if data.get("interval") else ""
    overhead = data.get("overhead")
    nothing = "Nothing was observed: no optimizer stepped"
    elements = sum(one["numel"] for one in parameters)
    optimizers = dict.fromkeys(one["optimizer"] for one in parameters if one["optimizer"])
    said = [count_causes_in_words(cards, f"after {pluralize(data['steps'], 'step')}")] if cards else []
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


def make_magnitude_map(
    tensors: Iterable[PlainData], parameters: Iterable[PlainData] = (), role: str = "", where: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the data of the map's script, which opens on tensors of a role at or below the names `where`."""
    sampled = [one for one in tensors if one["sampled"]]
    updates = {one["name"]: one["update"] for one in parameters}
    keys = ("role", "name", "kind", "order", "sampled", "elements", "nonfinite", "amax")
    rows = []
    for one in sampled:
        bins = sorted([int(bin), many] for bin, many in one["histogram"].items())
        row = {key: one[key] for key in keys} | {"dtype": shorten_dtype(one["dtype"]), "bins": bins}
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
    try:
        found = formats.get(name or "")
    except ValueError:
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
        ("stored in", "minor", lambda one: Cell(shorten_dtype(one["dtype"]))),
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
        ("asked", "", lambda one: Cell(shorten_dtype(asked.get(one["name"])))),
        ("there", "", lambda one: Cell(shorten_dtype(one["dtype"]), tone="bad" if one["name"] in unmet else "")),
        (
            "elements",
            "number minor",
            lambda one: make_count_cell(one["numel"], " × ".join(map(str, one["shape"])) or "one number"),
        ),
        ("gradient", "minor", lambda one: Cell(shorten_dtype(one["gradient_dtype"]))),
        ("optimizer", "", make_optimizer_cell),
        ("weight update", "", lambda one: Cell(one["weight_update"]) if one["optimizer"] else CELL_OF_UNKNOWN_VALUE),
        ("states", "", _make_state_dtypes_cell),
    ]
    return make_table("storage", "What is stored how", data.get("parameters", ()), columns, "filter, as norm float32")


def _make_state_dtypes_cell(one: PlainData) -> Cell:
    states: dict[str, list[str]] = {}
    for name, dtype in one["state_dtypes"].items():
        states.setdefault(shorten_dtype(dtype), []).append(name)
    said = "; ".join(f"{key}: {', '.join(names)}" for key, names in states.items())
    return Cell(", ".join(states), title=said) if states else CELL_OF_UNKNOWN_VALUE


def _make_states_lost_cell(states: Mapping[str, PlainData]) -> Cell:
    found = {name: one["lost_share"] for name, one in states.items() if one["seen"]}
    if not found:
        return CELL_OF_UNKNOWN_VALUE
    worst = max(found, key=lambda name: found[name])
    return Cell(format_share(found[worst]), sort=found[worst], title=f"the worst, {worst}")
