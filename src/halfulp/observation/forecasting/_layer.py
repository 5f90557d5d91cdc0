"""The forecast of one parameter: a sample of its elements, followed to the end of the schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import formats
from ...formats import Format
from ._data import LayerForecast
from ._inputs import Inputs, Trained, number
from ._rounded_walk import FROZEN, Walk, freeze_step, walk
from ._spacing import gaps
from ._update_sizes import UpdateSizes, second_moment, update_sizes

# Elements of a run that is read together where not all are: a page of memory holds many of them.
_RUN = 64
_SHOWN = 12
# The chance to lie before the range, and after it, and where a normal number has it.
_EDGE = 0.05
_EDGES = 1.645
# Gradients change as a training goes on: until the end of its schedule the updates of nine in ten layers stayed within
# this share of their size when they were forecast (docs/forecast.md).
_MARGIN = 0.5


def forecast_layer(
    trained: Trained, inputs: Inputs, rates: Tensor, *, start: int, sample: int, leaps: int, seed: int
) -> LayerForecast:
    """Return the forecast of one parameter.

    Args:
        trained: the parameter.
        inputs: what all parameters share.
        rates: float64, the learning rate at each coming step.
        start: steps made so far.
        sample: most elements to follow.
        leaps: most leaps through the schedule.
        seed: of the walk.
    """
    format = formats.get(trained.dtype)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    index = sample_of(trained.value.numel(), sample)
    weights = trained.value.flatten()[index].cpu().to(trained.dtype).double()
    finite = weights.isfinite()
    index, weights = index[finite], weights[finite]
    decay = _decoupled_decay(trained, inputs.rule)
    options = {name: number(trained.options[name]) for name in ("eps",) if name in trained.options}
    common = {
        "name": trained.name,
        "dtype": trained.dtype,
        "elements": trained.value.numel(),
        "weight_update": trained.weight_update,
        "lr": float(rates.max()),
        "weight_decay": decay,
        "eps": options.get("eps"),
        "beta2": number(trained.options["betas"][1]) if inputs.rule.startswith("Adam") else None,
        "denominator": _denominator(trained, inputs),
    }
    sizes = update_sizes(trained, inputs, index, weights, len(rates), generator) if len(weights) else None
    if sizes is None:
        return LayerForecast(**common)  # type: ignore[arg-type]
    held = weights[sizes.nonzero]
    if not len(held):
        return LayerForecast(**common, updates=sizes.source, update_size=0.0)  # type: ignore[arg-type]
    apart = not inputs.ours and not trained.options.get("fused")
    repeats = max(1, min(8, sample // len(held)))
    walked = walk(
        held.repeat(repeats),
        sizes.repeated(repeats),
        rates,
        format,
        decay=decay,
        apart=apart,
        leaps=leaps,
        generator=generator,
        margin=_MARGIN,
    )
    sampling = _EDGES / math.sqrt(FROZEN * len(held)) if len(index) < trained.value.numel() else 0.0
    count = max(1, round(len(held) / len(weights) * trained.value.numel()))
    return LayerForecast(
        **common,  # type: ignore[arg-type]
        updates=sizes.source,
        update_size=sizes.rms,
        decay_lost=1 - walked.decay_made / walked.decay_wanted if walked.decay_wanted else None,
        **_freezing(walked, rates, count, sampling, sizes, start),  # type: ignore[arg-type]
        **_noise(held, sizes, rates, format),  # type: ignore[arg-type]
    )


def sample_of(elements: int, most: int) -> Tensor:
    """Return the positions of a sample: all elements, or runs of neighbours at even distances.

    >>> sample_of(3, 10).tolist(), len(sample_of(10**6, 1024)), int(sample_of(10**6, 1024)[-1])
    ([0, 1, 2], 1024, 999999)
    """
    if elements <= most:
        return torch.arange(elements, dtype=torch.int64, device="cpu")
    runs = max(1, most // _RUN)
    begins = torch.linspace(0, elements - _RUN, runs, dtype=torch.float64, device="cpu").long()
    return (begins[:, None] + torch.arange(_RUN, dtype=torch.int64, device="cpu")).flatten()


def _freezing(
    walked: Walk, rates: Tensor, count: int, sampling: float, sizes: UpdateSizes, start: int
) -> dict[str, object]:
    """When it freezes, and which share of its updates is lost when.

    `sampling` is how far the share that moves may be off, relative to itself, as only a sample was followed.
    """
    after = (rates > 0).nonzero()
    # Where the rate is 0 there is no update that could be lost.
    last = int(after[-1]) if len(after) else -1

    moved = walked.moved[: last + 1]
    step = freeze_step(moved, count, sizes.run)
    fewer, more = walked.fewer[: last + 1], walked.more[: last + 1]
    low = freeze_step(fewer * max(0.0, 1 - sampling), count, sizes.run, _EDGE)
    high = freeze_step(more * (1 + sampling), count, sizes.run, 1 - _EDGE)
    shown = torch.linspace(0, last, min(_SHOWN, last + 1), dtype=torch.float64, device="cpu").long().unique().tolist()
    weighed = float((walked.moved * rates).sum() / rates.sum()) if rates.sum() > 0 else 1.0
    return {
        "freeze_step": None if step is None else start + step,
        "freeze_lr": None if step is None else float(rates[step]),
        "freeze_range": tuple(None if edge is None else start + edge for edge in (low, high)),
        "after_freeze": 0.0 if step is None else float(rates[step:].sum() / rates.sum()),
        "lost": tuple((start + at, 1 - float(walked.moved[at])) for at in shown),
        "lost_share": 1 - weighed,
    }


def _noise(weights: Tensor, sizes: UpdateSizes, rates: Tensor, format: Format) -> dict[str, float]:
    """Where stochastic rounding's noise is as large as the drift.

    An update u below the spacing d is rounded up with probability u / d (Croci et al., Royal Society Open Science 9,
    211631, 2022): the mean is u, the variance u (d - u). After n updates of one sign the drift is n u and the noise
    sqrt(n u (d - u)); they are equal at n = (d - u) / u, a drift of d - u: one spacing, however small u is.
    """
    up, down = gaps(weights, format)
    spacing = float(torch.minimum(up, down).median())
    update = sizes.rms * sizes.growth * rates
    below = (update / spacing).clamp_max(1)
    # Updates above the spacing leave a fraction of it to be rounded, whose variance is d^2 / 6 on average.
    variance = torch.where(below < 1, update * (spacing - update), spacing**2 / 6)
    largest, drift = float(update.max()), float(update.sum())
    # Weighed by itself: where most of the schedule's movement is.
    mean_rate = float(rates.square().sum() / rates.sum()) if rates.sum() > 0 else 0.0
    smallest = torch.sort(torch.minimum(up, down)).values / 2
    return {
        "freeze_update": float(smallest[min(len(smallest) - 1, math.ceil(FROZEN * len(smallest)) - 1)]),
        "relative": sizes.rms * mean_rate / float(weights.abs().median().clamp_min(1e-30)),
        "noise_drift": max(0.0, spacing - largest),
        "noise_steps": max(0.0, spacing / largest - 1) if largest else math.inf,
        "noise_over_drift": float(variance.sum()) ** 0.5 / drift if drift else math.inf,
    }


def _decoupled_decay(trained: Trained, rule: str) -> float:
    decoupled = rule in ("AdamW", "Lion") or trained.options.get("decoupled_weight_decay")
    return number(trained.options.get("weight_decay", 0.0)) if decoupled else 0.0


def _denominator(trained: Trained, inputs: Inputs) -> torch.dtype | None:
    """The dtype in which torch's loops add eps: the states', which is the parameter's."""
    if not inputs.rule.startswith("Adam") or inputs.ours or trained.options.get("fused"):
        return None
    return second_moment(trained.state) or trained.dtype
