"""never-stepped is said of parameters that no step reaches, and of no other."""

import pytest
import torch
from torch import nn

import halfulp as hu


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
