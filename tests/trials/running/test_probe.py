"""Probes: what a few timed steps say of a trial, by a fake clock, and that they change nothing."""

import pytest

from halfulp import recipes
from halfulp.trials import compare
from halfulp.trials.running._estimate import Cost, Estimate, _cost, measure
from halfulp.trials.running._plan import Trial
from halfulp.trials.tasks import get


class Ticking:
    """A clock that is a second later at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_the_median_step_and_the_rest() -> None:
    found = _cost(10.0, [12.0, 13.0, 14.0, 20.0, 21.0], 22.0, evaluations=5.0)
    assert found == Cost(step=1.0, rest=2.0 + 5.0)
    assert found.seconds(100) == 107.0
    assert _cost(0.0, [1.0, 2.0], 3.0, 1.0) is None


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16-split8", "e8m3", "fp16-adaptive", "scaled-fp16"])
def test_a_trial_is_timed_by_a_few_of_its_steps(recipe: str) -> None:
    task = get("digits", None)
    found = measure(Trial(task, recipes.get(recipe), 0, 1500), task.load(), Ticking())
    # One look at the clock per step; 1,437 examples of the training and 360 of the validation, which is judged twice.
    assert found == Cost(step=1.0, rest=pytest.approx(1 + (2 * 360 + 1437) / (2 * 256 + 1437)))


@pytest.mark.parametrize("steps", [10, 2000])
def test_a_loop_of_a_tasks_own_is_timed_by_its_reports(steps: int) -> None:
    task = get("linear-regression", None)
    found = measure(Trial(task, recipes.get("fp32"), 0, steps), task.load(), Ticking())
    assert found == Cost(step=1.0, rest=2.0)


@pytest.mark.parametrize(("steps", "timed"), [(10, 3), (20, 5), (59, 12), (1000, 12)])
def test_of_a_short_trial_a_quarter_is_timed(tiny, steps: int, timed: int) -> None:
    clock = Ticking()
    found = measure(Trial(tiny.Tiny(), recipes.get("fp32"), 0, steps), tiny.Tiny().load(), clock)
    assert found == Cost(step=1.0, rest=2.0)
    # One look at each step and one at the end, of two steps before and of those timed; and at begin and end.
    assert clock.now == (2 + 1) + (timed + 1) + 2


def test_what_fails_is_left_to_the_trial(tiny) -> None:
    task = tiny.Tiny(trap="raise")
    assert measure(Trial(task, recipes.get("fp32"), 1, 100), task.load()) is None


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("steps", [12, 80])
def test_compare_estimates_first_and_finds_the_same(tiny, steps: int) -> None:
    events: list[tuple[str, object]] = []
    names = ["bf16", "bf16-stochastic"]
    heard = compare(
        tiny.Tiny(), names, 2, steps=steps, workers=1, listen=lambda kind, _, content: events.append((kind, content))
    )
    silent = compare(tiny.Tiny(), names, 2, steps=steps, workers=1)
    assert [row.loss for row in heard.rows()] == [row.loss for row in silent.rows()]
    kinds = [kind for kind, _ in events]
    assert kinds[:4] == ["plan", "timing", "estimate", "start"]
    assert events[1][1] == 2
    assert kinds.count("estimate") == 1
    found = events[2][1]
    assert isinstance(found, Estimate)
    assert found.seconds is not None
    assert found.untimed == 0
    assert set(found.of_trial) == {f"tiny.{name}.seed{seed}" for name in ("fp32", *names) for seed in (0, 1)}
    assert heard.run["estimated_seconds"] == round(found.seconds, 1)
    assert heard.run["processor"] == silent.run["processor"] == found.processor
    assert "estimated_seconds" not in silent.run


@pytest.mark.usefixtures("forked_workers")
def test_no_trial_starts_before_all_kinds_were_timed(tiny) -> None:
    events: list[str] = []
    tell = lambda kind, _, content: events.append(kind)  # noqa: E731
    compare(tiny.Tiny(), ["bf16", "e8m3"], 3, steps=40, workers=2, listen=tell)
    assert events[:5] == ["plan", "timing", "estimate", "start", "start"]
    assert events.count("done") == 9


@pytest.mark.usefixtures("forked_workers")
def test_trials_that_no_worker_takes_do_not_keep_the_others_from_an_estimate(tiny) -> None:
    class Here(tiny.Tiny):
        name, in_process = "here", True

    events: list[tuple[str, object]] = []
    tell = lambda kind, _, content: events.append((kind, content))  # noqa: E731
    found = compare([Here(), tiny.Tiny()], ["bf16"], 1, steps=12, workers=1, listen=tell)
    assert [kind for kind, _ in events][:3] == ["plan", "timing", "estimate"]
    told = events[2][1]
    assert isinstance(told, Estimate)
    assert told.untimed == 2
    assert set(told.of_trial) == {"tiny.fp32.seed0", "tiny.bf16.seed0"}
    assert "estimated_seconds" not in found.run
    assert [row.task for row in found.rows()] == ["here"] * 2 + ["tiny"] * 2
