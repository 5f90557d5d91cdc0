"""Several optimizers: which of them ends a step of the run, and one that holds another."""

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
