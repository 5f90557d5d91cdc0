"""What a trial counts of rounded gradients, against gradients rounded by hand."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from halfulp import recipes
from halfulp.gradients.eager._attach import WatchedForward
from halfulp.recipes import Recipe
from halfulp.trials.running._trial import INTERVAL, SAMPLES, scaling


def take(scaled, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loss, x, targets=None) -> None:
    scaled.before(step)
    scaled.backward(loss(model(x), targets))
    scaled.step()
    optimizer.zero_grad()
    scaled.after(step, lambda model, batch: loss(model(batch[0]), batch[1]), (x, targets))


def product(found: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (found * weights).sum()


def distance(found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (found - 1).square().mean()


def start(recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = recipes.convert(nn.Linear(6, 5, bias=False), recipe)
    return model, recipes.optimizer(model, "SGD", lr=1e-3)


def test_underflow_is_what_float16_makes_zero(seed: int) -> None:
    """The gradient that arrives, and the weight's: both as torch's own float16 has them."""
    model, optimizer = start(recipes.get("fp16-none"))
    x, weights = torch.randn(7, 6), torch.randn(7, 5) * 2.0 ** torch.randint(-30, -15, (7, 5))
    weights[0] = 0
    with scaling(recipes.get("fp16-none"), model, optimizer, 1) as scaled:
        take(scaled, 0, model, optimizer, product, x, weights)
    rounded = weights.half().float()
    first = (rounded[weights != 0] == 0).sum()
    last = ((rounded.T @ x).half() == 0).sum()
    found = scaled.readings()
    assert found["skipped"] == 0
    kinds = scaled._scaler._controller.sites["model"].readings
    assert set(kinds) == {"received", "weight"}
    wanted = int(first + last) / (30 + 30)
    counts = scaled._lost["model"]
    assert counts == [(pytest.approx(float(first + last)), pytest.approx(60.0))]
    assert wanted <= found["underflow"]["worst"] + 1e-6


def test_no_underflow_under_a_scale_that_fits(seed: int) -> None:
    recipe = Recipe(name="x", gradient_format="fp16", gradient_scale=2.0**24)
    model, optimizer = start(recipe)
    weights = torch.rand(7, 5).add(1) * 2.0**-20
    with scaling(recipe, model, optimizer, 1) as scaled:
        take(scaled, 0, model, optimizer, product, torch.rand(7, 6), weights)
    assert scaled.readings()["underflow"]["mean"] == 0


def test_a_sample_draws_the_same_random_numbers_and_leaves_no_trace(seed: int) -> None:
    """Dropout: the re-run must drop the same elements, and training must go on with the numbers it would have had."""
    recipe = Recipe(name="x", gradient_format="e8m23")
    nets = {}
    for sampled in (True, False):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3))
        optimizer = recipes.optimizer(recipes.convert(model, recipe), "SGD", lr=0.1)
        with scaling(recipe, model, optimizer, 3) as scaled:
            for step in range(3):
                place = step if sampled else 1 + step
                take(scaled, place, model, optimizer, distance, torch.ones(8, 6))
        assert scaled.readings()["underflow"]["mean"] == (0 if sampled else None)
        nets[sampled] = model
    for mine, other in zip(nets[True].parameters(), nets[False].parameters()):
        assert torch.equal(mine, other)


def test_samples_are_few_and_are_measured(seed: int) -> None:
    recipe = recipes.get("fp16-adaptive")
    model, optimizer = start(recipe)
    steps = 3 * INTERVAL * SAMPLES
    x = torch.randn(4, 6)
    with scaling(recipe, model, optimizer, steps) as scaled:
        for step in range(steps):
            take(scaled, step, model, optimizer, distance, x)
    assert SAMPLES - 2 <= len(scaled._lost["model"]) <= SAMPLES + 1


def test_the_model_has_its_own_forward_again(seed: int) -> None:
    model, optimizer = start(recipes.get("fp16-dynamic"))
    with contextlib.suppress(ZeroDivisionError), scaling(recipes.get("fp16-dynamic"), model, optimizer, 1):
        assert isinstance(model.forward, WatchedForward)
        raise ZeroDivisionError
    assert "forward" not in vars(model)
    copy.deepcopy(model)(torch.ones(1, 6))
