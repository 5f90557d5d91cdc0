"""The curves over steps: loss, loss scale with skipped steps, gradient exponents, learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._text import plural

Points = list[tuple[int, float | None]]


def history_data(history: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the panels that there are values for; None without any.

    Args:
        history: `StepRecord`s as plain data, in order.
    """
    steps = [int(one["step"]) for one in history]
    skipped = [int(one["step"]) for one in history if one["skipped"]]
    total = sum(one["skipped"] for one in history)
    panels: list[dict[str, Any]] = []
    loss = _points(history, "loss")
    if loss:
        broken = [step for step, value in loss if value is None]
        note = f"× {plural(len(broken), 'step')} with NaN or infinity" if broken else ""
        panels.append({"title": "loss", "lines": [_line("", loss, "--c0")], "crosses": broken, "note": note})
    scales = [(step, math.log2(value) if value else None) for step, value in _points(history, "loss_scale")]
    if any(value is not None for _, value in scales):
        note = f"▲ {plural(total, 'step')} skipped" if total else "no step skipped"
        panels.append(
            {"title": "loss scale", "log": True, "lines": [_line("", scales, "--c6")], "marks": skipped, "note": note}
        )
    pairs = [(int(one["step"]), *one["exponents"]) for one in history if one["exponents"]]
    if pairs:
        lines = [
            _line("largest", [(step, high) for step, _, high in pairs], "--c5"),
            _line("smallest", [(step, low) for step, low, _ in pairs], "--c4", True),
        ]
        panels.append({"title": "gradient exponents of the sites", "log": True, "lines": lines})
    rates = _points(history, "lr")
    if rates:
        panels.append({"title": "learning rate", "zero": True, "lines": [_line("", rates, "--c1")]})
    if not panels:
        return None
    return {"steps": steps, "panels": panels, "words": history_words(history)}


def history_words(history: Sequence[Mapping[str, Any]]) -> str:
    """Return what the curves show, for who cannot see them."""
    said = [f"{len(history):,} steps on record"]
    for key, word in (("loss", "loss"), ("loss_scale", "loss scale"), ("lr", "learning rate")):
        points = _points(history, key)
        found = [value for _, value in points if value is not None]
        if found:
            said.append(f"{word} from {found[0]:.4g} to {found[-1]:.4g}")
        if len(found) < len(points):
            said.append(f"{word} NaN or infinite in {len(points) - len(found):,} of {len(points):,} steps")
    total = sum(one["skipped"] for one in history)
    if total:
        said.append(f"{total} skipped by the scaler")
    return "; ".join(said) + "."


def _line(name: str, points: Points, colour: str, dash: bool = False) -> dict[str, Any]:
    return {"name": name, "points": points, "colour": colour, "dash": dash}


def _points(history: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Steps that have a value, and it in 5 digits; None where it is NaN or infinite, which plain data has in words."""
    found = ((int(one["step"]), one[key]) for one in history if one[key] is not None)
    return [(step, float(f"{value:.5g}") if isinstance(value, int | float) else None) for step, value in found]
