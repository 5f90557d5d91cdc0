"""The report of a script that ran under recipes: one self-contained HTML page."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ... import __version__, recipes
from ...pages import format_number, render, require
from .._defaults import FAILING_VERDICTS, PASSING_VERDICTS, REFERENCE, VERDICT_TONES
from ._curves import choose_line_styles, draw_loss_curves

_WIDE_SIZE, _NARROW_SIZE = (820, 480), (340, 480)
_PANEL_TITLES = ("training loss", "difference to fp32 at the same backward pass", "the close ones, magnified")


def render_script_page(data: Mapping[str, Any]) -> str:
    """Return the page of what `ScriptComparison.to_dict` gives as HTML text; it refers to nothing outside itself."""
    require("matplotlib")
    rows = data["recipes"]
    drawn = [row for row in rows if row["curve"]]
    curves = {row["recipe"]: {0: {int(at): loss for at, loss in row["curve"]}} for row in drawn}
    styles = choose_line_styles([row["recipe"] for row in rows])
    gaps = [abs(row["gap"]) for row in rows if row["gap"] is not None]
    most = max((row["bytes_per_parameter"] or 0.0 for row in rows), default=0.0)
    ends = (f"{row['recipe']} ends at {format_number(row['loss'], 4)}" for row in rows if row["loss"] is not None)
    lines = [_make_template_row(row, styles[row["recipe"]], max(gaps, default=0.0) or 1.0, most) for row in rows]
    key = (
        None
        if REFERENCE not in curves
        else {
            "curves_in_words": f"Training loss by backward pass, and its difference to fp32; {'; '.join(ends)}. The table "
            "has the same numbers.",
            "rows": [line for line in lines if line["curve"]],
            "wide": draw_loss_curves(curves, "script", *_WIDE_SIZE, titles=_PANEL_TITLES, axis="backward pass"),
            "narrow": draw_loss_curves(curves, "script", *_NARROW_SIZE, titles=_PANEL_TITLES, axis="backward pass"),
        }
    )
    return render(
        __package__,
        "script.html.j2",
        headline=write_script_headline(rows),
        leads=[
            f"{row['recipe']} {'could not be used' if row['verdict'] == 'cannot' else row['verdict']}: {row['reason']}"
            for row in rows
            if row["verdict"] in ("cannot", "crashed")
        ],
        notes=data["notes"],
        key=key,
        rows=lines,
        reasons=any(row["reason"] for row in rows),
        number=format_number,
        versions=f"halfulp {__version__}, torch {torch.__version__}",
        date=datetime.date.today().isoformat(),
    )


def write_script_headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in words which recipes keep float32's loss.

    >>> row = {"recipe": "bf16-kahan", "verdict": "no difference"}
    >>> write_script_headline([row, {"recipe": "bf16", "verdict": "worse"}])
    'bf16-kahan keeps float32’s loss; bf16 does not.'
    """
    of = {verdict: [row["recipe"] for row in rows if row["verdict"] == verdict] for verdict in VERDICT_TONES}
    kept = [name for verdict in reversed(PASSING_VERDICTS) for name in of[verdict]]
    lost = [name for verdict in FAILING_VERDICTS for name in of[verdict]]
    if of["no verdict"]:
        return "Float32 itself did not learn: no verdict on any recipe."
    if kept:
        rest = f"; {_join_names(lost)} {'does' if len(lost) == 1 else 'do'} not" if lost else ""
        return f"{_join_names(kept)} {'keeps' if len(kept) == 1 else 'keep'} float32’s loss{rest}."
    if lost:
        return f"{_join_names(lost)} {'loses' if len(lost) == 1 else 'lose'} against float32."
    return "None of the recipes could be compared." if of["cannot"] or of["crashed"] else "Float32 beside its twin."


def _join_names(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _make_template_row(row: Mapping[str, Any], style: Any, reach: float, most: float) -> dict[str, Any]:
    """Return one row for the template, with lengths of bars in per cent."""
    return {
        **row,
        "description": recipes.get(row["recipe"]).description,
        "tone": VERDICT_TONES.get(row["verdict"], ""),
        "style": style,
        "dot": None if row["gap"] is None else 50 + 46 * row["gap"] / reach,
        "bytes_width": 100 * (row["bytes_per_parameter"] or 0.0) / most if most else 0.0,
    }
