"""The table of what an emulation rounded."""

from __future__ import annotations

from ._rounder import Rounder


def describe(rounder: Rounder, off_format: dict[str, int]) -> str:
    """Return the table of all operators seen, most roundings first, and of values outside the format.

    Args:
        rounder: whose tally it is.
        off_format: numbers that the format lacks, by parameter or buffer.
    """
    lines = [
        f"{rounder.format.name}, {rounder.rounding.name} rounding: {rounder.forward.total()} tensors rounded forward, "
        f"{rounder.backward.total()} gradients backward"
    ]
    lines += _format_section("forward", rounder.forward, "tensors rounded")
    lines += _format_section("backward", rounder.backward, "gradients rounded")
    lines += _format_section("inside the operator, in float32", rounder.kept, "statistics kept for the backward pass")
    lines += _format_section("not rounded", _list_unrounded(rounder), "calls without new floating numbers")
    lines += _format_section(f"not in {rounder.format.name}", off_format, "numbers, read as they are")
    return "\n".join(lines)


def _list_unrounded(rounder: Rounder) -> dict[str, int]:
    return {name: count for name, count in rounder.plain.items() if count and not rounder.forward[name]}


def _format_section(title: str, counts: dict[str, int], what: str) -> list[str]:
    shown = {name: count for name, count in counts.items() if count}
    if not shown:
        return []
    width = max(map(len, shown))
    ordered = sorted(shown.items(), key=lambda item: (-item[1], item[0]))
    return [f"  {title} ({what})", *(f"    {name:{width}}  {count}" for name, count in ordered)]
