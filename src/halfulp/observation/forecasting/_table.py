"""A forecast as text: what is wrong, then one line per layer, then what each weight update costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._finding import Finding, listing
from .._text import dtype_name
from ._data import ForecastData, LayerForecast

HEADERS = ("layer", "dtype", "freezes at step", "lr there", "updates lost", "decay lost", "SR: steps to a signal")
COST_HEADERS = ("weights", "bytes per parameter", "in all", "keeps the updates")
_MOST = 40


def as_text(forecast: ForecastData, findings: Sequence[Finding]) -> str:
    """Return the findings, a table of the layers, the costs and the notes."""
    lines = [f"{forecast.rule}, {forecast.schedule} schedule, steps {forecast.start} to {forecast.steps}"]
    lines += ["", *listing(findings)]
    lines += ["", *aligned(HEADERS, map(row, forecast.layers[:_MOST]))]
    if len(forecast.layers) > _MOST:
        lines.append(f"... and {len(forecast.layers) - _MOST} more (.layers)")
    if forecast.costs:
        lines += ["", *aligned(COST_HEADERS, cost_rows(forecast))]
    return "\n".join([*lines, *([""] if forecast.notes else []), *forecast.notes])


def row(layer: LayerForecast) -> tuple[str, ...]:
    """Return the cells of one layer."""
    frozen = "not known" if layer.updates is None else "never" if layer.freeze_step is None else f"{layer.freeze_step}"
    return (
        layer.name,
        dtype_name(layer.dtype),
        frozen if layer.weight_update == "nearest" or layer.updates is None else f"({frozen})",
        "" if layer.freeze_lr is None else f"{layer.freeze_lr:.2g}",
        "" if layer.lost_share is None else f"{layer.lost_share:.0%}",
        "" if layer.decay_lost is None else f"{layer.decay_lost:.0%}",
        "" if layer.noise_steps is None else f"{layer.noise_steps:,.0f}",
    )


def cost_rows(forecast: ForecastData) -> list[tuple[str, ...]]:
    """Return the cells of what each weight update costs."""
    return [
        (cost.weight_update, f"{cost.bytes_per_parameter:g}", size(cost.total), cost.keeps) for cost in forecast.costs
    ]


def size(count: int) -> str:
    """Return a number of bytes in words.

    >>> size(512), size(3 * 10**9)
    ('512 B', '3 GB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def aligned(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return lines with columns of equal width, the first to the left and all others to the right."""
    lines = [tuple(headers), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return ["  ".join(map(_padded, range(len(headers)), line, widths)).rstrip() for line in lines]


def _padded(column: int, cell: str, width: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)
