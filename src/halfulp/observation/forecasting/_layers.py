"""What a schedule will do to each layer: rounded steps, weight decay, the step from which it is frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import formats, optim
from ...formats import Format
from ._inputs import Inputs, Trained, number
from ._update_sizes import UpdateSizes, find_second_moment, model_update_sizes


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
        freeze_range: steps before which and after which it lies with a chance of 1 in 20 each: what few elements, a
            sample of many, and updates that become a half smaller or larger leave open; an end is None beyond the
            schedule.
        freeze_update: the size of an update, in the weights' unit, below which fewer than 1% change their element.
        after_freeze: share of the learning rates to come that comes after it, which trains nothing; 0 without one.
        lost: (step, share of nonzero updates that change nothing) at steps spread over the schedule.
        lost_share: the mean of that share, each step weighed by its learning rate.
        weight_decay: decoupled; 0 without.
        decay_lost: share of the decoupled weight decay that rounding drops; None without one, negative if rounding
            makes more of it.
        noise_drift: how far a weight drifts by updates of one sign before stochastic rounding's noise is smaller than
            the drift, in the weights' unit; None where updates are unknown.
        noise_steps: how many steps that takes at the largest learning rate to come.
        noise_over_drift: the ratio of the two at the end of the schedule.
        relative: updates over the median weight, at the schedule's mean learning rate; None where unknown.
        beta2, eps: of the optimizer, None without.
        denominator: dtype in which a denominator of rounded numbers is computed, None where in float32.
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
    freeze_range: tuple[int | None, int | None] | None = None
    freeze_update: float | None = None
    after_freeze: float = 0.0
    lost: tuple[tuple[int, float], ...] = ()
    lost_share: float | None = None
    weight_decay: float = 0.0
    decay_lost: float | None = None
    noise_drift: float | None = None
    noise_steps: float | None = None
    noise_over_drift: float | None = None
    relative: float | None = None
    beta2: float | None = None
    eps: float | None = None
    denominator: torch.dtype | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        plain = {key: value for key, value in vars(self).items() if key not in ("dtype", "denominator")}
        plain |= {"dtype": _name(self.dtype), "lost": [list(pair) for pair in self.lost]}
        plain["freeze_range"] = None if self.freeze_range is None else list(self.freeze_range)
        return plain | {"denominator": None if self.denominator is None else _name(self.denominator)}


@dataclass(frozen=True)
class ForecastData:
    """The layers, what they have in common, and what each way to store them would cost.

    Attributes:
        layers: in the model's order.
        rule: the optimizer's update rule.
        start, steps: steps made so far, and of the whole run.
        costs: bytes of each weight update; empty without parameters of 16 bits.
        notes: what could not be read or is not known, in sentences.
        learning_rates: (step, learning rate of the first group) at steps spread over the schedule.
    """

    layers: tuple[LayerForecast, ...]
    rule: str
    schedule: str
    start: int
    steps: int
    costs: tuple[Cost, ...] = ()
    notes: tuple[str, ...] = field(default=())
    learning_rates: tuple[tuple[int, float], ...] = ()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_gaps(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Return the distances from each number to the next larger and the next smaller one of a format.

    A number in [2^e, 2^(e+1)) has neighbours at 2^(e - mantissa_bits), 2^emin's binade and the subnormals below it
    alike; from a power of two towards zero it is half of that, unless it is the smallest normal number.

    Args:
        values: float64 numbers of the format, finite.

    Returns:
        Two float64 tensors of the same shape: up and down.

    >>> from halfulp import formats
    >>> [gap.tolist() for gap in find_gaps(torch.tensor([1.0, -1.0, 1.5], dtype=torch.float64), formats.bf16)]
    [[0.0078125, 0.00390625, 0.0078125], [0.00390625, 0.0078125, 0.0078125]]
    """
    significand, exponent = torch.frexp(values.abs())
    exponent = torch.where(values == 0, format.emin, exponent - 1).clamp_min(format.emin)
    outward = torch.ldexp(torch.ones_like(values), exponent - format.mantissa_bits)
    inward = torch.where((significand == 0.5) & (exponent > format.emin), outward / 2, outward)
    negative = values < 0
    return torch.where(negative, inward, outward), torch.where(negative, outward, inward)


def round_to_format(values: Tensor, format: Format) -> Tensor:
    """Return float64 values rounded to the nearest number of a format, ties to even.

    One scaling by a power of two, one rounding to an integer, and the scaling back: exact for formats of up to 24
    bits, whose numbers float64 holds with room to spare. Numbers beyond the largest stay where they are.
    """
    _, exponent = torch.frexp(values.abs())
    exponent = torch.where(values == 0, format.emin, exponent - 1).clamp_min(format.emin) - format.mantissa_bits
    return torch.ldexp(torch.round(torch.ldexp(values, -exponent)), exponent)


# A layer counts as frozen when fewer than this share of its nonzero updates change their element.
FROZEN = 0.01
_MANY = 1e6


@dataclass(frozen=True)
class Walk:
    """The simulated course of a sample of one layer's weights.

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


def simulate_walk(
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
        rates: learning rate per coming step.
        format: what the weights are stored in.
        decay: decoupled weight decay; 0 without.
        apart: whether decay is rounded by itself before the update, as torch's loops do, or with it.
        leaps: most leaps to make.
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
        up, down = find_gaps(weights, format)
        deviation = rate * growth * sizes.deviation
        rises, falls = _chances(mean, deviation, up, down, sizes.is_sign)
        shares[0, begin:end] = (rises + falls).mean()
        for row, scale in ((1, 1 - margin), (2, 1 + margin)):
            rises_then, falls_then = _chances(mean * scale, deviation * scale, up, down, sizes.is_sign)
            shares[row, begin:end] = (rises_then + falls_then).mean()
        if apart and decay:
            weights, lost = _decay(weights, rate * decay, end - begin, format)
            wanted, made = wanted + lost[0], made + lost[1]
        weights = _leap(weights, mean, deviation, (up, down), (rises, falls), end - begin, sizes.run, format, generator)
    return Walk(shares[0], shares[1], shares[2], wanted, made)


def _chances(mean: Tensor, deviation: Tensor, up: Tensor, down: Tensor, is_sign: bool) -> tuple[Tensor, Tensor]:
    """Return per element the probability that an update takes it up, and down."""
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
    """Return weights after some steps whose updates have a mean, a deviation, and chances to round up and down."""
    up, down = distances
    ups, downs = (torch.poisson((chance * steps).clamp_max(_MANY), generator=generator) for chance in chances)
    hopped = weights + ups * up - downs * down
    drawn = torch.randn(len(weights), generator=generator, dtype=torch.float64, device="cpu")
    walked = weights + steps * mean + drawn * deviation * math.sqrt(2 * run * steps)
    free = torch.maximum(up, down) < 2 * (deviation + mean.abs())
    return round_to_format(torch.where(free, walked, hopped), format)


def _decay(weights: Tensor, factor: float, steps: int, format: Format) -> tuple[Tensor, tuple[float, float]]:
    """Return weights after steps of w (1 - lr weight_decay), each rounded; the |change| wanted, and the one made."""
    once = round_to_format(weights * (1 - factor), format)
    wanted = float(weights.abs().sum()) * factor * steps
    made = float((weights.abs() - once.abs()).sum()) * steps
    moves = once != weights
    return torch.where(moves, round_to_format(weights * (1 - factor) ** steps, format), weights), (wanted, made)


def find_freeze_step(moved: Tensor, count: int, run: float, chance: float = 0.5) -> int | None:
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

    >>> find_freeze_step(torch.tensor([0.5, 0.1, 0.001, 0.0001], dtype=torch.float64), 10**6, 1.0)
    2
    """
    above = torch.special.gammainc(
        torch.full_like(moved, float(math.ceil(FROZEN * count))), (moved * count).clamp_min(1e-300)
    )
    none = torch.log1p(-above.clamp_max(1 - 1e-15)) / run
    none_from = none.flip(0).cumsum(0).flip(0)
    found = (none_from >= math.log(chance)).nonzero()
    return int(found[0]) if len(found) else None


# The smallest constant update, over the weight, of which each keeps nearly all (docs/sixteen-bit-tables.md, small
# updates); 0: the smallest that was tried. None: half an ulp of the parameter.
_SMALLEST: dict[str, float | None] = {
    "nearest": None,
    "stochastic": 2.0**-23,
    "feedback": 2.0**-23,
    "split8": 2.0**-23,
    "kahan": 0.0,
    "kahan-stochastic": 0.0,
    "split": 2.0**-23,
    "split-stochastic": 0.0,
    "components": 2.0**-17,
    "master": 2.0**-23,
}
_ON_AVERAGE = ("stochastic", "feedback")
_ELEMENTS = 4096


@dataclass(frozen=True)
class Cost:
    """A way to store and update the weights.

    Attributes:
        weight_update: of halfulp's optimizers; "float32" for weights that stay float32.
        bytes_per_parameter: weight, what lies beside it, optimizer states and gradient.
        total: bytes of them for all parameters of 16 bits.
        keeps: "yes", "on average", or "no" for typical updates of the layer with the smallest.
    """

    weight_update: str
    bytes_per_parameter: float
    total: int
    keeps: str


def compute_costs(rule: str, dtype: torch.dtype, elements: int, relative: float) -> tuple[Cost, ...]:
    """Return the bytes that each of halfulp's weight updates takes for parameters of a dtype.

    The bytes are those that an optimizer of that rule reports of itself.

    Args:
        dtype: of the parameters, 16 bits.
        relative: typical update over typical weight, by which it is judged what is kept.
    """
    found = []
    for name, smallest in _SMALLEST.items():
        try:
            size = _bytes(rule, dtype, name)
        except ValueError:
            continue  # "split" needs bfloat16, "feedback" a first moment
        floor = torch.finfo(dtype).eps / 2 if smallest is None else smallest
        keeps = "no" if relative < floor else "on average" if name in _ON_AVERAGE else "yes"
        found.append(Cost(name, size, round(size * elements), keeps))
    size = _bytes(rule, torch.float32, None)
    keeps = "no" if relative < torch.finfo(torch.float32).eps / 2 else "yes"
    found.append(Cost("float32", size, round(size * elements), keeps))
    return tuple(sorted(found, key=lambda cost: cost.bytes_per_parameter))


def _bytes(rule: str, dtype: torch.dtype, weight_update: str | None) -> float:
    kind: Any = optim.OPTIMIZERS[rule]
    parameter = torch.nn.Parameter(torch.zeros(_ELEMENTS, dtype=dtype, device="cpu"))
    return float(kind([parameter], lr=1e-3, weight_update=weight_update).bytes_per_parameter())


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
        rates: float64, the learning rate at each coming step.
        sample: most elements to follow.
        leaps: most leaps through the schedule.
    """
    format = formats.get(trained.dtype)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    index = choose_sample(trained.value.numel(), sample)
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
    sizes = model_update_sizes(trained, inputs, index, weights, len(rates), generator) if len(weights) else None
    if sizes is None:
        return LayerForecast(**common)  # type: ignore[arg-type]
    held = weights[sizes.nonzero]
    if not len(held):
        return LayerForecast(**common, updates=sizes.source, update_size=0.0)  # type: ignore[arg-type]
    apart = not inputs.ours and not trained.options.get("fused")
    repeats = max(1, min(8, sample // len(held)))
    walked = simulate_walk(
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


def choose_sample(elements: int, most: int) -> Tensor:
    """Return the positions of a sample: all elements, or runs of neighbours at even distances.

    >>> choose_sample(3, 10).tolist(), len(sample_of(10**6, 1024)), int(sample_of(10**6, 1024)[-1])
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
    """Return when a layer freezes, and which share of its updates is lost by then.

    `sampling` is how far the share that moves may be off, relative to itself, as only a sample was followed.
    """
    after = (rates > 0).nonzero()
    # Where the rate is 0 there is no update that could be lost.
    last = int(after[-1]) if len(after) else -1

    moved = walked.moved[: last + 1]
    step = find_freeze_step(moved, count, sizes.run)
    fewer, more = walked.fewer[: last + 1], walked.more[: last + 1]
    low = find_freeze_step(fewer * max(0.0, 1 - sampling), count, sizes.run, _EDGE)
    high = find_freeze_step(more * (1 + sampling), count, sizes.run, 1 - _EDGE)
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
    """Return where stochastic rounding's noise is as large as the drift.

    An update u below the spacing d is rounded up with probability u / d (Croci et al., Royal Society Open Science 9,
    211631, 2022): the mean is u, the variance u (d - u). After n updates of one sign the drift is n u and the noise
    sqrt(n u (d - u)); they are equal at n = (d - u) / u, a drift of d - u: one spacing, however small u is.
    """
    up, down = find_gaps(weights, format)
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
    """Return the dtype in which torch's loops add eps: the states', which is the parameter's."""
    if not inputs.rule.startswith("Adam") or inputs.ours or trained.options.get("fused"):
        return None
    return find_second_moment(trained.state) or trained.dtype
