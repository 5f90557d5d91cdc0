"""What an emulation rounded, as a table of words."""

from __future__ import annotations

from ._rounder import Unit


def describe(unit: Unit, off_format: dict[str, int]) -> str:
    """Every operator seen, most roundings first, and what is not in the format.

    Args:
        unit: whose tally it is.
        off_format: numbers that the format lacks, by parameter or buffer.
    """
    lines = [
        f"{unit.format.name}, {unit.rounding.name} rounding: {unit.forward.total()} tensors rounded forward, "
        f"{unit.backward.total()} gradients backward"
    ]
    lines += _section("forward", unit.forward, "tensors rounded")
    lines += _section("backward", unit.backward, "gradients rounded")
    lines += _section("inside the operator, in float32", unit.kept, "statistics kept for the backward pass")
    lines += _section("not rounded", _only(unit), "calls without new floating numbers")
    lines += _section(f"not in {unit.format.name}", off_format, "numbers, read as they are")
    return "\n".join(lines)


def _only(unit: Unit) -> dict[str, int]:
    return {name: count for name, count in unit.plain.items() if count and not unit.forward[name]}


def _section(title: str, counts: dict[str, int], what: str) -> list[str]:
    shown = {name: count for name, count in counts.items() if count}
    if not shown:
        return []
    width = max(map(len, shown))
    ordered = sorted(shown.items(), key=lambda item: (-item[1], item[0]))
    return [f"  {title} ({what})", *(f"    {name:{width}}  {count}" for name, count in ordered)]
