"""Estimates: how long trials take, by a fake clock and costs that are given."""

import pytest

from halfulp import recipes
from halfulp.trials import compare
from halfulp.trials.running._plan import Trial, plan
from halfulp.trials.running._progress import (
    Estimate,
    choose_timed,
    describe_duration,
    estimate,
    makespan,
    measure_cost,
    name_cost_class,
)
from halfulp.trials.tasks import get


def make_trials(tiny, names=("fp32", "bf16", "bf16-kahan"), seeds: int = 2, steps: int = 100) -> list[Trial]:
    return plan(tiny.Tiny(), list(names), seeds, steps, None)


def costs_of(trials: list[Trial], wide: float | None, narrow: float | None) -> dict[str, float | None]:
    return {name_cost_class(trial): wide if trial.recipe.param_dtype is None else narrow for trial in trials}


def test_workers_take_the_next_job_when_they_are_free() -> None:
    assert makespan([4.0, 1.0, 2.0, 3.0], 2) == 6.0
    assert makespan([1.0] * 5, 1) == 5.0
    assert makespan([10.0, 1.0, 1.0], 2) == 10.0


def test_one_trial_per_dtype_is_timed_and_no_short_one(tiny) -> None:
    trials = make_trials(tiny, ["fp32", "fp32-twin", "bf16", "bf16-stochastic", "fp16", "e8m3"], 3)
    assert [trial.recipe.name for trial in choose_timed(trials)] == ["fp32", "bf16", "fp16", "e8m3"]
    assert len(choose_timed(make_trials(tiny, steps=10))) == 2
    assert choose_timed(make_trials(tiny, steps=9)) == []
    assert name_cost_class(trials[0]) != name_cost_class(make_trials(tiny, steps=200)[0])


def test_the_estimate_adds_up_over_the_workers(tiny) -> None:
    trials = make_trials(tiny)
    costs = costs_of(trials, 4.0, 2.0)
    one = estimate(trials, costs, workers=1, cores=2, spent=5.0, processor="a")
    # Two trials of 4 seconds and four of 2.
    assert one.seconds == pytest.approx(5 + 16)
    two = estimate(trials, costs, workers=2, cores=2, spent=5.0, processor="a")
    assert two.seconds == pytest.approx(5 + 8)
    # Four workers share two cores, which two probes kept busy but did not share.
    assert estimate(trials, costs, 4, 2, 0.0, "a").seconds == pytest.approx(2 * makespan([4, 2, 2, 4, 2, 2], 4))


def test_what_was_not_timed_is_counted_beside_what_was(tiny) -> None:
    trials = make_trials(tiny)
    found = estimate(trials, costs_of(trials, 4.0, None), 2, 2, 1.0, "a")
    # Two trials of 4 seconds at once; the four of bfloat16 come on top.
    assert found.seconds == pytest.approx(1 + 4)
    assert found.untimed == 4
    assert len(found.of_trial) == 2
    whole = estimate(trials, costs_of(trials, 4.0, 2.0), 2, 2, 1.0, "a")
    assert whole.untimed == 0
    assert whole.seconds > found.seconds
    nothing = estimate(trials, {}, 2, 2, 1.0, "a")
    assert (nothing.seconds, nothing.untimed) == (None, 6)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.1, "5 s"), (61, "60 s"), (89, "90 s"), (95, "1.6 min"), (7200, "2.0 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert describe_duration(seconds) == words


def test_recipes_alike_in_cost_differ_in_updates_alone() -> None:
    """What a class of cost leaves out are fields that a Recipe has."""
    from halfulp.trials.running._progress import _ALIKE

    assert set(_ALIKE) < set(recipes.get("bf16").to_dict())


class Ticking:
    """A clock that is a second later at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16-split8", "e8m3", "fp16-adaptive", "scaled-fp16"])
def test_a_trial_is_timed_by_a_few_of_its_steps(recipe: str) -> None:
    task = get("digits", None)
    found = measure_cost(Trial(task, recipes.get(recipe), 0, 1500), task.load(), Ticking())
    # One look at the clock per step; 1,437 examples of the training and 360 of the validation, which is judged twice.
    assert found == pytest.approx(1500 + (2 * 360 + 1437) / (2 * 256 + 1437))


@pytest.mark.parametrize("steps", [10, 2000])
def test_a_loop_of_a_tasks_own_is_timed_in_the_same_way(steps: int) -> None:
    task = get("linear-regression", None)
    found = measure_cost(Trial(task, recipes.get("fp32"), 0, steps), task.load(), Ticking())
    assert found == steps + 1.0


@pytest.mark.parametrize(("steps", "timed"), [(10, 3), (20, 5), (59, 14), (1000, 36)])
def test_of_a_short_trial_a_quarter_is_timed(tiny, steps: int, timed: int) -> None:
    clock = Ticking()
    found = measure_cost(Trial(tiny.Tiny(), recipes.get("fp32"), 0, steps), tiny.Tiny().load(), clock)
    assert found == steps + 1.0
    # One look at each step, and at begin and end.
    assert clock.now == timed + 2


def test_what_fails_is_left_to_the_trial(tiny) -> None:
    task = tiny.Tiny(trap="raise")
    assert measure_cost(Trial(task, recipes.get("fp32"), 1, 100), task.load()) is None


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
