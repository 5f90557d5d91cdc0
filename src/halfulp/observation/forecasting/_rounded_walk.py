"""A sample of weights under rounded updates, from now to the end of a schedule: which share of updates still moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import Format
from ._spacing import gaps, to_format
from ._update_sizes import UpdateSizes

# A layer counts as frozen when fewer than this share of its nonzero updates change their element.
FROZEN = 0.01
_MANY = 1e6


@dataclass(frozen=True)
class Walk:
    """What became of a sample of one layer's weights.

    Attributes:
        moved: per coming step, the expected share of nonzero updates that change their element.
        fewer, more: the same, were updates smaller and larger by a margin.
        decay_wanted, decay_made: sums of |change| by weight decay that is rounded by itself; 0 without one.
    """

    moved: Tensor
    fewer: Tensor
    more: Tensor
    decay_wanted: float
    decay_made: float


def walk(
    weights: Tensor,
    sizes: UpdateSizes,
    rates: Tensor,
    format: Format,
    *,
    decay: float,
    apart: bool,
    leaps: int,
    generator: torch.Generator,
    margin: float = 0.0,
) -> Walk:
    """Follow weights that are rounded to nearest after every update.

    An update u moves a number with neighbours at distances a (up) and b (down) where u > a / 2 or u < -b / 2. With u
    normal these are two probabilities per element, whose mean is the share that moves. The weights then go on by as
    many whole distances as a Poisson number of such moves takes them, several steps in one leap (tau-leaping,
    Gillespie, J. Chem. Phys. 115, 1716, 2001); elements whose updates are larger than their spacing walk
    without rounding. So weights that leave for larger binades, where nothing moves them any more, are accounted for.

    Args:
        weights: float64 numbers of the format: the elements that have updates.
        sizes: their updates.
        rates: learning rate per coming step.
        format: what the weights are stored in.
        decay: decoupled weight decay; 0 without.
        apart: whether decay is rounded by itself before the update, as torch's loops do, or with it.
        leaps: most leaps to make.
        generator: of the walk.
        margin: share by which updates may become smaller or larger than they are now.
    """
    steps = len(rates)
    stride = max(1, math.ceil(steps / leaps))
    shares = torch.zeros(3, steps, dtype=torch.float64, device="cpu")
    wanted = made = 0.0
    for begin in range(0, steps, stride):
        end = min(steps, begin + stride)
        middle = (begin + end - 1) // 2
        rate, growth = float(rates[middle]), float(sizes.growth[middle])
        # A group's own step may be too small for float64's normal numbers: nothing moves then.
        if rate == 0:
            continue
        mean = rate * growth * sizes.mean - (0.0 if apart else rate * decay) * weights
        up, down = gaps(weights, format)
        deviation = rate * growth * sizes.deviation
        rises, falls = _chances(mean, deviation, up, down, sizes.is_sign)
        shares[0, begin:end] = (rises + falls).mean()
        for row, scale in ((1, 1 - margin), (2, 1 + margin)):
            rises_then, falls_then = _chances(mean * scale, deviation * scale, up, down, sizes.is_sign)
            shares[row, begin:end] = (rises_then + falls_then).mean()
        if apart and decay:
            weights, lost = _decayed(weights, rate * decay, end - begin, format)
            wanted, made = wanted + lost[0], made + lost[1]
        weights = _leap(weights, mean, deviation, (up, down), (rises, falls), end - begin, sizes.run, format, generator)
    return Walk(shares[0], shares[1], shares[2], wanted, made)


def _chances(mean: Tensor, deviation: Tensor, up: Tensor, down: Tensor, is_sign: bool) -> tuple[Tensor, Tensor]:
    """Per element the probability that an update takes it up, and down."""
    if is_sign:
        return ((mean + deviation > up / 2).double() / 2, (deviation - mean > down / 2).double() / 2)
    spread = deviation.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.special.ndtr((mean - up / 2) / spread), torch.special.ndtr((-mean - down / 2) / spread)


def _leap(
    weights: Tensor,
    mean: Tensor,
    deviation: Tensor,
    distances: tuple[Tensor, Tensor],
    chances: tuple[Tensor, Tensor],
    steps: int,
    run: float,
    format: Format,
    generator: torch.Generator,
) -> Tensor:
    """Weights after some steps whose updates have a mean, a deviation, and chances to round up and down."""
    up, down = distances
    ups, downs = (torch.poisson((chance * steps).clamp_max(_MANY), generator=generator) for chance in chances)
    hopped = weights + ups * up - downs * down
    drawn = torch.randn(len(weights), generator=generator, dtype=torch.float64, device="cpu")
    walked = weights + steps * mean + drawn * deviation * math.sqrt(2 * run * steps)
    free = torch.maximum(up, down) < 2 * (deviation + mean.abs())
    return to_format(torch.where(free, walked, hopped), format)


def _decayed(weights: Tensor, factor: float, steps: int, format: Format) -> tuple[Tensor, tuple[float, float]]:
    """Weights after some steps of w (1 - lr weight_decay), each rounded; the |change| wanted, and the one made."""
    once = to_format(weights * (1 - factor), format)
    wanted = float(weights.abs().sum()) * factor * steps
    made = float((weights.abs() - once.abs()).sum()) * steps
    moves = once != weights
    return torch.where(moves, to_format(weights * (1 - factor) ** steps, format), weights), (wanted, made)


def freeze_step(moved: Tensor, count: int, run: float, chance: float = 0.5) -> int | None:
    """Return the first step from which on fewer than FROZEN of the nonzero updates change their element.

    Of `count` elements a whole number k = ceil(FROZEN count) has to move for the step to be above. Their number is
    Poisson's with mean moved * count, so that it is above with probability P(k, moved count), the regularized
    incomplete gamma function; updates keep their sign over `run` steps, in which a layer has one chance and not
    many. Returned is the first step from which on no step is above with probability `chance`.

    Args:
        moved: expected share per step; 0 where nothing is updated.
        count: elements with updates.
        run: steps over which updates are alike.
        chance: 0.5 for the median.

    Returns:
        The index of the step, None where no step of the schedule is it.

    >>> freeze_step(torch.tensor([0.5, 0.1, 0.001, 0.0001], dtype=torch.float64), 10**6, 1.0)
    2
    """
    above = torch.special.gammainc(
        torch.full_like(moved, float(math.ceil(FROZEN * count))), (moved * count).clamp_min(1e-300)
    )
    none = torch.log1p(-above.clamp_max(1 - 1e-15)) / run
    none_from = none.flip(0).cumsum(0).flip(0)
    found = (none_from >= math.log(chance)).nonzero()
    return int(found[0]) if len(found) else None
