"""The experiments of MCTensor: exact data, and components that go on where float16 stops."""

import math

import pytest
import torch
from torch import nn

from halfulp import optim, recipes
from halfulp.mctensor import MCTensor
from halfulp.recipes import Recipe
from halfulp.trials.running import _trial
from halfulp.trials.running._plan import Trial
from halfulp.trials.tasks import Task
from halfulp.trials.tasks._full_batch import CancerLogistic, CancerMLP, LinearRegression, Logistic

KINDS = (LinearRegression, Logistic, CancerLogistic, CancerMLP)
HALF = Recipe(name="fp16", param_dtype="float16", weight_update="nearest")


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def task(request: pytest.FixtureRequest):
    return request.param()


def run(task: Task, recipe: Recipe, seed: int, steps: int, report=None) -> dict:
    return _trial.run_trial(Trial(task, recipe, seed, steps), task.load(), report)


def test_data_are_float64_and_as_described(task) -> None:
    data = task.load()
    (inputs, targets), (others, _) = data.train, data.validation
    assert inputs.dtype == targets.dtype == torch.float64
    assert len(inputs) == len(targets) == task.batch
    assert len(others) in (task.batch, 330, 114)
    assert torch.equal(task.load().train[0], inputs)


def test_losses_are_as_float64_has_them(task, seed: int) -> None:
    inputs, targets = task.load().train
    model = task.model(task.load(), seed).double()
    logits = model(inputs).squeeze(-1)
    if task.name == "linear-regression":
        wanted = ((logits - targets) ** 2).sum() / 10
    else:
        wanted = nn.functional.binary_cross_entropy(logits.sigmoid(), targets)
    torch.testing.assert_close(task.loss(model(inputs), targets), wanted)


def test_linear_regression_has_a_solution() -> None:
    inputs, targets = LinearRegression().load().train
    solution = torch.linalg.lstsq(inputs, targets.unsqueeze(-1)).solution
    assert (inputs @ solution - targets.unsqueeze(-1)).abs().max() < 1e-13


def test_data_are_held_as_the_weights_are() -> None:
    x = torch.tensor([[1 / 3, 2.0]], dtype=torch.float64)
    model = recipes.convert(nn.Linear(2, 1), HALF)
    assert [part.dtype for part in _trial._convert_batch_to_weight_dtype(model, (x, x))] == [torch.float16] * 2
    two, _ = _trial._convert_batch_to_weight_dtype(recipes.convert(nn.Linear(2, 1), "fp16-mc2"), (x, x))
    assert isinstance(two, MCTensor)
    assert (two.decode(torch.float64) - x).abs().max() < 2**-22


@pytest.mark.parametrize(
    "recipe",
    [HALF, *map(recipes.get, ("fp32", "fp64", "fp16-mc2", "fp16-mc3", "bf16-kahan", "e8m3", "fp16-constant-1"))],
)
def test_every_recipe_runs(task, recipe: Recipe) -> None:
    said = []
    found = run(task, recipe, 0, 4, lambda step, loss: said.append(step))
    assert said == [1, 2, 3, 4]
    assert found["diverged_at"] is None
    assert found["float32"]["train"]["loss"] == pytest.approx(found["curve"][-1][1], rel=0.5)
    assert math.isfinite(found["own"]["loss"])
    assert found["parameters"] == sum(p.numel() for p in task.model(task.load(), 0).parameters())


def test_components_of_float16_go_on_where_float16_stops() -> None:
    task = LinearRegression()
    loss = {
        name: run(task, recipe, 0, 400)["float32"]["train"]["loss"]
        for name, recipe in (("one", HALF), ("two", recipes.get("fp16-mc2")), ("exact", recipes.get("fp64")))
    }
    assert loss["two"] == pytest.approx(loss["exact"], rel=0.02)
    assert loss["one"] > 10 * loss["exact"]


def test_a_loss_that_is_not_finite_ends_the_trial() -> None:
    wild = type("Wild", (LinearRegression,), {"hyper": {"lr": 1e4}})()
    found = run(wild, recipes.get("fp32"), 0, 200)
    assert found["diverged_at"] is not None
    assert found["own"] == {"loss": None, "accuracy": None}


def test_a_schedule_free_trial_scores_the_average(seed: int) -> None:
    class ScheduleFree(LinearRegression):
        rule = "SGDScheduleFree"

    task = ScheduleFree()
    data = task.load()
    found = run(task, recipes.get("fp32"), seed, 5)
    model = task.model(data, seed)
    inputs, targets = task.load().train
    optimizer = optim.SGDScheduleFree(model.parameters(), **task.hyper)
    for _ in range(5):
        optimizer.zero_grad()
        task.loss(model(inputs.float()), targets).backward()
        optimizer.step()
    at_gradients = task.loss(model.double()(inputs), targets).item()
    model.float()
    optimizer.eval()
    average = task.loss(model.double()(inputs), targets).item()
    assert found["float32"]["validation"]["loss"] == pytest.approx(average)
    assert average != pytest.approx(at_gradients)
