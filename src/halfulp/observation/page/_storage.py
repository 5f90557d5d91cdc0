"""Tables of an observation: what became of updates, what is stored how, averages, differences, sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...pages import Cell, Column, Table, count, number, share
from .._text import KEPT, LOST
from ._words import dtype_word

Plain = Mapping[str, Any]
_UNSEEN = Cell("–", sort="")


def updates_table(parameters: Sequence[Plain]) -> Table:
    """Of each parameter the share of updates lost and the movement kept; those with updates alone."""
    columns = [
        Column("parameter"),
        Column("stored in", minor=True),
        Column("weight update", minor=True),
        Column("lr", numeric=True, minor=True),
        Column(LOST, numeric=True),
        Column(KEPT, numeric=True),
        Column("decay lost", numeric=True),
        Column("states lost", numeric=True, minor=True),
        Column("moved", numeric=True),
    ]
    rows = []
    for one in parameters:
        if not one["update"]["seen"]:
            continue
        rows.append(
            [
                Cell(one["name"]),
                Cell(dtype_word(one["dtype"])),
                Cell(one["weight_update"]),
                _number(one["options"].get("lr")),
                _lost(one["update"], bar=True),
                _realised(one["update"]),
                _lost(one["decay"]),
                _states(one["states"]),
                _UNSEEN if one["moved"] is None else Cell(share(one["moved"]), sort=one["moved"]),
            ]
        )
    rows.sort(key=lambda row: -float(row[4].sort or 0))
    return Table("updates", "Updates by parameter", columns, rows, "filter, as norm bf16")


def storage_table(data: Plain) -> Table:
    """Parameters and the outputs of modules that were seen: the dtype asked for and the one there, and who steps it."""
    columns = [
        Column("name"),
        Column("what"),
        Column("class", minor=True),
        Column("asked"),
        Column("there"),
        Column("elements", numeric=True, minor=True),
        Column("gradient", minor=True),
        Column("optimizer"),
        Column("weight update"),
        Column("states"),
    ]
    asked = _requests_by_name(data.get("expectations", ()))
    rows = [[*_there(one["name"], "parameter", one, asked), *_stepped(one)] for one in data.get("parameters", ())]
    for one in data.get("tensors", ()):
        if one["role"] == "activation":
            rows.append([*_there(one["name"], "output", one, asked), *[_UNSEEN] * 5])
    return Table("storage", "What is stored how", columns, rows, "filter, as norm float32")


def extra_tables(data: Plain) -> list[Table]:
    """Tables of what only some runs have: running averages, modules that differ when computed again, sites."""
    found = [_averages(data.get("averages", ()))]
    for key, caption in (("recomputed", "Computed again by checkpointing"), ("compiled", "Compiled beside eager")):
        found.append(_differences(key, caption, data.get(key, ())))
    found.append(_sites(data.get("sites", ())))
    return [table for table in found if table.rows]


def _requests_by_name(expectations: Sequence[Plain]) -> dict[str, tuple[str, str, bool]]:
    """name -> what was asked of it, by whom, whether it is so."""
    return {
        name: (one["asked"], one["source"], name not in one["other"]) for one in expectations for name in one["matched"]
    }


def _there(name: str, what: str, one: Plain, asked: Mapping[str, tuple[str, str, bool]]) -> list[Cell]:
    wanted, source, met = asked.get(name, ("", "", True))
    there = dtype_word(one["dtype"])
    stored = one.get("asked_format")
    return [
        Cell(name or "(model)"),
        Cell(what),
        Cell(one["kind"]),
        Cell(dtype_word(wanted), title=f"asked by {source}") if wanted else _UNSEEN,
        Cell(there, tone="" if met else "bad", small=f"quantized to {stored}" if stored else ""),
    ]


def _stepped(one: Plain) -> list[Cell]:
    if not one["requires_grad"]:
        holder = Cell("frozen", sort="", tone="quiet")
    elif one["optimizer"] is None:
        holder = Cell("none", tone="bad")
    else:
        holder = Cell(one["optimizer"])
    states: dict[str, list[str]] = {}
    for name, dtype in one["state_dtypes"].items():
        states.setdefault(dtype_word(dtype), []).append(name)
    held = one["optimizer"] is not None
    return [
        Cell(count(one["numel"]), sort=one["numel"], title=" × ".join(map(str, one["shape"])) or "one number"),
        Cell(dtype_word(one["gradient_dtype"]), sort=None if one["gradient_dtype"] else ""),
        holder,
        Cell(one["weight_update"]) if held else _UNSEEN,
        Cell(", ".join(states), title="; ".join(f"{key}: {', '.join(names)}" for key, names in states.items()))
        if states
        else _UNSEEN,
    ]


def _lost(realised: Plain | None, bar: bool = False) -> Cell:
    if realised is None or not realised["seen"]:
        return _UNSEEN
    lost = realised["lost_share"]
    said = f"{count(realised['cancelled'])} of {count(realised['seen'])} sampled"
    said += "" if realised["known"] else "; counted where the gradient is not zero"
    tone = "bad" if lost >= 0.5 else "open" if lost >= 0.1 else ""
    return Cell(share(lost), sort=lost, bar=lost if bar else None, tone=tone if bar else "", title=said)


def _realised(realised: Plain) -> Cell:
    part = realised["realised_share"]
    if not isinstance(part, int | float):
        return Cell("not known", sort="", title="the optimizer's class computes no update that could be predicted")
    return Cell(share(part) if part >= 0 else f"{100 * part:.3g}%", sort=part, bar=min(1.0, max(0.0, part)))


def _states(states: Mapping[str, Plain]) -> Cell:
    found = {name: one["lost_share"] for name, one in states.items() if one["seen"]}
    if not found:
        return _UNSEEN
    worst = max(found, key=lambda name: found[name])
    return Cell(share(found[worst]), sort=found[worst], title=f"the worst, {worst}")


def _number(value: Any) -> Cell:
    return Cell(number(value), sort=value) if isinstance(value, int | float) else _UNSEEN


def _averages(averages: Sequence[Plain]) -> Table:
    columns = [
        Column("average"),
        Column("stored in"),
        Column("kept per step", numeric=True),
        Column(LOST, numeric=True),
        Column(KEPT, numeric=True),
    ]
    rows = [
        [
            Cell(one["name"]),
            Cell(dtype_word(one["dtype"])),
            _number(one["retention"]),
            _lost(one["change"], bar=True),
            _realised(one["change"]),
        ]
        for one in averages
    ]
    return Table("averages", "Running averages", columns, rows)


def _differences(key: str, caption: str, differences: Sequence[Plain]) -> Table:
    columns = [
        Column("module"),
        Column("first"),
        Column("second"),
        Column("differing", numeric=True),
        Column("relative", numeric=True),
    ]
    rows = [
        [
            Cell(one["name"] or "(model)"),
            Cell(dtype_word(one["dtypes"][0])),
            Cell(dtype_word(one["dtypes"][1]), tone="bad" if len(set(one["dtypes"])) > 1 else ""),
            Cell(share(one["differing"]), sort=one["differing"]),
            _number(one["relative"]),
        ]
        for one in differences
    ]
    return Table(key, caption, columns, rows)


def _sites(sites: Sequence[Plain]) -> Table:
    """Whatever a scaler says of its sites: the first column is the one called name, or the first."""
    keys = list(dict.fromkeys(key for one in sites for key in one))
    keys.sort(key=lambda key: key not in ("name", "site"))
    numeric = {key for key in keys if all(isinstance(one.get(key), int | float) for one in sites)}
    columns = [Column(key.replace("_", " "), numeric=key in numeric) for key in keys]
    rows = [[_number(one[key]) if key in numeric else Cell(_word(one.get(key))) for key in keys] for one in sites]
    return Table("sites", "Sites of the gradient scaler", columns, rows)


def _word(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "–" if value is None else str(value)
