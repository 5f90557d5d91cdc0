"""States held to a format."""

import pytest
import torch
from torch import nn

from halfulp import formats, recipes
from halfulp.formats import round_exact

from .steps import converted


@pytest.mark.parametrize(("rule", "hyper"), [("SGD", {"momentum": 0.9}), ("AdamW", {})])
@pytest.mark.parametrize("name", ["e8m1-stochastic", "e8m3-kahan", "e8m5-kahan-stochastic"])
def test_weights_and_states_are_values_of_the_format(name: str, rule: str, hyper: dict, seed: int) -> None:
    model = nn.Linear(5, 3)
    recipe = recipes.get(name)
    model, optimizer = converted(recipe, model, rule, lr=0.01, seed=seed, **hyper)
    for _ in range(4):
        model(torch.randn(7, 5)).square().mean().backward()
        optimizer.step()
    seen = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    seen = [value for value in seen if torch.is_tensor(value) and value.dim()]
    assert len(seen) > 2
    for value in seen:
        exact = [float(round_exact(x, formats.get(recipe.format))) for x in value.double().flatten().tolist()]
        assert value.double().flatten().tolist() == exact


def test_second_moments_do_not_freeze(seed: int) -> None:
    model, optimizer = converted(recipes.get("e8m3-stochastic"), nn.Linear(64, 64), "AdamW", lr=0.0, seed=seed)
    for step in range(2000):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 if step < 200 else 0.01)
        optimizer.step()
    second = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
    wide = torch.tensor(0.0)
    for step in range(2000):
        wide = 0.999 * wide + 0.001 * (1.0 if step < 200 else 1e-4)
    assert second.mean().item() == pytest.approx(wide.item(), rel=0.1)
