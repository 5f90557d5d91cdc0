"""Observation: optimizers that hold others, skipped steps, schedules and losses."""

import gc
import random

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, SequentialLR

import halfulp as hu
from halfulp.observation.observing._observation import ScalerAndSchedulerTracker, find_scheduler


def test_an_optimizer_for_each_of_many_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(130)))
    optimizers = [torch.optim.SGD([p], lr=1e-3) for p in model.parameters()]
    with hu.observe(model, optimizers, interval=4) as seen:
        for _ in range(9):
            model(torch.randn(3, 2)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(seen) == 9
    assert seen.record.sampled_steps == [0, 4, 8]
    assert sum(p.gradients for p in seen.record.parameters.values()) >= 2 * 260


@pytest.mark.parametrize("interval", [1, 3])
def test_the_next_one_leads_where_the_first_has_no_more_steps(interval):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in model)
    with hu.observe(model, [first, second], interval=interval) as seen:
        for step in range(200):
            model(torch.randn(3, 4)).square().sum().backward()
            (first if step < 5 else second).step()
            model.zero_grad()
    assert len(seen) == 200
    assert seen.record.parameters["1.weight"].gradients


class Outer(torch.optim.Optimizer):
    """An optimizer around another one, as wrappers are written."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})

    def step(self) -> None:
        self.base.step()


@pytest.mark.parametrize("turned", [False, True])
def test_one_that_holds_another_counts_once(turned):
    model = nn.Linear(4, 4)
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = Outer(base)
    with hu.observe(model, [base, outer] if turned else [outer, base], interval=1) as seen:
        for _ in range(3):
            model(torch.randn(3, 4)).square().sum().backward()
            outer.step()
            model.zero_grad()
    assert len(seen) == 3
    assert {p.gradients for p in seen.record.parameters.values()} == {3}


class Container(torch.optim.Optimizer):
    """Optimizers in a list that step in turn, as torchtitan's container."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.optimizers = parts
        super().__init__([p for one in parts for group in one.param_groups for p in group["params"]], {"lr": 9.0})

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


@pytest.mark.parametrize("given", ["container", "both", "turned"])
def test_a_container_of_several_is_no_optimizer_of_its_own(given):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parts = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in model]
    container = Container(parts)
    watched = {"container": container, "both": [container, *parts], "turned": [*parts, container]}[given]
    with hu.observe(model, watched, interval=1) as seen:
        for _ in range(3):
            model(torch.randn(3, 4)).square().sum().backward()
            container.step()
            model.zero_grad()
    assert len(seen) == 3
    parameters = seen.record.parameters.values()
    assert {p.gradients for p in parameters} == {3}
    assert {(p.optimizer, p.options["lr"]) for p in parameters} == {("AdamW", 1e-2)}
    assert all(p.update.known for p in parameters)


def never(seen):
    return {name for finding in seen.findings if finding.code == "never-stepped" for name in finding.where}


def test_sparse_gradients_are_gradients(seed):
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            model(torch.randint(10, (5,))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen.record.parameters["weight"].gradients == 3
    assert not never(seen)
    assert any("cannot be read" in sentence for sentence in seen.record.unseen)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_complex_gradients_are_gradients(seed, kind):
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x):
            return (x * self.phase).abs()

    model = Rotation()
    optimizer = kind(model.parameters(), lr=0.01)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            model(torch.randn(3, 4, dtype=torch.complex64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen.record.parameters["phase"].gradients == 3
    assert not never(seen)


def test_a_second_optimizer_steps_in_runs_shorter_than_the_interval(seed):
    model = nn.ModuleDict({"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})
    first, second = (torch.optim.Adam(model[name].parameters(), lr=0.01) for name in ("generator", "critic"))
    with hu.observe(model, [first, second], interval=50) as seen:
        for _ in range(10):
            model["critic"](model["generator"](torch.randn(3, 4))).square().sum().backward()
            first.step()
            second.step()
            model.zero_grad()
    assert not never(seen)
    assert len(seen) == 10
    assert seen.record.parameters["critic.weight"].gradients == seen.record.parameters["generator.weight"].gradients


def test_two_optimizers_that_take_turns_are_both_seen_and_an_idle_parameter_is_not(seed):
    model = nn.ModuleDict({"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1), "idle": nn.Linear(4, 1)})
    first = torch.optim.Adam([*model["generator"].parameters(), *model["idle"].parameters()], lr=0.01)
    second = torch.optim.Adam(model["critic"].parameters(), lr=0.01)
    with hu.observe(model, [first, second], interval=1) as seen:
        for _ in range(6):
            for optimizer in (first, second):
                model["critic"](model["generator"](torch.randn(3, 4))).square().sum().backward()
                optimizer.step()
                model.zero_grad()
    assert never(seen) == {"idle.weight", "idle.bias"}


def test_a_parameter_without_a_gradient_is_said(seed):
    model = nn.ModuleDict({"used": nn.Embedding(10, 4, sparse=True), "idle": nn.Embedding(10, 4, sparse=True)})
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            model["used"](torch.randint(10, (5,))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "idle.weight" in never(seen)


class CountedScaler(torch.amp.GradScaler):
    """A scaler that counts how often its scale is read."""

    reads = 0

    def get_scale(self) -> float:
        self.reads += 1
        return super().get_scale()


def iterations(model, optimizer, scaler, losses, finish=None) -> int:
    """Train on losses times these factors; how many steps were skipped."""
    skipped = 0
    for factor in losses:
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 6)).square().sum() * factor).backward()
        skipped += not all(p.grad.isfinite().all() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
    return skipped


def made(kind: str):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    options = {"momentum": 0.9} if kind == "momentum" else {"fused": True} if kind == "fused" else {}
    return model, torch.optim.SGD(model.parameters(), lr=1e-6, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["plain", "momentum", "fused"])
@pytest.mark.parametrize("given", [True, False])
def test_skips_are_counted_exactly_on_the_host(seed, kind, given):
    draw = random.Random(seed)
    model, optimizer = made(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    losses = [torch.inf if draw.random() < 0.3 else 1.0 for _ in range(60)]
    with hu.observe(model, optimizer, interval=draw.randint(1, 9), scaler=scaler if given else None) as seen:
        first = [torch.inf] * draw.randint(0, 3) if given else [1.0]  # one that is found is so at the first step
        skipped = iterations(model, optimizer, scaler, first + losses)
    assert seen.record.skipped == skipped
    assert sum(step.skipped for step in seen.record.history) == skipped
    assert {step.loss_scale for step in seen.record.history} <= {2.0**k for k in range(-60, 120)}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", ["plain", "momentum"])
def test_skips_before_the_observation_are_not_counted(given, kind):
    model, optimizer = made(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    assert iterations(model, optimizer, scaler, [torch.inf] * 4 + [1.0] * 5) == 4
    with hu.observe(model, optimizer, interval=2, scaler=scaler if given else None) as seen:
        iterations(model, optimizer, scaler, [1.0] * 4)
    assert seen.record.skipped == 0
    seen.start()
    iterations(model, optimizer, scaler, [1.0, torch.inf, 1.0, 1.0])
    seen.stop()
    assert seen.record.skipped == 1


def test_a_device_is_waited_for_in_sampled_steps_alone(seed, monkeypatch):
    monkeypatch.setattr(ScalerAndSchedulerTracker, "_is_scale_on_host", lambda self: False)
    model, optimizer = made("momentum")
    scaler = CountedScaler("cpu", init_scale=2.0**40)
    losses = [torch.inf if k % 20 in (7, 8) else 1.0 for k in range(100)]
    with hu.observe(model, optimizer, interval=10, scaler=scaler) as seen:
        skipped = iterations(model, optimizer, scaler, losses)
    assert seen.record.skipped == skipped
    assert scaler.reads <= 2 * len(seen.record.sampled_steps) + 4
    assert all((step.loss_scale is not None) == step.sampled for step in seen.record.history)


def test_a_scheduler_is_found_and_its_steps_are_counted():
    model = torch.nn.Linear(3, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    own, _ = ConstantLR(optimizer), ConstantLR(other)
    with hu.observe(model, optimizer, interval=1) as seen:
        for step in range(6):
            model(torch.randn(2, 3)).mean().backward()
            optimizer.step()
            if step % 2:
                own.step()
    assert sum(step.scheduled for step in seen.record.history) == 3


def test_of_schedulers_in_one_another_the_outer_one_is_found():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    parts = [ConstantLR(optimizer), CosineAnnealingLR(optimizer, 5)]
    outer = SequentialLR(optimizer, parts, milestones=[3])
    assert find_scheduler([optimizer]) is outer


def test_without_a_scheduler_nothing_is_searched(monkeypatch: pytest.MonkeyPatch):
    def never() -> None:
        raise AssertionError("all objects were searched")

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    monkeypatch.setattr(gc, "get_objects", never)
    assert find_scheduler([optimizer]) is None
    assert find_scheduler([]) is None
