"""What an observed trial tells of each layer: how much of its updates took place, and which formats its ranges fit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...observation import Observation, Record, observe
from ...observation._record import FormatCounts, ParameterRecord

# Of a result, what an observed trial has besides.
READINGS = "observed"
SAMPLES = 12
# Formats that parameters can have, by the dtype's name in a recipe.
RANGES = {"bfloat16": "bf16", "float16": "fp16"}


@contextlib.contextmanager
def observing(wanted: bool, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[Any]:
    """Observe a trial, if that is wanted, at about a dozen of its steps; gives the Observation or None."""
    if not wanted:
        yield None
        return
    with observe(model, optimizer, interval=max(1, steps // SAMPLES)) as seen:
        yield seen


def readings(seen: Observation, steps: int) -> dict[str, Any]:
    """Return what an observation of a whole trial says, as plain data.

    Args:
        seen: the observation.
        steps: of the trial.

    Returns:
        ``parameters``: by name, how many ``elements``, in which ``dtype``; the share of wanted movement that was
        ``realised``, the share of updates ``lost`` and the ``noise`` that stochastic rounding would add, None where
        unknown. ``ranges``: by dtype, the largest ``share`` of a tensor's elements that would leave the format's
        range, with its ``role`` and ``name``. ``findings``: as `hu.observe` lists them.
    """
    record = seen.record
    return {
        "parameters": {name: _parameter(record, one, steps) for name, one in record.parameters.items()},
        "ranges": {dtype: _out_of_range(record, format) for dtype, format in RANGES.items()},
        "findings": [finding.to_dict() for finding in seen.findings],
    }


def _parameter(record: Record, one: ParameterRecord, steps: int) -> dict[str, Any]:
    realised = one.update.realised_share
    return {
        "elements": one.numel,
        "dtype": str(one.dtype).removeprefix("torch."),
        "realised": realised if realised is None or math.isfinite(realised) else None,
        "lost": one.update.lost_share,
        "noise": _noise(record, one, steps),
    }


def _noise(record: Record, one: ParameterRecord, steps: int) -> float | None:
    """Return the noise of stochastic rounding over the longest drift that the updates could make.

    An update u below the spacing d is rounded with variance u (d - u), one above it with d^2 / 6 on average (Croci et
    al., Royal Society Open Science 9, 211631, 2022); n of them drift by n u at most.
    """
    update, weight = record.tensors.get(("update", one.name)), record.tensors.get(("weight", one.name))
    if update is None or weight is None or not update.histogram or not weight.histogram:
        return None
    size = _root_mean_square(update.histogram)
    spacing = 2.0 ** _median(weight.histogram) * torch.finfo(one.dtype).eps
    variance = size * (spacing - size) if size < spacing else spacing**2 / 6
    return math.sqrt(variance * steps) / (size * steps)


def _root_mean_square(histogram: dict[int, int]) -> float:
    """Of numbers counted by their powers of two, each in the middle of its binade."""
    squares = sum(count * 4.0 ** (power + 0.5) for power, count in histogram.items())
    return math.sqrt(squares / sum(histogram.values()))


def _median(histogram: dict[int, int]) -> int:
    """Return the power of two that half of the numbers reach.

    >>> _median({-3: 1, 0: 2, 5: 1})
    0
    """
    left = sum(histogram.values()) / 2
    for power in sorted(histogram):
        left -= histogram[power]
        if left <= 0:
            return power
    raise AssertionError("a histogram of nothing")


def _out_of_range(record: Record, format: str) -> dict[str, Any]:
    worst: dict[str, Any] = {"share": 0.0, "role": None, "name": None}
    for (role, name), tensor in record.tensors.items():
        counts = tensor.formats.get(format)
        share = _share(counts) if counts is not None else 0.0
        if role in ("activation", "activation gradient", "weight gradient", "weight") and share > worst["share"]:
            worst = {"share": share, "role": role, "name": name}
    return worst


def _share(counts: FormatCounts) -> float:
    return (counts.underflow + counts.overflow) / counts.elements if counts.elements else 0.0
