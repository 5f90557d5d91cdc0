"""An iteration reads the device once, measured or not, as GradScaler's does."""

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.gradients import _following

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


@pytest.fixture
def reads(monkeypatch):
    """The names of the calls that would wait for a device, where numbers are on one."""
    monkeypatch.setattr(_following, "on_host", lambda tensor: False)
    found = []
    for name in READS:
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            found.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return found


@pytest.mark.parametrize("measured", [False, True])
def test_one_read_per_step(reads, seed, measured):
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    scaler = hu.AdaptiveGradScaler(model, interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(5, 6)
    steps = 5 if measured else 6
    for _ in range(steps):
        reads.clear()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step.applied
    assert reads == ["tolist"]


@pytest.mark.parametrize("factor", [2.0**60, 1.0], ids=["within the model", "outside"])
def test_a_skipped_step_reads_no_more_for_more_layers(reads, seed, factor):
    """The flags, and whether losses are finite."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)))
    scaler = hu.AdaptiveGradScaler(model, format="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.randn(5, 6)).square().mean() * factor).backward()
    if factor == 1.0:
        model[4].weight.grad.fill_(torch.inf)
    reads.clear()
    scaler.step(optimizer)
    assert not scaler.last_step.applied
    scaler.update()
    assert reads == ["tolist"] * 2
