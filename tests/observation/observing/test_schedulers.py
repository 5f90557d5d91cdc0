"""Schedulers that nobody names: found where torch's mark stands on an optimizer, and nowhere else."""

import gc

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, SequentialLR

import halfulp as hu
from halfulp.observation.observing._observe import scheduler_of


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
