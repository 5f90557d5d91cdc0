"""What a schedule will do to each layer: the size of updates, rounded steps, decay, the step at which it freezes."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ... import formats
from ...formats import Format
from ...rounding import quantize
from .._finding import Finding, format_findings, group_causes_as_dicts
from .._record import to_plain_data
from .._text import name_dtype
from ..page import write_page
from ._inputs import ForecastInputs, TrainedTensor, convert_option_to_float

_SIMULATED_ELEMENTS = 2048
_MOST_SIMULATED_STEPS = 4000
_NOISE_SMOOTHING_STEPS = 31
# Elements whose mean square goes into that of each binade, so that a binade of few elements does not stand on chance.
_PRIOR_ELEMENTS_PER_BINADE = 16
_LARGEST_SIGNAL_SHARE = 0.99
# Weights next to each other whose updates are smoothed, and how many standard deviations of chance are a drift.
_SMOOTHING_WINDOW_OF_NEIGHBOURS = 24
_DEVIATIONS_OF_CLEAR_DRIFT = 4.0
_LEAST_MEAN_SQUARE = 1e-300


@dataclass(frozen=True)
class UpdateModel:
    """A model of the updates u(t) = lr(t) growth(t) (mean + deviation z(t)), z normal of variance 1, per element."""

    # Which of the sampled elements have an update that is not 0; mean and deviation are of them.
    nonzero_mask: Tensor
    mean: Tensor
    deviation: Tensor
    # Factor per coming step: how the optimizer's own averages go on.
    growth_by_step: Tensor
    # Over which z keeps its sign.
    same_sign_steps: float
    # Whether every update has the size of the learning rate, as Lion's.
    is_sign_update: bool
    # Where the sizes are from, in words.
    source: str


def _model_adam_updates(
    trained: TrainedTensor,
    inputs: ForecastInputs,
    index: Tensor,
    weights: Tensor,
    steps: int,
    generator: torch.Generator,
) -> UpdateModel:
    """Return the sizes of Adam's updates m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) (arXiv 1412.6980).

    If gradients were noise of mean 0, the root mean square of that would be `simulate_adam_rms`; where the state shows
    more, the rest is a mean that lasts: with the share s of the mean in the gradients' squares,
    rms^2 = s + (1 - s) noise^2. The mean of an element is drawn from what its own m then says of it, and from the
    weights beside it: those that have walked far are those with a drift, which takes them further.
    """
    beta1, beta2 = (convert_option_to_float(beta) for beta in trained.options["betas"])
    first = _get_first_plain_state(trained, "exp_avg")
    second = _get_first_plain_state(trained, "max_exp_avg_sq", "exp_avg_sq")
    eps = convert_option_to_float(trained.options["eps"])
    run = max(1.0, 0.5 / (1 - beta1)) if beta1 < 1 else 1.0
    step = int(convert_option_to_float(trained.state.get("step", inputs.steps_done))) if first is not None else 0
    own = trained.dtype if second is None else second.dtype
    dtype = torch.float32 if inputs.is_halfulp or own.itemsize == 1 else own
    noise = simulate_adam_rms(beta1, beta2, dtype, step + steps)
    nonzero = torch.ones_like(weights, dtype=torch.bool)
    if first is None or second is None or step < 1:
        deviation = torch.ones_like(weights)
        return UpdateModel(nonzero, torch.zeros_like(weights), deviation, noise[step:], run, False, "Adam's on noise")
    m, v = first.flatten()[index].cpu().double(), second.flatten()[index].cpu().double()
    size = -m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
    nonzero = (m != 0) & size.isfinite()
    size, held = size[nonzero], weights[nonzero]
    if not len(size):
        return UpdateModel(nonzero, size, size, noise[step:], run, False, "the optimizer's state")
    reference = float(noise[step - 1]) ** 2
    drift = _estimate_lasting_mean_updates(size, held).clamp(-1, 1)
    rest = size - drift
    square = _compute_binade_mean_square(rest, held).clamp_min(_LEAST_MEAN_SQUARE)
    noises = reference * (1 - drift.square()).clamp_min(0)
    signal = ((square - noises) / (1 - reference)).clamp(0, _LARGEST_SIGNAL_SHARE) if reference < 1 else square * 0
    spread = (signal * (1 - signal) * reference / square).sqrt()
    drawn = torch.randn(len(size), generator=generator, dtype=torch.float64, device="cpu")
    return UpdateModel(
        nonzero,
        drift + rest * signal / square + spread * drawn,
        (square - signal).clamp_min(0).sqrt(),
        noise[step:] / math.sqrt(reference),
        run,
        False,
        "the optimizer's state",
    )


def _model_sgd_updates(trained: TrainedTensor, index: Tensor, weights: Tensor, steps: int) -> UpdateModel | None:
    """Return the sizes of SGD's updates, its momentum buffer, taken to stay as they are; None without one."""
    momentum = convert_option_to_float(trained.options.get("momentum", 0.0))
    known = _get_first_plain_state(trained, "momentum_buffer")
    if known is None:
        return None
    size = -known.flatten()[index].cpu().double()
    nonzero = (size != 0) & size.isfinite()
    size, held = size[nonzero], weights[nonzero]
    drift = _estimate_lasting_mean_updates(size, held)
    square = _compute_binade_mean_square(size - drift, held) if len(size) else size
    growth = torch.ones(steps, dtype=torch.float64, device="cpu")
    run = max(1.0, 0.5 / (1 - momentum)) if momentum < 1 else 1.0
    return UpdateModel(nonzero, drift, square.sqrt(), growth, run, False, "the momentum buffer")


def _estimate_lasting_mean_updates(size: Tensor, weights: Tensor) -> Tensor:
    """Return the mean update of all elements, and on top of it that of the weights next to each in order, where clear.

    Updates of mean 0 that are averaged over k elements have a mean of about their size / sqrt(k), by chance.
    """
    count = len(size)
    if count < _SMOOTHING_WINDOW_OF_NEIGHBOURS:
        return torch.zeros_like(size)
    order = torch.argsort(weights)
    common = _subtract_chance_from_mean(size.mean(), size.square().mean(), count)
    rest = (size - common)[order]
    centered = torch.arange(count, dtype=torch.int64, device="cpu") - _SMOOTHING_WINDOW_OF_NEIGHBOURS // 2
    begin = centered.clamp(0, count - _SMOOTHING_WINDOW_OF_NEIGHBOURS)

    def average_neighbours(values: Tensor) -> Tensor:
        total = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return (total[begin + _SMOOTHING_WINDOW_OF_NEIGHBOURS] - total[begin]) / _SMOOTHING_WINDOW_OF_NEIGHBOURS

    mean, square = average_neighbours(rest), average_neighbours(rest.square())
    own = _subtract_chance_from_mean(mean, square, _SMOOTHING_WINDOW_OF_NEIGHBOURS)
    return torch.zeros_like(size).scatter(0, order, common + own)


def _subtract_chance_from_mean(mean: Tensor, square: Tensor, count: int) -> Tensor:
    """Return a mean of some numbers less the part that chance explains; 0 where chance may explain it all."""
    chance = (square - mean.square()).clamp_min(0) / count
    share = (1 - chance / mean.square().clamp_min(_LEAST_MEAN_SQUARE)).clamp_min(0)
    return torch.where(mean.square() > _DEVIATIONS_OF_CLEAR_DRIFT**2 * chance, mean * share, 0.0)


def _compute_binade_mean_square(size: Tensor, weights: Tensor) -> Tensor:
    """Return the mean square of updates in the binade of each weight: updates of small weights may be small too."""
    overall = size.square().mean()
    _, binade = torch.frexp(weights)
    _, inverse = torch.unique(binade, return_inverse=True)
    count = torch.bincount(inverse).double()
    total = torch.bincount(inverse, weights=size.square())
    return ((total + _PRIOR_ELEMENTS_PER_BINADE * overall) / (count + _PRIOR_ELEMENTS_PER_BINADE))[inverse]


@functools.lru_cache(maxsize=8)
def simulate_adam_rms(beta1: float, beta2: float, dtype: torch.dtype, steps: int) -> Tensor:
    """Return the root mean square of Adam's normalized update at each step from the first, on gradients N(0, 1).

    In float32 it goes from 1 to sqrt((1 - beta1) / (1 + beta1)) as the averages fill. Moments that are rounded to
    bfloat16 at each operation, as torch's loop does, follow other averages: a second moment that cannot decay any more
    stays larger. So the recurrence itself is run, in the moments' dtype; the last size stands for all beyond.

    >>> round(float(simulate_adam_rms(0.9, 0.95, torch.float32, 200)[-1]), 1)
    0.2
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    m = torch.zeros(_SIMULATED_ELEMENTS, dtype=dtype, device="cpu")
    v = torch.zeros_like(m)
    sizes = []
    for step in range(1, min(steps, _MOST_SIMULATED_STEPS) + 1):
        g = torch.randn(_SIMULATED_ELEMENTS, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        size = m.float() / (1 - beta1**step) / (v.float() / (1 - beta2**step)).sqrt()
        sizes.append(size[size.isfinite()].square().mean())
    squares = torch.stack(sizes).double()
    total = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
    at = torch.arange(steps, dtype=torch.int64, device="cpu").clamp_max(len(squares) - 1)
    # Steps at the start differ from each other: the window is no wider than what lies before it.
    half = at.clamp_max(_NOISE_SMOOTHING_STEPS // 2)
    low, high = at - half, (at + half + 1).clamp_max(len(squares))
    return ((total[high] - total[low]) / (high - low)).sqrt()


def _get_first_plain_state(trained: TrainedTensor, *names: str) -> Tensor | None:
    """Return the first of some states that is there as plain floating-point numbers, one per element."""
    for name in names:
        state = trained.state.get(name)
        if isinstance(state, Tensor) and state.is_floating_point() and state.shape == trained.value.shape:
            return state.detach()
    return None


@dataclass(frozen=True)
class LayerForecast:
    """One parameter under a schedule, its updates rounded to nearest unless its optimizer does better.

    Attributes:
        name: qualified.
        dtype: of the weights.
        elements: how many.
        weight_update: of halfulp's optimizers; "nearest" for every other.
        updates: where the size of its updates is known from, in words; None where nothing tells it, and then steps
            and shares are None or empty.
        update_size: root mean square of an update over the learning rate, now.
        lr: the largest learning rate to come.
        freeze_step: the first step of the schedule from which on fewer than 1% of the nonzero updates change their
            element; None if there is none. The first step to come if that holds already.
        freeze_lr: the learning rate there.
        after_freeze: share of the learning rates to come that comes after it, which trains nothing; 0 without one.
        lost: (step, share of nonzero updates that change nothing) at steps spread over the schedule.
        lost_share: the mean of that share, each step weighed by its learning rate.
        weight_decay: decoupled; 0 without.
        decay_lost: share of the decoupled weight decay that rounding drops; None without one, negative if rounding
            makes more of it.
    """

    name: str
    dtype: torch.dtype
    elements: int
    weight_update: str = "nearest"
    updates: str | None = None
    update_size: float | None = None
    lr: float = 0.0
    freeze_step: int | None = None
    freeze_lr: float | None = None
    after_freeze: float = 0.0
    lost: tuple[tuple[int, float], ...] = ()
    lost_share: float | None = None
    weight_decay: float = 0.0
    decay_lost: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        return dict(to_plain_data(self))


_MOST_LAYER_LINES = 40


@dataclass(frozen=True)
class Forecast:
    """The predicted effect of rounding on a training under a schedule; `hu.forecast` makes it.

    `str()` is a table of the layers with the findings before it.

    Attributes:
        layers: in the model's order.
        rule: the optimizer's update rule.
        start, steps: steps made so far, and of the whole run.
        notes: what could not be read or is not known, in sentences.
        learning_rates: (step, learning rate of the first group) at steps spread over the schedule.
        is_halfulp: whether the optimizer is one of halfulp's.
        findings: the plan's problems, the worst first.
    """

    layers: tuple[LayerForecast, ...]
    rule: str
    schedule: str
    start: int
    steps: int
    notes: tuple[str, ...] = ()
    learning_rates: tuple[tuple[int, float], ...] = ()
    is_halfulp: bool = False
    findings: list[Finding] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold: findings, layers, and what the schedule was."""
        return {
            "findings": [finding.to_dict() for finding in self.findings],
            "causes": group_causes_as_dicts(self.findings),
            "layers": [layer.to_dict() for layer in self.layers],
            "rule": self.rule,
            "schedule": self.schedule,
            "start": self.start,
            "steps": self.steps,
            "learning_rates": [list(pair) for pair in self.learning_rates],
            "notes": list(self.notes),
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all.

        Raises:
            ValueError: jinja2 is missing, or the file cannot be written.
        """
        write_page("forecast", self.to_dict(), path)

    def __str__(self) -> str:
        lines = [f"{self.rule}, {self.schedule} schedule, steps {self.start} to {self.steps}"]
        lines += ["", *format_findings(self.findings)]
        rows = [("layer", "dtype", "freezes at step", "lr there", "updates lost", "decay lost")]
        for layer in self.layers[:_MOST_LAYER_LINES]:
            frozen = "never" if layer.freeze_step is None else f"{layer.freeze_step}"
            frozen = frozen if layer.weight_update == "nearest" else f"({frozen})"
            numbers = ((layer.freeze_lr, ".2g"), (layer.lost_share, ".0%"), (layer.decay_lost, ".0%"))
            lr, lost, decay = ("" if value is None else format(value, spec) for value, spec in numbers)
            step = "not known" if layer.updates is None else frozen
            rows.append((layer.name, name_dtype(layer.dtype), step, lr, lost, decay))
        first, *widths = (max(map(len, column)) for column in zip(*rows))
        lines.append("")
        for name, *cells in rows:
            aligned = (cell.rjust(width) for cell, width in zip(cells, widths))
            lines.append("  ".join([name.ljust(first), *aligned]).rstrip())
        if len(self.layers) > _MOST_LAYER_LINES:
            lines.append(f"... and {len(self.layers) - _MOST_LAYER_LINES} more (.layers)")
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])


def find_neighbour_gaps(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Return the distances from each number to the next larger and the next smaller one of a format.

    A number in [2^e, 2^(e+1)) has neighbours at 2^(e - mantissa_bits), 2^emin's binade and the subnormals below it
    alike; from a power of two towards zero it is half of that, unless it is the smallest normal number.

    >>> from halfulp import formats
    >>> [gap.tolist() for gap in find_neighbour_gaps(torch.tensor([1.0, -1.0, 1.5], dtype=torch.float64), formats.bf16)]
    [[0.0078125, 0.00390625, 0.0078125], [0.00390625, 0.0078125, 0.0078125]]
    """
    significand, exponent = torch.frexp(values.abs())
    exponent = torch.where(values == 0, format.emin, exponent - 1).clamp_min(format.emin)
    outward = torch.ldexp(torch.ones_like(values), exponent - format.mantissa_bits)
    inward = torch.where((significand == 0.5) & (exponent > format.emin), outward / 2, outward)
    negative = values < 0
    return torch.where(negative, inward, outward), torch.where(negative, outward, inward)


# A layer counts as frozen when fewer than this share of its nonzero updates change their element.
MOVED_SHARE_IF_FROZEN = 0.01
_LARGEST_POISSON_MEAN = 1e6


def simulate_weight_walk(
    weights: Tensor,
    sizes: UpdateModel,
    rates: Tensor,
    format: Format,
    *,
    decay: float,
    decays_separately: bool,
    max_leaps: int,
    generator: torch.Generator,
) -> tuple[Tensor, float, float]:
    """Follow weights that are rounded to nearest after every update.

    An update u moves a number with neighbours at distances a (up) and b (down) where u > a / 2 or u < -b / 2. With u
    normal these are two probabilities per element, whose mean is the share that moves. The weights then go on by as
    many whole distances as a Poisson number of such moves takes them, several steps in one leap (tau-leaping,
    Gillespie, J. Chem. Phys. 115, 1716, 2001); elements whose updates are larger than their spacing walk
    without rounding. So weights that leave for larger binades, where nothing moves them any more, are accounted for.

    Decoupled weight decay is rounded by itself before the update, as torch's loops do, where it is `decays_separately`.

    Returns:
        Per coming step the expected share of nonzero updates that change their element; then, of weight decay that is
        rounded by itself, the sums of |change| that are wanted and made, 0 without one.
    """
    steps = len(rates)
    stride = max(1, math.ceil(steps / max_leaps))
    shares = torch.zeros(steps, dtype=torch.float64, device="cpu")
    wanted = made = 0.0
    for begin in range(0, steps, stride):
        end = min(steps, begin + stride)
        middle = (begin + end - 1) // 2
        rate, growth = float(rates[middle]), float(sizes.growth_by_step[middle])
        # A group's own step may be too small for float64's normal numbers: nothing moves then.
        if rate == 0:
            continue
        mean = rate * growth * sizes.mean - (0.0 if decays_separately else rate * decay) * weights
        up, down = find_neighbour_gaps(weights, format)
        deviation = rate * growth * sizes.deviation
        if sizes.is_sign_update:
            rises, falls = (mean + deviation > up / 2).double() / 2, (deviation - mean > down / 2).double() / 2
        else:
            spread = deviation.clamp_min(torch.finfo(torch.float64).tiny)
            rises = torch.special.ndtr((mean - up / 2) / spread)
            falls = torch.special.ndtr((-mean - down / 2) / spread)
        shares[begin:end] = (rises + falls).mean()
        count = end - begin
        if decays_separately and decay:  # w (1 - lr weight_decay), rounded at each step
            once = quantize(weights * (1 - rate * decay), format, overflow="saturate")
            wanted += float(weights.abs().sum()) * rate * decay * count
            made += float((weights.abs() - once.abs()).sum()) * count
            decayed = quantize(weights * (1 - rate * decay) ** count, format, overflow="saturate")
            weights = torch.where(once != weights, decayed, weights)
        ups, downs = (
            torch.poisson((chance * count).clamp_max(_LARGEST_POISSON_MEAN), generator=generator)
            for chance in (rises, falls)
        )
        drawn = torch.randn(len(weights), generator=generator, dtype=torch.float64, device="cpu")
        walked = weights + count * mean + drawn * deviation * math.sqrt(2 * sizes.same_sign_steps * count)
        free = torch.maximum(up, down) < 2 * (deviation + mean.abs())
        weights = quantize(torch.where(free, walked, weights + ups * up - downs * down), format, overflow="saturate")
    return shares, wanted, made


def find_freeze_step(moved_share: Tensor, count: int, same_sign_steps: float) -> int | None:
    """Return the first step from which on fewer than MOVED_SHARE_IF_FROZEN of the nonzero updates change their element.

    `moved_share` is the expected share per step, 0 where nothing is updated.
    Of `count` elements some k = ceil(MOVED_SHARE_IF_FROZEN count) have to move for the step to be above. Their number
    is Poisson's with mean moved * count, so that it is above with probability P(k, moved count), the regularized
    incomplete gamma function; updates keep their sign over `same_sign_steps`, in which a layer has one chance and not
    many, and one at the end too. Returned is the first step from which on it is as likely as not that no step is above.

    >>> find_freeze_step(torch.tensor([0.5, 0.1, 0.001, 0.0001], dtype=torch.float64), 10**6, 1.0)
    2
    """
    least = torch.full_like(moved_share, float(math.ceil(MOVED_SHARE_IF_FROZEN * count)))
    above = torch.special.gammainc(least, (moved_share * count).clamp_min(1e-300))
    none = torch.log1p(-above.clamp_max(1 - 1e-15)).flip(0)
    none_from = torch.minimum(none.cumsum(0) / same_sign_steps, none.cummin(0).values).flip(0)
    found = (none_from >= math.log(0.5)).nonzero()
    return int(found[0]) if len(found) else None


# Elements of a run that is read together where not all are: a page of memory holds many of them.
_SAMPLE_RUN_ELEMENTS = 64
_MOST_SHOWN_STEPS = 12


def forecast_parameter_updates(
    trained: TrainedTensor, inputs: ForecastInputs, rates: Tensor, *, start: int, sample: int, max_leaps: int, seed: int
) -> LayerForecast:
    """Return the forecast of one parameter, by a sample of its elements."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    elements, options = trained.value.numel(), trained.options
    index = sample_positions(elements, sample)
    weights = trained.value.flatten()[index].cpu().to(trained.dtype).double()
    finite = weights.isfinite()
    index, weights = index[finite], weights[finite]
    decoupled = inputs.rule in ("AdamW", "Lion") or options.get("decoupled_weight_decay")
    decay = convert_option_to_float(options.get("weight_decay", 0.0)) if decoupled else 0.0
    lr = float(rates.max())
    layer = LayerForecast(trained.name, trained.dtype, elements, trained.weight_update, lr=lr, weight_decay=decay)
    if not len(weights):
        return layer
    sizes: UpdateModel | None
    if inputs.rule == "Lion":
        every, growth = torch.ones_like(weights), torch.ones(len(rates), dtype=torch.float64, device="cpu")
        sizes = UpdateModel(every.bool(), every * 0, every, growth, 1.0, True, "Lion's are the learning rate")
    elif inputs.rule == "SGD":
        sizes = _model_sgd_updates(trained, index, weights, len(rates))
    else:
        sizes = _model_adam_updates(trained, inputs, index, weights, len(rates), generator)
    if sizes is None:
        return layer
    updated = weights[sizes.nonzero_mask]
    if not len(updated):
        return replace(layer, updates=sizes.source, update_size=0.0)
    repeats = max(1, min(8, sample // len(updated)))
    moved, decay_wanted, decay_made = simulate_weight_walk(
        updated.repeat(repeats),
        replace(sizes, mean=sizes.mean.repeat(repeats), deviation=sizes.deviation.repeat(repeats)),
        rates,
        formats.get(trained.dtype),
        decay=decay,
        decays_separately=not inputs.is_halfulp and not options.get("fused"),
        max_leaps=max_leaps,
        generator=generator,
    )
    square = (sizes.mean.square() + sizes.deviation.square()).mean()
    # Where the rate is 0 there is no update that could be lost.
    active = int((rates > 0).nonzero().amax()) + 1 if lr > 0 else 0
    count = max(1, round(len(updated) / len(weights) * elements))
    step = find_freeze_step(moved[:active], count, sizes.same_sign_steps)
    shown = torch.linspace(0, active - 1, min(_MOST_SHOWN_STEPS, active), dtype=torch.float64, device="cpu")
    return replace(
        layer,
        updates=sizes.source,
        update_size=1.0 if sizes.is_sign_update else float(square.sqrt()),
        decay_lost=1 - decay_made / decay_wanted if decay_wanted else None,
        freeze_step=None if step is None else start + step,
        freeze_lr=None if step is None else float(rates[step]),
        after_freeze=0.0 if step is None else float(rates[step:].sum() / rates.sum()),
        lost=tuple((start + at, 1 - float(moved[at])) for at in shown.long().unique().tolist()),
        lost_share=1 - float((moved * rates).sum() / rates.sum()) if rates.sum() > 0 else 0.0,
    )


def sample_positions(element_count: int, max_count: int) -> Tensor:
    """Return the positions of a sample: all elements, or runs of neighbours at even distances.

    >>> sample_positions(3, 10).tolist(), len(sample_positions(10**6, 1024)), int(sample_positions(10**6, 1024)[-1])
    ([0, 1, 2], 1024, 999999)
    """
    if element_count <= max_count:
        return torch.arange(element_count, dtype=torch.int64, device="cpu")
    runs = max(1, max_count // _SAMPLE_RUN_ELEMENTS)
    begins = torch.linspace(0, element_count - _SAMPLE_RUN_ELEMENTS, runs, dtype=torch.float64, device="cpu").long()
    return (begins[:, None] + torch.arange(_SAMPLE_RUN_ELEMENTS, dtype=torch.int64, device="cpu")).flatten()
