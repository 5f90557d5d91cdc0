"""The page of an observation: magnitudes, storage and history."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from ... import formats
from ...pages import Cell, Table, format_share, make_table
from .._finding import choose_headline, count_causes_in_words
from .._record import Role
from .._text import KEPT_TITLE, LOST_AND_KEPT_TEXT, LOST_TITLE, format_multiple, pluralize
from ._findings import (
    UNKNOWN_CELL,
    PlainData,
    TableColumns,
    describe_shape,
    make_cause_cards,
    make_change_cell,
    make_count_cell,
    make_kept_cell,
    make_number_cell,
    make_share_cell,
    render_page,
    shorten_dtype,
)


def render_observation_page(data: PlainData) -> str:
    """Return the page of what `Observation.to_dict` gives, as text."""
    record, cards = data.get("record", {}), make_cause_cards(data)
    parameters = record.get("parameters", [])
    # The role of the tensors that show the first cause, and its names.
    first = [data["findings"][k] for card in cards[:1] for k in card["findings"]]
    first = [one for one in first if one["code"] == cards[0]["code"]]
    role, where = first[0].get("role", "") if first else "", [name for one in first for name in one["where"]]
    charts: dict[str, Any] = make_map_data(record.get("tensors", ()), parameters, role, where)
    has_map, curves = bool(charts["tensors"]), make_history_panels(record.get("history", []))
    every = f"Tensors of one step in {data['interval']:,} were looked at. " if data.get("interval") else ""
    overhead = data.get("overhead")
    nothing = "Nothing was observed: no optimizer stepped"
    return render_page(
        "observation.html.j2",
        cards,
        (charts if has_map else {}) | ({"history": curves} if curves else {}),
        headline=choose_headline(cards, pluralize(data["steps"], "step")) if cards or data["steps"] else nothing,
        lead=_describe_observation(cards, data, record),
        has_map=has_map,
        updates=make_updates_table(parameters),
        updates_words=LOST_AND_KEPT_TEXT,
        history_words=curves["words"] if curves else "",
        storage=make_storage_table(record),
        extras=make_extra_tables(record),
        unseen=record.get("unseen", []),
        cost="" if overhead is None else f"{every}Observing took {format_multiple(overhead)} the run's own time.",
    )


def _describe_observation(cards: Sequence[PlainData], data: PlainData, record: PlainData) -> str:
    """Describe how many causes there are, and what was observed: sampled steps, parameters, optimizers."""
    parameters = record.get("parameters", [])
    elements = sum(one["numel"] for one in parameters)
    optimizers = dict.fromkeys(one["optimizer"] for one in parameters if one["optimizer"])
    said = [count_causes_in_words(cards, f"after {pluralize(data['steps'], 'step')}")] if cards else []
    said.append(f"{pluralize(len(record.get('sampled_steps', ())), 'step')} sampled")
    said.append(f"{pluralize(len(parameters), 'parameter tensor')} of {pluralize(elements, 'element')}")
    said += [", ".join(optimizers)] if optimizers else ["no optimizer"]
    rank, ranks = record.get("replica_of", (0, 1))
    said += [f"rank {rank} of {ranks}"] if ranks > 1 else []
    return " · ".join(said)


def make_map_data(
    tensors: Iterable[PlainData], parameters: Iterable[PlainData] = (), role: str = "", where: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the data of the map's script: sampled tensors, formats, roles, and where it opens.

    It opens on the tensors of the first cause, of a role, at names of their own or of modules around them, in the
    format that stores them, the most lost first.
    """
    sampled = [one for one in tensors if one["sampled"]]
    held = {one["name"]: one for one in parameters}
    weights = {one["name"]: _find_median_binade(one["histogram"]) for one in sampled if one["role"] == "weight"}
    rows = [_make_tensor_row(one, held.get(one["name"]), weights.get(one["name"])) for one in sampled]
    named = list(dict.fromkeys(name for row in rows for name in row["formats"]))
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
        "formats": [find_format_limits(name) for name in named],
        "stored": stored,
        "roles": roles,
        "role": role if found else (roles[0] if roles else ""),
        "order": "lost" if found else "model",
    }


def _make_tensor_row(one: PlainData, parameter: PlainData | None, weight: int | None) -> dict[str, Any]:
    smallest = one["amin"]
    row = {key: one[key] for key in ("role", "name", "kind", "order", "sampled", "elements", "nonfinite", "amax")}
    row |= {
        "dtype": shorten_dtype(one["dtype"]),
        "amin": smallest if isinstance(smallest, int | float) and math.isfinite(smallest) else 0,
        "bins": sorted([int(bin), many] for bin, many in one["histogram"].items()),
        "formats": {
            name: [counts["elements"], counts["underflow"], counts["subnormal"], counts["overflow"]]
            for name, counts in one["formats"].items()
        },
    }
    if row["dtype"] not in row["formats"] and one.get("scale", 1.0) == 1.0:
        row["formats"] |= _count_as_stored(row)
    if one["role"] == "update" and parameter is not None and parameter["update"]["seen"]:
        row["lost"] = [parameter["update"]["seen"], parameter["update"]["cancelled"]]
        if parameter["weight_update"] == "nearest" and parameter.get("rounding") is None and weight is not None:
            row["weight"] = weight
    return row


def _count_as_stored(row: PlainData) -> dict[str, list[int]]:
    """Return the counts of a row in the format that stores it, where none became zero or overflowed."""
    try:
        smallest = formats.get(row["dtype"]).emin
    except ValueError:
        return {}
    return {row["dtype"]: [row["sampled"], 0, sum(many for bin, many in row["bins"] if bin < smallest), 0]}


def _find_median_binade(histogram: Mapping[str, int]) -> int | None:
    """Return the power of two of the median of magnitudes."""
    left = sum(histogram.values()) / 2
    for bin, many in sorted((int(bin), many) for bin, many in histogram.items()):
        left -= many
        if left <= 0:
            return bin
    return None


def find_format_limits(name: str) -> dict[str, Any]:
    """Return where a format's magnitudes begin and end, as powers of two under rounding to nearest.

    `zero` is the power below which all becomes zero, `normal` that from which numbers are normal, `over` the logarithm
    of the smallest magnitude beyond the largest number, `digits` the bits of a number behind its first; a format in
    blocks, whose limits move with its scales, and one that is not known here have `block` alone.

    >>> limits = find_format_limits("fp16")
    >>> limits["zero"], limits["normal"], round(limits["over"], 4), limits["digits"]
    (-25, -14, 15.9996, 10)
    >>> find_format_limits("mxfp8_e4m3")
    {'name': 'mxfp8_e4m3', 'title': 'mxfp8_e4m3: blocks of 32 elements', 'block': True}
    """
    if name in formats.block_names():
        blocks = formats.get_block(name).block
        return {"name": name, "title": f"{name}: blocks of {blocks} elements", "block": True}
    try:
        found = formats.get(name)
    except ValueError:
        return {"name": name, "title": name, "block": True}
    half_ulp = math.ldexp(0.5, found.emax - found.mantissa_bits)
    return {
        "name": name,
        "title": f"{name}: {found.smallest_subnormal:.3g} to {found.max:.6g}",
        "block": False,
        "zero": math.frexp(found.smallest_subnormal)[1] - 2,
        "normal": found.emin,
        "over": math.log2(found.max) if math.isinf(found.max + half_ulp) else math.log2(found.max + half_ulp),
        "digits": found.mantissa_bits,
    }


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
        points = _list_curve_points(history, key)
        found = [value for _, value in points if value is not None]
        if found:
            said.append(f"{word} from {found[0]:.4g} to {found[-1]:.4g}")
        if len(found) < len(points):
            said.append(f"{word} NaN or infinite in {len(points) - len(found):,} of {len(points):,} steps")
    total = sum(one["skipped"] for one in history)
    if total:
        said.append(f"{total} skipped by the scaler")
    return "; ".join(said) + "."


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
        (LOST_TITLE, "number", lambda one: make_change_cell(one["update"], bar=True)),
        (KEPT_TITLE, "number", lambda one: make_kept_cell(one["update"])),
        ("decay lost", "number", lambda one: make_change_cell(one["decay"])),
        ("states lost", "number minor", lambda one: _make_states_lost_cell(one["states"])),
        ("moved", "number", lambda one: make_share_cell(one["moved"])),
    ]
    return make_table("updates", "Updates by parameter", found, columns, "filter, as norm bf16")


def make_storage_table(data: PlainData) -> Table:
    """Return a table of parameters and outputs: the dtype asked for, the one found, and the optimizer."""
    asked = {
        name: (one["asked"], one["source"], name not in one["other"])
        for one in data.get("expectations", ())
        for name in one["matched"]
    }
    outputs = [one for one in data.get("tensors", ()) if one["role"] == "activation"]

    def wanted(one: PlainData) -> Cell:
        dtype, source, _ = asked.get(one["name"], ("", "", True))
        return Cell(shorten_dtype(dtype), title=f"asked by {source}") if dtype else UNKNOWN_CELL

    def there(one: PlainData) -> Cell:
        stored, met = one.get("asked_format"), asked.get(one["name"], ("", "", True))[2]
        small = f"quantized to {stored}" if stored else ""
        return Cell(shorten_dtype(one["dtype"]), tone="" if met else "bad", small=small)

    def stepper(one: PlainData) -> Cell:
        if not one["requires_grad"]:
            return Cell("frozen", sort="", tone="quiet")
        return Cell("none", tone="bad") if one["optimizer"] is None else Cell(one["optimizer"])

    def elements(one: PlainData) -> Cell:
        return make_count_cell(one["numel"], describe_shape(one["shape"]))

    def gradient(one: PlainData) -> Cell:
        return Cell(shorten_dtype(one["gradient_dtype"]), sort=None if one["gradient_dtype"] else "")

    def of_parameter(cell: Callable[[PlainData], Cell]) -> Callable[[PlainData], Cell]:
        return lambda one: UNKNOWN_CELL if "role" in one else cell(one)

    columns: TableColumns = [
        ("name", "", lambda one: Cell(one["name"] or "(model)")),
        ("what", "", lambda one: Cell("output" if "role" in one else "parameter")),
        ("class", "minor", lambda one: Cell(one["kind"])),
        ("asked", "", wanted),
        ("there", "", there),
        ("elements", "number minor", of_parameter(elements)),
        ("gradient", "minor", of_parameter(gradient)),
        ("optimizer", "", of_parameter(stepper)),
        (
            "weight update",
            "",
            of_parameter(lambda one: Cell(one["weight_update"]) if one["optimizer"] else UNKNOWN_CELL),
        ),
        ("states", "", of_parameter(_make_state_dtypes_cell)),
    ]
    rows = [*data.get("parameters", ()), *outputs]
    return make_table("storage", "What is stored how", rows, columns, "filter, as norm float32")


def make_extra_tables(data: PlainData) -> list[Table]:
    """Return tables that only some runs have: running averages, and sites of a scaler."""
    averages: TableColumns = [
        ("average", "", lambda one: Cell(one["name"])),
        ("stored in", "", lambda one: Cell(shorten_dtype(one["dtype"]))),
        ("kept per step", "number", lambda one: make_number_cell(one["retention"])),
        (LOST_TITLE, "number", lambda one: make_change_cell(one["change"], bar=True)),
        (KEPT_TITLE, "number", lambda one: make_kept_cell(one["change"])),
    ]
    sites: TableColumns = [
        ("site", "", lambda one: Cell(one["site"])),
        ("format", "", lambda one: Cell(one["format"] or "–")),
        ("exponent", "number", lambda one: make_number_cell(one["exponent"])),
        ("overflows", "number", lambda one: make_number_cell(one["overflows"])),
    ]
    found = [
        make_table("averages", "Running averages", data.get("averages", ()), averages),
        make_table("sites", "Sites of the gradient scaler", data.get("sites", ()), sites),
    ]
    return [table for table in found if table.rows]


def _make_state_dtypes_cell(one: PlainData) -> Cell:
    states: dict[str, list[str]] = {}
    for name, dtype in one["state_dtypes"].items():
        states.setdefault(shorten_dtype(dtype), []).append(name)
    said = "; ".join(f"{key}: {', '.join(names)}" for key, names in states.items())
    return Cell(", ".join(states), title=said) if states else UNKNOWN_CELL


def _make_states_lost_cell(states: Mapping[str, PlainData]) -> Cell:
    found = {name: one["lost_share"] for name, one in states.items() if one["seen"]}
    if not found:
        return UNKNOWN_CELL
    worst = max(found, key=lambda name: found[name])
    return Cell(format_share(found[worst]), sort=found[worst], title=f"the worst, {worst}")
