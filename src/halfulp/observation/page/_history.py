"""The curves over steps: loss, loss scale with skipped steps, gradient exponents, learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Values = list[float | None]


def history_data(history: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the panels that there are values for; None without any.

    Args:
        history: `StepRecord`s as plain data, in order.
    """
    steps = [int(one["step"]) for one in history]
    skipped = [int(one["step"]) for one in history if one["skipped"]]
    total = sum(one["skipped"] for one in history)
    panels: list[dict[str, Any]] = []
    loss = _numbers(history, "loss")
    if any(value is not None for value in loss):
        panels.append({"title": "loss", "lines": [_line("", loss, "--c0")]})
    scales = [math.log2(value) if value else None for value in _numbers(history, "loss_scale")]
    if any(value is not None for value in scales):
        note = f"▲ {total} step{'' if total == 1 else 's'} skipped" if total else "no step skipped"
        panels.append(
            {"title": "loss scale", "log": True, "lines": [_line("", scales, "--c6")], "marks": skipped, "note": note}
        )
    pairs = [one["exponents"] or (None, None) for one in history]
    if any(pair[0] is not None for pair in pairs):
        lines = [
            _line("largest", [pair[1] for pair in pairs], "--c5"),
            _line("smallest", [pair[0] for pair in pairs], "--c4", True),
        ]
        panels.append({"title": "gradient exponents of the sites", "log": True, "lines": lines})
    rates = _numbers(history, "lr")
    if any(value is not None for value in rates):
        panels.append({"title": "learning rate", "zero": True, "lines": [_line("", rates, "--c1")]})
    if not panels:
        return None
    return {"steps": steps, "panels": panels, "words": history_words(history)}


def history_words(history: Sequence[Mapping[str, Any]]) -> str:
    """Return what the curves show, for who cannot see them."""
    said = [f"{len(history):,} steps on record"]
    for key, word in (("loss", "loss"), ("loss_scale", "loss scale"), ("lr", "learning rate")):
        found = [value for value in _numbers(history, key) if value is not None]
        if found:
            said.append(f"{word} from {found[0]:.4g} to {found[-1]:.4g}")
    total = sum(one["skipped"] for one in history)
    if total:
        said.append(f"{total} skipped by the scaler")
    return "; ".join(said) + "."


def _line(name: str, values: Values, colour: str, dash: bool = False) -> dict[str, Any]:
    return {"name": name, "values": values, "colour": colour, "dash": dash}


def _numbers(history: Sequence[Mapping[str, Any]], key: str) -> Values:
    """One value per step in 5 digits; None where there is none, or no number."""
    found = (one[key] for one in history)
    return [float(f"{value:.5g}") if isinstance(value, int | float) else None for value in found]
