"""A training step of a user's own as a task."""

import copy

import pytest
import torch
from torch import nn

from halfulp import recipes
from halfulp.trials import TrialError, compare
from halfulp.trials.running import _trial
from halfulp.trials.running._plan import Trial
from halfulp.trials.tasks import Step


def squares(seed: int, **options):
    """A step that a worker process could not receive: a closure over tensors."""
    torch.manual_seed(seed)
    x, y = torch.randn(32, 6), torch.randn(32, 2)
    seen: list[int] = []

    def step(model: nn.Module, number: int) -> torch.Tensor:
        seen.append(number)
        chosen = torch.arange(4) + 4 * (number % 8)
        return nn.functional.mse_loss(model(x[chosen]), y[chosen])

    start = nn.Linear(6, 2)
    return Step(step, start, steps=10, rule="SGD", **{"lr": 0.1, "judged": 3} | options), start, seen, (x, y)


def test_a_float32_trial_is_the_plain_loop(seed: int) -> None:
    task, start, seen, (x, y) = squares(seed, rate=lambda step, steps: 1 - step / steps)
    before = copy.deepcopy(start.state_dict())
    found = _trial.run_trial(Trial(task, recipes.get("fp32"), 2, 10), task.load())
    assert seen[:10] == list(range(20, 30))
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for k in range(10):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - k / 10)
        chosen = torch.arange(4) + 4 * ((20 + k) % 8)
        loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [loss for _, loss in found["curve"]] == pytest.approx(losses, rel=1e-5)
    judged = nn.functional.mse_loss(model(x[:12]), y[:12])
    assert found["float32"]["validation"] == {"loss": pytest.approx(judged.item(), rel=1e-5), "accuracy": None}
    assert all(torch.equal(before[name], value) for name, value in start.state_dict().items())


def test_it_is_compared_here_and_leaves_the_random_state(seed: int) -> None:
    task, _, seen, _ = squares(seed)
    torch.manual_seed(seed)
    expected = torch.rand(3)
    torch.manual_seed(seed)
    evidence = compare(task, ["bf16-split8"], seeds=3)
    assert torch.equal(torch.rand(3), expected)
    assert {number for number in seen if number >= 3} == set(range(3, 30))
    assert evidence.row("step", "bf16-split8").bytes_per_parameter < 16
    assert "accuracy" not in str(evidence), "columns of dashes are left out"
    assert "one  is" not in str(evidence)


def test_a_model_of_a_seed_and_a_judge(seed: int) -> None:
    made: list[int] = []

    def model(seed: int) -> nn.Module:
        made.append(seed)
        return nn.Linear(6, 2)

    _, _, _, (x, _) = squares(seed)
    task = Step(
        lambda model, number: model(x).square().mean(),
        model,
        judge=lambda model, number: (model(x) - number).square().mean(),
        judged=2,
        steps=3,
        lr=1e-3,
    )
    found = _trial.run_trial(Trial(task, recipes.get("fp32"), 7, 3), task.load())
    assert made == [7]
    assert found["float32"]["validation"]["loss"] > found["curve"][-1][1]


def test_what_is_no_step_is_refused(seed: int) -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="a Step takes a function, got"):
        Step(linear, linear, steps=3)
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module or a function that makes it of a seed, got an int"):
        Step(lambda model, number: model, 3, steps=3)
    with pytest.raises(ValueError, match="at least 1, got steps=0"):
        Step(lambda model, number: model, linear, steps=0)
    wrong = Step(lambda model, number: model(torch.ones(1, 2)), linear, steps=3, lr=0.1)
    with pytest.raises(TrialError, match=r"the step returns the loss as a tensor with one element, got shape \(1, 2\)"):
        compare(wrong, ["fp32"], seeds=1)
    task, _, _, _ = squares(seed)
    with pytest.raises(ValueError, match="computes its loss outside of the model, where no emulation rounds it"):
        compare(task, ["e8m3-kahan"], seeds=1)


def test_trials_of_a_step_are_not_taken_over(seed: int, tmp_path) -> None:
    task = squares(seed)[0]
    compare(task, ["bf16"], seeds=1, out=tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="nothing tells whether its function, model and data are those of the trials"):
        compare(task, ["bf16"], seeds=1, out=tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    compare(task, ["bf16"], seeds=1, out=tmp_path, overwrite=True)
