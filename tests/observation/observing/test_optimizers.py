"""The optimizers of a run: which follows a parameter, which ends a step, and parameters that none steps."""

import pytest
import torch
from torch import nn

import halfulp as hu


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
