"""Which trials a comparison consists of."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from halfulp import recipes
from halfulp.trials._defaults import DEFAULT_RECIPES, DEFAULT_TASKS
from halfulp.trials.running._plan import plan_trials
from halfulp.trials.tasks import Step

STEP = Step(lambda model, number: model.weight.sum(), nn.Linear(1, 1), steps=1)


def make_step(name: str = "step", **hyper) -> Step:
    return Step(lambda model, number: model.weight.sum(), nn.Linear(1, 1), steps=1, name=name, **hyper)


def make_step_judged_by(judged_by: str) -> Step:
    step = make_step()
    step.judged_by = judged_by
    return step


DOTTED = [dataclasses.replace(recipes.get("bf16"), name=name) for name in ("b", "a.b")]


def test_every_combination_once_in_order() -> None:
    trials = plan_trials(["digits", "text"], ["fp32", "bf16"], 2, None, None)
    assert len({trial.key for trial in trials}) == len(trials) == 8
    assert [trial.key for trial in trials[:4]] == [
        "digits.fp32.seed0",
        "digits.bf16.seed0",
        "digits.fp32.seed1",
        "digits.bf16.seed1",
    ]
    assert {trial.steps for trial in trials if trial.task.name == "text"} == {trials[-1].task.steps}


def test_the_reference_is_always_there() -> None:
    assert [trial.recipe.name for trial in plan_trials("digits", ["bf16"], [5], 1, None)] == ["fp32", "bf16"]


def test_the_defaults_exist() -> None:
    assert len(plan_trials(list(DEFAULT_TASKS), DEFAULT_RECIPES, 2, None, None)) == 28


def test_settings_are_plain_data() -> None:
    for trial in plan_trials(["digits", "text", "digits-fpu"], ["bf16-mixed"], 1, None, None):
        assert json.loads(json.dumps(trial.settings()))["task"]["name"] == trial.task.name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("digts", ["fp32"], 1, 1, None), "did you mean 'digits'"),
        (("digits", ["fp23"], 1, 1, None), "did you mean 'fp32'"),
        (("digits", ["fp32", "fp32"], 1, 1, None), "more than once"),
        ((["digits", "digits"], ["fp32"], 1, 1, None), "more than once"),
        (([], ["fp32"], 1, 1, None), "no task"),
        (("digits", [], 1, 1, None), "no recipe"),
        (([make_step("x"), make_step("x.a")], DOTTED, 1, 1, None), "two trials have one name.*dots"),
        ((make_step(lr=torch.tensor(0.1)), ["fp32"], 1, 1, None), "'step' has settings.*Tensor.*plain numbers"),
        (
            (make_step_judged_by("val_loss"), ["fp32"], 1, 1, None),
            "judged by 'val_loss'.*train_loss or validation_loss",
        ),
        (("digits", ["fp32"], 0, 1, None), "at least 1"),
        (("digits", ["fp32"], [-1], 1, None), "0 and up"),
        (("digits", ["fp32"], [1, 1], 1, None), "more than once"),
        (("digits", ["fp32"], 1, 0, None), "at least 1"),
        (("cifar10", ["fp32"], 1, 1, None), "--data DIR"),
        (("tinyshakespeare", ["fp32"], 1, 1, "/nowhere"), "neither"),
        ((["digits", STEP], ["fp32", "e8m5"], 1, 1, None), "'step' computes its loss outside of the model.*e8m5"),
    ],
)
def test_what_cannot_be_planned(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_trials(*arguments)


@pytest.mark.parametrize("seeds", ["3", b"3", True, ["0", "1"], [0.0, 1.0], 3.0, None])
def test_seeds_are_integers(seeds) -> None:
    with pytest.raises(TypeError, match=r"seeds is how many .* or which .*, got"):
        plan_trials("digits", ["fp32"], seeds, 1, None)


@pytest.mark.parametrize("name", ["fp32", "fp32-twin"])
def test_the_controls_names_are_theirs(name: str) -> None:
    control = recipes.get(name)
    assert plan_trials("digits", [dataclasses.replace(control, description="mine")], 1, 1, None)
    for change in ({"param_dtype": "bfloat16", "perturb": 0.0}, {"perturb": 1e-3}, {"state_dtype": "8bit"}):
        with pytest.raises(ValueError, match=rf"'{name}' belongs to float32.*give yours another name"):
            plan_trials("digits", [dataclasses.replace(control, **change)], 1, 1, None)


def test_one_recipe_needs_no_list() -> None:
    assert [trial.recipe.name for trial in plan_trials("digits", "bf16", 1, 1, None)] == ["fp32", "bf16"]


def test_names_become_file_names() -> None:

    with pytest.raises(ValueError, match="file name"):
        plan_trials("digits", [recipes.get("bf16").replace(name="../x")], 1, 1, None)
