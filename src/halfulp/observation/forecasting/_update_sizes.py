"""How large an optimizer's updates are, in units of the learning rate: from its state where there is one."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._inputs import Inputs, Trained, number

_SIMULATED = 2048
_LONGEST = 4000
_SMOOTHING = 31
# Elements whose mean square goes into that of each binade, so that a binade of few elements does not stand on chance.
_PRIOR = 16
_MOST_SIGNAL = 0.99
# Weights next to each other whose updates are smoothed, and how many standard deviations of chance are a drift.
_NEIGHBOURS = 24
_CLEAR = 4.0
_TINY = 1e-300


@dataclass(frozen=True)
class UpdateSizes:
    """A model of the updates u(t) = lr(t) growth(t) (mean + deviation z(t)), z normal of variance 1, per element.

    Attributes:
        nonzero: which of the sampled elements have an update that is not 0.
        mean: the part that keeps its sign from step to step, per sampled element.
        deviation: the part that does not.
        growth: factor per coming step, from now; how the optimizer's own averages go on.
        run: steps over which z keeps its sign.
        is_sign: whether every update has the size of the learning rate, as Lion's.
        source: where the sizes are from, in words.
    """

    nonzero: Tensor
    mean: Tensor
    deviation: Tensor
    growth: Tensor
    run: float
    is_sign: bool
    source: str

    def repeated(self, times: int) -> UpdateSizes:
        """Repeat the sample as many times, one copy after the other."""
        return replace(self, mean=self.mean.repeat(times), deviation=self.deviation.repeat(times))

    @property
    def rms(self) -> float:
        """Root mean square of the update over the learning rate, now."""
        if self.is_sign:
            return 1.0
        return float((self.mean.square() + self.deviation.square()).mean().sqrt())


def model_update_sizes(
    trained: Trained, inputs: Inputs, index: Tensor, weights: Tensor, steps: int, generator: torch.Generator
) -> UpdateSizes | None:
    """Return the updates of a sample of a parameter's elements; None where nothing tells their size.

    Args:
        index: positions of the sample among the flattened elements.
    """
    if inputs.rule == "Lion":
        return UpdateSizes(
            torch.ones_like(weights, dtype=torch.bool),
            torch.zeros_like(weights),
            torch.ones_like(weights),
            torch.ones(steps, dtype=torch.float64, device="cpu"),
            1.0,
            True,
            "Lion's are the learning rate",
        )
    if inputs.rule == "SGD":
        return _sgd(trained, index, weights, steps)
    return _adam(trained, inputs, index, weights, steps, generator)


def _adam(
    trained: Trained, inputs: Inputs, index: Tensor, weights: Tensor, steps: int, generator: torch.Generator
) -> UpdateSizes:
    """Return the sizes of Adam's updates m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) (arXiv 1412.6980).

    If gradients were noise of mean 0, the root mean square of that would be `compute_noise_size`; where the state shows
    more, the rest is a mean that lasts: with the share s of the mean in the gradients' squares,
    rms^2 = s + (1 - s) noise^2. The mean of an element is drawn from what its own m then says of it, and from the
    weights beside it: those that have walked far are those with a drift, which takes them further.
    """
    beta1, beta2 = (number(beta) for beta in trained.options["betas"])
    first, second = _state(trained, "exp_avg"), _state(trained, "max_exp_avg_sq", "exp_avg_sq")
    eps = number(trained.options["eps"])
    run = max(1.0, 0.5 / (1 - beta1)) if beta1 < 1 else 1.0
    step = int(number(trained.state.get("step", inputs.start))) if first is not None else 0
    own = trained.dtype if second is None else second.dtype
    dtype = torch.float32 if inputs.ours else own
    noise = compute_noise_size(
        beta1, beta2, dtype if dtype.itemsize > 1 else torch.float32, min(step + steps, _LONGEST)
    )
    noise = torch.cat([noise, noise[-1:].expand(max(0, step + steps - len(noise)))])
    nonzero = torch.ones_like(weights, dtype=torch.bool)
    if first is None or second is None or step < 1:
        growth = noise[step : step + steps]
        deviation = torch.ones_like(weights)
        return UpdateSizes(nonzero, torch.zeros_like(weights), deviation, growth, run, False, "Adam's on noise")
    m, v = first.flatten()[index].cpu().double(), second.flatten()[index].cpu().double()
    size = -m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
    nonzero = (m != 0) & size.isfinite()
    size, held = size[nonzero], weights[nonzero]
    if not len(size):
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        return UpdateSizes(nonzero, nothing, nothing, noise[step:], run, False, "the optimizer's state")
    reference = float(noise[step - 1]) ** 2
    drift = _drift(size, held).clamp(-1, 1)
    rest = size - drift
    square = _mean_square(rest, held).clamp_min(_TINY)
    noises = reference * (1 - drift.square()).clamp_min(0)
    signal = ((square - noises) / (1 - reference)).clamp(0, _MOST_SIGNAL) if reference < 1 else square * 0
    spread = (signal * (1 - signal) * reference / square).sqrt()
    drawn = torch.randn(len(size), generator=generator, dtype=torch.float64, device="cpu")
    return UpdateSizes(
        nonzero,
        drift + rest * signal / square + spread * drawn,
        (square - signal).clamp_min(0).sqrt(),
        noise[step : step + steps] / math.sqrt(reference),
        run,
        False,
        "the optimizer's state",
    )


def _sgd(trained: Trained, index: Tensor, weights: Tensor, steps: int) -> UpdateSizes | None:
    """Return the sizes of SGD's updates, its momentum buffer or the gradient, taken to stay as they are."""
    momentum = number(trained.options.get("momentum", 0.0))
    known, source = _state(trained, "momentum_buffer"), "the momentum buffer"
    if known is None and trained.gradient is not None and trained.gradient.shape == trained.value.shape:
        known, source = trained.gradient.detach(), "the gradient"
        # Gradients of mean 0 add up to a buffer of that much more (the sum of momentum^(2 k)).
        known = known.double() / math.sqrt(1 - momentum**2) if momentum < 1 else known
    if known is None:
        return None
    size = -known.flatten()[index].cpu().double()
    nonzero = (size != 0) & size.isfinite()
    size, held = size[nonzero], weights[nonzero]
    drift = _drift(size, held)
    square = _mean_square(size - drift, held) if len(size) else size
    growth = torch.ones(steps, dtype=torch.float64, device="cpu")
    run = max(1.0, 0.5 / (1 - momentum)) if momentum < 1 else 1.0
    return UpdateSizes(nonzero, drift, square.sqrt(), growth, run, False, source)


def _drift(size: Tensor, weights: Tensor) -> Tensor:
    """Return the mean update of all elements, and on top of it that of the weights next to each in order, where clear.

    Updates of mean 0 that are averaged over k elements have a mean of about their size / sqrt(k), by chance.
    """
    count = len(size)
    if count < _NEIGHBOURS:
        return torch.zeros_like(size)
    order = torch.argsort(weights)
    common = _clear(size.mean(), size.square().mean(), count)
    rest = (size - common)[order]
    begin = (torch.arange(count, dtype=torch.int64, device="cpu") - _NEIGHBOURS // 2).clamp(0, count - _NEIGHBOURS)

    def averaged(values: Tensor) -> Tensor:
        total = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return (total[begin + _NEIGHBOURS] - total[begin]) / _NEIGHBOURS

    own = _clear(averaged(rest), averaged(rest.square()), _NEIGHBOURS)
    return torch.zeros_like(size).scatter(0, order, common + own)


def _clear(mean: Tensor, square: Tensor, count: int) -> Tensor:
    """Return a mean of some numbers less the part that chance explains; 0 where chance may explain it all."""
    chance = (square - mean.square()).clamp_min(0) / count
    share = (1 - chance / mean.square().clamp_min(_TINY)).clamp_min(0)
    return torch.where(mean.square() > _CLEAR**2 * chance, mean * share, 0.0)


def _mean_square(size: Tensor, weights: Tensor) -> Tensor:
    """Return the mean square of updates in the binade of each weight: updates of small weights may be small too."""
    overall = size.square().mean()
    _, binade = torch.frexp(weights)
    _, inverse = torch.unique(binade, return_inverse=True)
    count = torch.bincount(inverse).double()
    total = torch.bincount(inverse, weights=size.square())
    return ((total + _PRIOR * overall) / (count + _PRIOR))[inverse]


@functools.lru_cache(maxsize=8)
def compute_noise_size(beta1: float, beta2: float, dtype: torch.dtype, steps: int) -> Tensor:
    """Return the root mean square of Adam's normalized update at each step from the first, on gradients N(0, 1).

    In float32 it goes from 1 to sqrt((1 - beta1) / (1 + beta1)) as the averages fill. Moments that are rounded to
    bfloat16 at each operation, as torch's loop does, follow other averages: a second moment that cannot decay any more
    stays larger. So the recurrence itself is run, in the moments' dtype.

    >>> round(float(compute_noise_size(0.9, 0.95, torch.float32, 200)[-1]), 1)
    0.2
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    m = torch.zeros(_SIMULATED, dtype=dtype, device="cpu")
    v = torch.zeros_like(m)
    sizes = []
    for step in range(1, steps + 1):
        g = torch.randn(_SIMULATED, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        size = m.float() / (1 - beta1**step) / (v.float() / (1 - beta2**step)).sqrt()
        sizes.append(size[size.isfinite()].square().mean())
    squares = torch.stack(sizes).double()
    total = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
    at = torch.arange(steps, dtype=torch.int64, device="cpu")
    # Steps at the start differ from each other: the window is no wider than what lies before it.
    half = at.clamp_max(_SMOOTHING // 2)
    low, high = at - half, (at + half + 1).clamp_max(steps)
    return ((total[high] - total[low]) / (high - low)).sqrt()


def _state(trained: Trained, *names: str) -> Tensor | None:
    """Return the first of some states that is there as plain floating-point numbers, one per element."""
    for name in names:
        state = trained.state.get(name)
        local = getattr(state, "to_local", None)
        state = local() if local is not None else state
        if isinstance(state, Tensor) and state.is_floating_point() and state.shape == trained.value.shape:
            return state.detach()
    return None


def find_second_moment(state: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the second moment, None without one of floating point."""
    found = state.get("exp_avg_sq")
    return found.dtype if isinstance(found, Tensor) and found.is_floating_point() else None
