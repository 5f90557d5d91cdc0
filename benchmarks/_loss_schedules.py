"""Random schedules of losses, and what scalers make of their gradients: the search for a schedule that never trains.

Weights stand still, so that a schedule says all: whose loss it is in which iteration, and by which power of two it is
multiplied. What one scale for all makes of it then follows from a table: which gradients are zero, and whether any is
infinite, by loss and by the sum of its power and the scale's.
"""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor, nn

import halfulp as hu

FORMATS = ("fp16", "bf16", "e5m2")
KINDS = ("heads", "shared", "growing", "experts")
LOOPS = ("plain", "unscale", "clip", "accumulate", "two optimizers", "update each")
ITERATIONS, SETTLED = 320, 64
WIDTH, ROWS, EXPERTS = 8, 4, 32
GROWTH, START = 2000, 16
ROW, MORE_SKIPS, MORE_ZEROS = 32, 0.02, 0.001

Loss = tuple[int, int]  # a task, and the length of its sequence or the number of its expert


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One training loop: `random` draws it from its seed alone.

    Attributes:
        kind: Of the model: a trunk with a head for each task, the same sites for all, a recurrent cell whose sequence
            grows, or experts of which each loss uses one.
        loop: How the scaler is called.
        steps: For each iteration the losses that it differentiates, each with the power of two that multiplies it.
    """

    seed: int
    format: str
    kind: str
    loop: str
    steps: tuple[tuple[tuple[Loss, int], ...], ...]

    @classmethod
    def random(cls, seed: int, iterations: int = ITERATIONS) -> Schedule:
        """The schedule of a seed."""
        draw = random.Random(seed)
        format, kind, loop = draw.choices(FORMATS, (3, 1, 3))[0], draw.choice(KINDS), draw.choice(LOOPS)
        tasks = draw.randint(1, 4)
        spread = draw.choice((0, 4, 10, 20, 30))
        powers = [draw.randint(-spread, spread) for _ in range(tasks)]
        turns = _turns(draw, tasks, iterations)
        drift, noise = draw.choice((0, 0, -10, 10)), draw.choice((0, 0, 2))
        spikes = draw.choice((0.0, 0.0, 0.01))
        steps = []
        for k in range(iterations):
            several = draw.randint(1, 3) if loop == "accumulate" else 1
            losses = []
            for i in range(several):
                task = turns[(k + i) % iterations]
                power = powers[task] + drift * k // iterations + draw.randint(-noise, noise)
                power += draw.randint(8, 20) if draw.random() < spikes else 0
                losses.append(((task, _variant(draw, kind, k, iterations)), power))
            steps.append(tuple(losses))
        return cls(seed, format, kind, loop, tuple(steps))

    def __str__(self) -> str:
        return f"{self.seed}: {self.format}, {self.kind}, {self.loop}"


def _turns(draw: random.Random, tasks: int, iterations: int) -> list[int]:
    """Whose turn it is: in rounds of 1 to 16 iterations, blocks, or at random, some tasks seldom."""
    kind = draw.choice(("round", "blocks", "random"))
    if kind == "round":
        period = draw.randint(1, 16)
        pattern = [draw.randrange(tasks) for _ in range(period)]
        return [pattern[k % period] for k in range(iterations)]
    if kind == "blocks":
        length = draw.randint(1, 40)
        return [k // length % tasks for k in range(iterations)]
    weights = [draw.choice((1.0, 1.0, 0.1, 0.03)) for _ in range(tasks)]
    return draw.choices(range(tasks), weights, k=iterations)


def _variant(draw: random.Random, kind: str, k: int, iterations: int) -> int:
    if kind == "growing":
        return 1 + 8 * k // iterations
    return min(EXPERTS - 1, int(draw.paretovariate(0.5)) - 1) if kind == "experts" else 0


class Model(nn.Module):
    """The model of a schedule; its losses read fixed batches."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        torch.manual_seed(schedule.seed)
        self.kind = schedule.kind
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4 if self.kind == "heads" else 1))
        parts = {"growing": 1, "experts": EXPERTS}.get(self.kind, 0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(parts))
        self.batches = torch.randn(4, ROWS, WIDTH)

    def forward(self, loss: Loss) -> Tensor:
        task, variant = loss
        h = self.trunk(self.batches[task]).tanh()
        if self.kind == "growing":
            for _ in range(variant):
                h = torch.tanh(1.5 * self.parts[0](h))
        elif self.kind == "experts":
            h = h + self.parts[variant](h).tanh()
        return self.heads[task % len(self.heads)](h)

    def groups(self, loop: str) -> list[list[nn.Parameter]]:
        """The parameters of each optimizer."""
        if loop not in ("two optimizers", "update each"):
            return [list(self.parameters())]
        return [list(self.trunk.parameters()), [*self.heads.parameters(), *self.parts.parameters()]]


@dataclasses.dataclass
class Gradients:
    """What one iteration left in the parameters of each optimizer that have a gradient, by their numbers."""

    values: list[dict[int, Tensor]]

    def __add__(self, other: Gradients) -> Gradients:
        pairs = zip(self.values, other.values)
        return Gradients([{key: _sum(a.get(key), b.get(key)) for key in a | b} for a, b in pairs])

    def times(self, factor: float) -> Gradients:
        """All of them times a number, in float64."""
        return Gradients([{key: x.double() * factor for key, x in one.items()} for one in self.values])

    def only(self, mine: int) -> Gradients:
        """Those of one optimizer."""
        return Gradients([one if number == mine else {} for number, one in enumerate(self.values)])

    @cached_property
    def nonzero(self) -> list[dict[int, Tensor]]:
        """Which elements are not zero."""
        return [{key: x != 0 for key, x in one.items()} for one in self.values]

    @cached_property
    def finite(self) -> list[bool | None]:
        """Whether all are finite, for each optimizer; nobody knows where it has none."""
        # A sum is not finite where an element is not.
        sums = [sum(float(x.double().abs().sum()) for x in one.values()) for one in self.values]
        return [math.isfinite(total) if one else None for total, one in zip(sums, self.values)]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a + b if a is not None and b is not None else b if a is None else a


def gradients_of(groups: list[list[nn.Parameter]]) -> Gradients:
    """Of the parameters as they are."""
    given = [[(number, p.grad) for number, p in enumerate(group)] for group in groups]
    return Gradients([{number: x.clone() for number, x in one if x is not None} for one in given])


class OneScale:
    """What one scale for all gradients makes of a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.model = Model(schedule)
        self.groups = self.model.groups(schedule.loop)
        self.scaler = hu.AdaptiveGradScaler(self.model, policy="constant", format=schedule.format, init_scale=1.0)
        self._known: dict[tuple[Loss, int], Gradients] = {}
        self._plain: dict[Loss, Gradients] = {}

    def plain(self, loss: Loss) -> Gradients:
        """In float32."""
        if loss not in self._plain:
            self.model.zero_grad()
            _value(self.model, loss).backward()
            self._plain[loss] = gradients_of(self.groups)
        return self._plain[loss]

    def gradients(self, loss: Loss, power: int) -> Gradients:
        """Of a loss times 2^power."""
        power = max(-120, min(100, power))
        if (loss, power) not in self._known:
            self._known[loss, power] = differentiated(self.model, [(loss, power)], self.scaler.scale, self.groups)
            self.scaler.set_exponents({})
        return self._known[loss, power]

    def step(self, losses: tuple[tuple[Loss, int], ...], exponent: int) -> Gradients:
        """Of an iteration at a scale of 2^exponent."""
        first, *others = [self.gradients(loss, power + exponent) for loss, power in losses]
        for other in others:
            first = first + other
        return first

    def truth(self, losses: tuple[tuple[Loss, int], ...]) -> Gradients:
        """Of an iteration in float32."""
        first, *others = [self.plain(loss).times(2.0**power) for loss, power in losses]
        for other in others:
            first = first + other
        return first

    @cached_property
    def limits(self) -> dict[Loss, int]:
        """The least power at which a loss overflows."""
        found, power = {}, START
        for loss in sorted({loss for losses in self.schedule.steps for loss, _ in losses}):
            found[loss] = power = self._limit(loss, power)
        return found

    def _limit(self, loss: Loss, power: int) -> int:
        """The least power at which a loss overflows, from one near it."""

        def overflows(power: int) -> bool:
            return False in self.gradients(loss, power).finite

        pace = 1
        up = not overflows(power)
        while -60 < power < 100 and overflows(power) is not up:
            power, pace = power + (pace if up else -pace), 2 * pace
        low, high = (power - pace // 2, power) if up else (power, power + pace // 2)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if overflows(middle) else (middle, high)
        return high

    def room(self, losses: tuple[tuple[Loss, int], ...]) -> int:
        """The largest exponent at which an iteration does not overflow."""
        return min(self.limits[loss] - power for loss, power in losses) - 1


@dataclasses.dataclass
class Outcome:
    """What a scaler made of a schedule.

    Attributes:
        skipped: Of all optimizer steps, the share.
        row: The most iterations in a row that were skipped while all gradients fitted the format at scale 1, of all or
            of one task alone.
        zeros: Of the settled, applied steps' elements that are not zero in float32, the share that is.
    """

    skipped: float
    row: int
    zeros: float


class Count:
    """Counts steps and zeros."""

    def __init__(self, one: OneScale) -> None:
        self.one = one
        self.steps = self.skips = self.lost = self.held = self.row = 0
        self._rows: dict[object, int] = {}

    def add(self, k: int, found: Gradients, skipped: list[bool]) -> None:
        """An iteration's optimizer steps."""
        losses = self.one.schedule.steps[k]
        self.steps += len(skipped)
        self.skips += sum(skipped)
        fits = self.one.room(losses) >= 0
        for whose in ("all", *(loss[0] for loss, _ in losses)):
            self._rows[whose] = self._rows.get(whose, 0) + 1 if any(skipped) and fits else 0
            self.row = max(self.row, self._rows[whose])
        if k >= SETTLED:
            truth = self.one.truth(losses).nonzero
            done = iter(skipped)
            for wanted, got in zip(truth, found.nonzero):
                if got and not next(done, True):
                    self.held += sum(int(x.sum()) for x in wanted.values())
                    self.lost += sum(int((x & ~got[key]).sum()) for key, x in wanted.items())

    def outcome(self) -> Outcome:
        """All in all."""
        return Outcome(self.skips / max(1, self.steps), self.row, self.lost / max(1, self.held))


def _value(model: Model, loss: Loss) -> Tensor:
    return model(loss).square().mean()


def differentiated(
    model: Model,
    losses: Iterable[tuple[Loss, int]],
    scaled: Callable[[Tensor], Tensor],
    groups: list[list[nn.Parameter]],
) -> Gradients:
    """What the scaled losses of one iteration leave in a model's parameters."""
    model.zero_grad()
    for loss, power in losses:
        scaled(_value(model, loss) * 2.0**power).backward()
    return gradients_of(groups)


def adaptive(schedule: Schedule, one: OneScale, **options) -> Outcome:
    """`AdaptiveGradScaler`'s, by running it."""
    model = Model(schedule)
    scaler = hu.AdaptiveGradScaler(model, format=schedule.format, **options)
    groups = model.groups(schedule.loop)
    optimizers = [torch.optim.SGD(group, lr=0.0) for group in groups]
    count = Count(one)
    for k, losses in enumerate(schedule.steps):
        found, skipped = differentiated(model, losses, scaler.scale, groups), []
        for number, (group, optimizer) in enumerate(zip(groups, optimizers)):
            if schedule.loop == "update each" and number != k % len(groups):
                continue
            if schedule.loop in ("unscale", "clip"):
                scaler.unscale_(optimizer)
            if schedule.loop == "clip":
                nn.utils.clip_grad_norm_(group, 1.0)
            scaler.step(optimizer)
            skipped.append(not scaler.last_step.applied)
        scaler.update()
        if schedule.loop == "update each":
            found = found.only(k % len(groups))
        count.add(k, found, skipped)
    least = min(row.exponent for row in scaler.sites())
    if not least >= -30:
        raise RuntimeError(f"an exponent of {least}")
    return count.outcome()


def falling(schedule: Schedule, one: OneScale) -> Outcome:
    """`torch.amp.GradScaler`'s, by the table."""
    return _one(schedule, one, START, adapts=True)


def torchs(schedule: Schedule, one: OneScale) -> Outcome:
    """`torch.amp.GradScaler`'s, by running it, with gradients rounded to the format as ours are."""
    model = Model(schedule)
    rounding = hu.AdaptiveGradScaler(model, policy="constant", format=schedule.format, init_scale=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**START, growth_interval=GROWTH)
    groups = model.groups(schedule.loop)
    optimizers = [torch.optim.SGD(group, lr=0.0) for group in groups]
    count = Count(one)
    for k, losses in enumerate(schedule.steps):
        found, skipped = differentiated(model, losses, lambda x: rounding.scale(scaler.scale(x)), groups), []
        for number, optimizer in enumerate(optimizers):
            mine = schedule.loop != "update each" or number == k % len(groups)
            if not mine or found.finite[number] is None:
                continue
            scaler.unscale_(optimizer)
            skipped.append(any(bool(flag) for flag in scaler._found_inf_per_device(optimizer).values()))
            scaler.step(optimizer)
        if skipped:
            scaler.update()
        rounding.set_exponents({})
        if schedule.loop == "update each":
            found = found.only(k % len(groups))
        count.add(k, found, skipped)
    return count.outcome()


def constant(schedule: Schedule, one: OneScale, budget: float) -> Outcome:
    """The best constant scale's: the largest that skips at most such a share of the steps."""
    rooms = sorted(one.room(losses) for losses in schedule.steps)
    skips = min(len(rooms) - 1, int(budget * len(rooms)))
    return _one(schedule, one, min(60, rooms[skips]), adapts=False)


def _one(schedule: Schedule, one: OneScale, exponent: int, adapts: bool) -> Outcome:
    count, good = Count(one), 0
    for k, losses in enumerate(schedule.steps):
        found = one.step(losses, exponent)
        flags = found.finite
        if schedule.loop == "update each":
            mine = k % len(flags)
            found, flags = found.only(mine), [flags[mine]]
        skipped = [flag is False for flag in flags if flag is not None]
        count.add(k, found, skipped)
        good = 0 if any(skipped) else good + 1
        if adapts:
            exponent += -1 if any(skipped) else 0
            if good == GROWTH:
                exponent, good = exponent + 1, 0
    return count.outcome()


@dataclasses.dataclass
class Finding:
    """A schedule, and the three outcomes."""

    schedule: Schedule
    ours: Outcome
    torch: Outcome
    best: Outcome

    @property
    def broken(self) -> list[str]:
        """What does not hold, in words."""
        said = []
        if self.ours.row > ROW:
            said.append(f"{self.ours.row} skips in a row")
        if self.ours.skipped > self.torch.skipped + MORE_SKIPS:
            said.append(f"skips {self.ours.skipped:.1%}, GradScaler {self.torch.skipped:.1%}")
        if self.ours.zeros > self.best.zeros + MORE_ZEROS:
            said.append(f"zeros {self.ours.zeros:.2%}, best constant scale {self.best.zeros:.2%}")
        return said


def tried(seed: int, **options) -> Finding:
    """The schedule of a seed, under all three."""
    schedule = Schedule.random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = OneScale(schedule)
        ours, theirs = adaptive(schedule, one, **options), falling(schedule, one)
        return Finding(schedule, ours, theirs, constant(schedule, one, theirs.skipped + MORE_SKIPS))
