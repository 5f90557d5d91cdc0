"""Loss scales, skipped steps and schedulers, as scalers and schedulers have them."""

import gc
import random

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, SequentialLR

import halfulp as hu
from halfulp.observation.observing._history import LossScales
from halfulp.observation.observing._observe import scheduler_of


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


@pytest.mark.parametrize("kind", ["plain", "momentum", "fused"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("growth_interval", [1, 3, 2000])
def test_skips_are_counted_exactly_on_the_host(seed, kind, given, growth_interval):
    draw = random.Random(seed)
    model, optimizer = made(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=growth_interval)
    losses = [torch.inf if draw.random() < 0.3 else 1.0 for _ in range(60)]
    with hu.observe(model, optimizer, interval=draw.randint(1, 9), scaler=scaler if given else None) as seen:
        skipped = iterations(model, optimizer, scaler, [torch.inf] * draw.randint(0, 3) + losses)
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


def test_a_scale_set_by_hand_is_no_skip():
    model, optimizer = made("momentum")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with hu.observe(model, optimizer, interval=2, scaler=scaler) as seen:
        iterations(model, optimizer, scaler, [1.0] * 3)
        scaler.update(2.0**10)
        iterations(model, optimizer, scaler, [1.0] * 3)
    assert seen.record.skipped == 0


def test_a_scale_that_cannot_grow_is_no_skip():
    model, optimizer = made("plain")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=1)
    with hu.observe(model, optimizer, interval=1, scaler=scaler) as seen:
        assert iterations(model, optimizer, scaler, [2.0**-120] * 32) == 0
    assert seen.record.skipped == 0
    assert seen.record.loss_scale == 2.0**127


@pytest.mark.parametrize("growth_interval", [25, 2000])
def test_a_device_is_waited_for_in_few_steps(seed, monkeypatch, growth_interval):
    monkeypatch.setattr(LossScales, "_is_on_host", lambda self: False)
    draw = random.Random(seed)
    model, optimizer = made("momentum")
    scaler = CountedScaler("cpu", init_scale=2.0**40, growth_interval=growth_interval)
    # Twenty steps apart, so that of growth and the falls around it none hides another.
    losses = [torch.inf if k % 20 == 7 and draw.random() < 0.7 else 1.0 for k in range(400)]
    with hu.observe(model, optimizer, interval=10, scaler=scaler) as seen:
        skipped = iterations(model, optimizer, scaler, losses)
    assert seen.record.skipped == skipped
    sampled, grown = len(seen.record.sampled_steps), 400 // growth_interval
    assert scaler.reads <= 2 * sampled + 2 * grown + 4
    assert any(step.loss_scale is None for step in seen.record.history)
    assert all(step.loss_scale for step in seen.record.history if step.sampled)


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
    assert scheduler_of([optimizer]) is outer


def test_without_a_scheduler_nothing_is_searched(monkeypatch: pytest.MonkeyPatch):
    def never() -> None:
        raise AssertionError("all objects were searched")

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    monkeypatch.setattr(gc, "get_objects", never)
    assert scheduler_of([optimizer]) is None
    assert scheduler_of([]) is None
