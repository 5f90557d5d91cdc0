"""One trial in this process."""

import copy
import dataclasses
import json
import random

import pytest
import torch

from halfulp import recipes
from halfulp.trials import tasks
from halfulp.trials.running import _trial
from halfulp.trials.running._plan import Trial


@pytest.mark.parametrize("recipe", ["fp32", "bf16-kahan", "e8m3-kahan"])
def test_result_is_plain_data(tiny, recipe: str) -> None:
    task = tiny.Tiny()
    seen: list[int] = []
    result = _trial.run_trial(Trial(task, recipes.get(recipe), 0, 7), task.load(), lambda step, loss: seen.append(step))
    json.dumps(result, allow_nan=False)
    assert [step for step, _ in result["curve"]] == seen == list(range(1, 8))
    assert result["parameters"] == 4
    assert result["targets"] == 4
    assert result["diverged_at"] is None
    assert 0 < result["bytes_per_parameter"] <= 20
    assert result["step_ms"] > 0


def test_fp32_has_one_arithmetic(tiny) -> None:
    task = tiny.Tiny()
    result = _trial.run_trial(Trial(task, recipes.get("fp32"), 0, 5), task.load())
    assert result["own"] == result["float32"]["validation"]


def test_evaluate_against_one_pass(seed: int) -> None:
    task = tasks.get("digits")
    data = task.load()
    model = torch.nn.Linear(64, 10)
    got = _trial.evaluate_model(task, model, task.loss, data.validation, size=77)
    logits = model(data.validation[0])
    assert got["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, data.validation[1]).item(), rel=1e-5)
    assert got["accuracy"] == pytest.approx((logits.argmax(1) == data.validation[1]).float().mean().item())


def test_a_loss_that_is_not_finite_ends_the_trial(tiny) -> None:
    task = tiny.Tiny(trap="diverge")
    result = _trial.run_trial(Trial(task, recipes.get("fp32"), 0, 50), task.load())
    assert result["diverged_at"] == 0
    assert result["float32"]["validation"]["loss"] is None
    json.dumps(result, allow_nan=False)


SCALED = ["fp16-none", "fp16-constant-16", "fp16-dynamic", "fp16-adaptive", "e5m2-adaptive"]


@pytest.mark.parametrize("recipe", SCALED)
def test_rounded_gradients_are_plain_data_too(tiny, recipe: str) -> None:
    task = tiny.Tiny()
    result = _trial.run_trial(Trial(task, recipes.get(recipe), 0, 7), task.load())
    json.dumps(result, allow_nan=False)
    assert result["diverged_at"] is None
    assert 0 <= result["skipped"] < 7


def test_only_recipes_with_a_gradient_format_tell_of_it(tiny) -> None:
    task = tiny.Tiny()
    result = _trial.run_trial(Trial(task, recipes.get("bf16"), 0, 3), task.load())
    assert "skipped" not in result


def test_wide_gradients_change_nothing(tiny) -> None:
    """float32 rounded to e8m23 is itself: the scaler and its samples leave no trace, whatever the scale."""
    task = tiny.Tiny()
    plain = _trial.run_trial(Trial(task, recipes.get("fp32"), 3, 40), task.load())
    for scale in (None, 1024.0, "dynamic", "amax"):
        recipe = recipes.Recipe(name="x", gradient_format="e8m23", gradient_scale=scale)
        rounded = _trial.run_trial(Trial(task, recipe, 3, 40), task.load())
        assert rounded["curve"] == plain["curve"]
        assert rounded["float32"] == plain["float32"]
        assert rounded["skipped"] == 0


def test_every_step_may_be_skipped(tiny) -> None:
    task = tiny.Tiny()
    recipe = recipes.Recipe(name="x", gradient_format="fp16", gradient_scale=2.0**30)
    result = _trial.run_trial(Trial(task, recipe, 0, 5), task.load())
    assert result["skipped"] == 5
    assert result["diverged_at"] is None


def test_a_loss_that_is_not_finite_ends_a_scaled_trial(tiny) -> None:
    task = tiny.Tiny(trap="diverge")
    result = _trial.run_trial(Trial(task, recipes.get("fp16-adaptive"), 0, 50), task.load())
    assert result["diverged_at"] == 0
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("recipe", ["fp32", "bf16-split8", "fp16-adaptive"])
def test_step_k_trains_at_rate_k(tiny, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    used: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        # Measuring the gradients of a scaled recipe clears them through an optimizer of rate 0.
        used.extend([rate] if (rate := optimizer.param_groups[0]["lr"]) else [])

    hook = register_optimizer_step_pre_hook(note)
    task = tiny.Tiny()
    monkeypatch.setattr(type(task), "lr_factor", lambda self, step, steps: (step + 1) / (steps + 1))
    try:
        _trial.run_trial(Trial(task, recipes.get(recipe), 0, 6), task.load())
    finally:
        hook.remove()
    assert used == pytest.approx([0.1 * (k + 1) / 7 for k in range(6)])


@pytest.mark.parametrize("name", ["fp32", "bf16-kahan"])
def test_a_schedule_free_trial_scores_the_average(tiny, name: str) -> None:
    class ScheduleFree(tiny.Tiny):
        rule = "SGDScheduleFree"

    task = ScheduleFree(lr=10.0)
    data, steps = task.load(), 12
    found = _trial.run_trial(Trial(task, recipes.get(name), 3, steps), data)
    blank = task.model(data, 3)
    model = recipes.convert(copy.deepcopy(blank), name, seed=3)
    optimizer = recipes.optimizer(model, task.rule, seed=3, **task.hyper)
    for step, (inputs, targets) in enumerate(task.batches(data, 3, steps)):
        optimizer.param_groups[0]["lr"] = task.hyper["lr"] * task.lr_factor(step, steps)
        optimizer.zero_grad()
        task.loss(model(inputs.to(next(model.parameters()).dtype)), targets).backward()
        optimizer.step()

    def loss() -> float:
        blank.load_state_dict(optimizer.float32_state_dict(model))
        return _trial.evaluate_model(task, blank, task.compute_judged_loss, data.validation)["loss"]

    at_gradients = loss()
    optimizer.eval()
    assert found["float32"]["validation"]["loss"] == loss() != at_gradients
    assert found["own"] == _trial.evaluate_model(task, model, task.compute_judged_loss, data.validation)


def test_a_float32_trial_is_the_plain_loop(tiny) -> None:
    task = tiny.Tiny()
    data, steps = task.load(), 12
    found = _trial.run_trial(Trial(task, recipes.get("fp32"), 3, steps), data)
    model = task.model(data, 3)
    optimizer = torch.optim.SGD(model.parameters(), **task.hyper)
    losses = []
    for step, (inputs, targets) in enumerate(task.batches(data, 3, steps)):
        optimizer.param_groups[0]["lr"] = task.hyper["lr"] * task.lr_factor(step, steps)
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [loss for _, loss in found["curve"]] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("recipe", ["fp32-twin", "bf16-stochastic", "e8m3-kahan", "e5m2-adaptive-stochastic"])
def test_a_result_depends_on_the_seed_alone(tiny, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Whatever the process drew before, also where the model draws at its start and in every forward pass."""
    task = tiny.Tiny()
    drawing = torch.nn.Sequential
    monkeypatch.setattr(type(task), "model", lambda *_: drawing(torch.nn.Linear(1, 2), torch.nn.Dropout(0.5)))
    results = []
    for draws, seed in ((0, 5), (3, 5), (3, 6)):
        torch.rand(draws)
        random.random()
        found = _trial.run_trial(Trial(task, recipes.get(recipe), seed, 6), task.load())
        results.append({key: value for key, value in found.items() if key != "step_ms"})
    assert results[0] == results[1]
    assert results[0]["curve"] != results[2]["curve"]


def test_a_trial_takes_a_batch_for_each_step_and_no_more(tiny, monkeypatch) -> None:
    task, batches = tiny.Tiny(), tiny.Tiny.batches
    wanted = _trial.run_trial(Trial(task, recipes.get("bf16"), 0, 5), task.load())
    monkeypatch.setattr(tiny.Tiny, "batches", lambda self, data, seed, steps: batches(self, data, seed, 10**9))
    endless = _trial.run_trial(Trial(task, recipes.get("bf16"), 0, 5), task.load())
    assert (endless["curve"], endless["float32"]) == (wanted["curve"], wanted["float32"])
    monkeypatch.setattr(tiny.Tiny, "batches", lambda self, data, seed, steps: batches(self, data, seed, 3))
    with pytest.raises(ValueError, match="'tiny' yields 3 batches for 5 steps"):
        _trial.run_trial(Trial(task, recipes.get("bf16"), 0, 5), task.load())


@pytest.mark.parametrize("part", ["train", "validation"])
def test_empty_data_are_refused(tiny, part: str) -> None:
    task = tiny.Tiny()
    inputs, targets = getattr(task.load(), part)
    data = dataclasses.replace(task.load(), **{part: (inputs[:0], targets[:0])})
    with pytest.raises(ValueError, match=f"the {part} data of task 'tiny' are empty"):
        _trial.run_trial(Trial(task, recipes.get("bf16"), 0, 5), data)
