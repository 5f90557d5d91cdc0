"""Law: every task is the one on record, the same for the same seed, its model float32, its loss with gradients."""

import pickle
import types
from pathlib import Path

import pytest
import torch

from halfulp import recipes
from halfulp.trials import tasks
from halfulp.trials.running import _trial
from halfulp.trials.running._plan import Trial
from halfulp.trials.tasks import Task

from ..records import REMEDY, list_differences, list_names_on_record, read_record
from ..trials.tasks.recorded import describe, write_data

# Digits are trained for 270 steps of float32 before a trial starts, whose last bits differ between processors.
TOLERANCE = {"digits": 1e-3, "digits-slow": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_data(root)
    return root


@pytest.fixture(params=tasks.names())
def task(request: pytest.FixtureRequest, folder: Path) -> Task:
    return tasks.get(request.param, str(folder))


def test_loss_of_a_batch_is_finite_and_has_gradients(task: Task, seed: int) -> None:
    data = task.load()
    model = task.model(data, seed)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    if hasattr(task, "trial"):
        pytest.skip("it brings its own loop")
    model.to(torch.float64 if data.train[0].dtype == torch.float64 else torch.float32)
    inputs, targets = next(iter(task.batches(data, seed, 1)))
    assert len(inputs) == task.batch
    loss = task.loss(model(inputs), targets)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())
    logits, targets = model(data.validation[0][:3]), data.validation[1][:3]
    hits = task.is_hit(logits, targets)
    assert hits.dtype == torch.bool
    assert hits.numel() == task.count_judged(targets)
    assert task.compute_judged_loss(logits, targets).isfinite()


def test_seeds_decide_everything(task: Task, seed: int) -> None:
    data = task.load()

    def trial(number: int) -> list[torch.Tensor]:
        torch.manual_seed(seed + 1000 * number)
        batches = [part for batch in task.batches(data, number, 3) for part in batch]
        return [*batches, *task.model(data, number).state_dict().values()]

    first = trial(1)
    assert all(torch.equal(a, b) for a, b in zip(first, trial(1)))
    assert not all(torch.equal(a, b) for a, b in zip(first, trial(2)))


def test_settings_and_pickle(task: Task) -> None:
    again = pickle.loads(pickle.dumps(task))
    assert again.settings() == task.settings()
    assert task.settings()["name"] == task.name
    assert task.judged_by in ("train_loss", "validation_loss")
    assert all(0 < task.lr_factor(step, task.steps) <= 1 for step in range(task.steps))


def test_a_trial_trains_by_the_tasks_rule_and_hyper_parameters(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(task, "trial"):
        pytest.skip("it brings its own loop")
    made = []

    class Stop(Exception):
        pass

    def optimizer(*arguments, **options):
        made.append(recipes.optimizer(*arguments, **options))
        raise Stop

    monkeypatch.setattr(_trial, "recipes", types.SimpleNamespace(convert=recipes.convert, optimizer=optimizer))
    with pytest.raises(Stop):
        _trial.run_trial(Trial(task, recipes.get("fp32"), 0, 3), task.load())
    (group,) = made[0].param_groups
    assert type(made[0]).__name__ == task.rule
    assert {key: group[key] for key in task.hyper} == task.hyper


@pytest.mark.parametrize("name", tasks.names())
def test_a_task_is_as_on_record(name: str, folder: Path) -> None:
    if not tasks.find_task_class(name).__module__.startswith("halfulp."):
        pytest.skip("a user's task, on which nothing is published")
    found = describe(name, folder)
    recorded = read_record("tasks", name, found)
    shares = {"exact": 1e-9, "computed": TOLERANCE.get(name, 1e-4), "gradients": 1e-2}
    changed = [
        line
        for key, part in recorded.items()
        for line in list_differences(found[key], part, shares[key], f"{name} {key}")
    ]
    assert not changed, REMEDY


def test_no_task_is_lost() -> None:
    assert set(list_names_on_record("tasks")) <= set(tasks.names())
