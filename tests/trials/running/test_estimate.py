"""Estimates: how long trials take, by a fake clock and costs that are given."""

import pytest

from halfulp import recipes
from halfulp.trials.running._estimate import Cost, TimeLeft, cost_class, estimate, in_words, makespan, probes
from halfulp.trials.running._plan import Trial, plan


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_trials(tiny, names=("fp32", "bf16", "bf16-kahan"), seeds: int = 2, steps: int = 100) -> list[Trial]:
    return plan(tiny.Tiny(), list(names), seeds, steps, None)


def costs_of(trials: list[Trial], wide: Cost | None, narrow: Cost | None) -> dict[str, Cost | None]:
    return {cost_class(trial): wide if trial.recipe.param_dtype is None else narrow for trial in trials}


def test_workers_take_the_next_job_when_they_are_free() -> None:
    assert makespan([4.0, 1.0, 2.0, 3.0], 2) == 6.0
    assert makespan([1.0] * 5, 1) == 5.0
    assert makespan([1.0, 1.0], 2, busy=[10.0]) == 10.0
    assert makespan([], 3, busy=[2.0, 0.5]) == 2.0


def test_one_probe_per_dtype_and_none_for_short_trials(tiny) -> None:
    trials = make_trials(tiny, ["fp32", "fp32-twin", "bf16", "bf16-stochastic", "fp16", "e8m3"], 3)
    assert [probe.trial.recipe.name for probe in probes(trials)] == ["fp32", "bf16", "fp16", "e8m3"]
    assert len(probes(make_trials(tiny, steps=10))) == 2
    assert probes(make_trials(tiny, steps=9)) == []
    assert cost_class(trials[0]) != cost_class(make_trials(tiny, steps=200)[0])


def test_the_estimate_adds_up_over_the_workers(tiny) -> None:
    trials = make_trials(tiny)
    costs = costs_of(trials, Cost(step=0.03, rest=1.0), Cost(step=0.01, rest=1.0))
    one = estimate(trials, costs, workers=1, cores=2, spent=5.0, processor="a")
    # Two trials of 4 seconds and four of 2.
    assert one.seconds == pytest.approx(5 + 16)
    assert one.of_task == {"tiny": pytest.approx(16)}
    two = estimate(trials, costs, workers=2, cores=2, spent=5.0, processor="a")
    assert two.seconds == pytest.approx(5 + 8)
    # Four workers share two cores, which two probes kept busy but did not share.
    assert estimate(trials, costs, 4, 2, 0.0, "a").seconds == pytest.approx(2 * makespan([4, 2, 2, 4, 2, 2], 4))


def test_what_was_not_timed_is_counted_beside_what_was(tiny) -> None:
    trials = make_trials(tiny)
    found = estimate(trials, costs_of(trials, Cost(0.03, 1.0), None), 2, 2, 1.0, "a")
    # Two trials of 4 seconds at once; the four of bfloat16 come on top.
    assert found.seconds == pytest.approx(1 + 4)
    assert found.untimed == 4
    assert len(found.of_trial) == 2
    whole = estimate(trials, costs_of(trials, Cost(0.03, 1.0), Cost(0.01, 1.0)), 2, 2, 1.0, "a")
    assert whole.untimed == 0
    assert whole.seconds > found.seconds
    nothing = estimate(trials, {}, 2, 2, 1.0, "a")
    assert (nothing.seconds, nothing.untimed) == (None, 6)


def test_time_left_falls_with_the_clock_and_follows_the_pace(tiny) -> None:
    clock = Clock()
    left = TimeLeft(clock)
    trials = make_trials(tiny, ["fp32"], 10)
    left.plan(trials)
    assert left.seconds() is None
    left.take(estimate(trials, costs_of(trials, Cost(0.1, 0.0), None), 1, 1, 0.0, "a"))
    assert left.seconds() == pytest.approx(100.0)
    left.start(trials[0])
    clock.now += 5.0
    assert left.seconds() == pytest.approx(95.0)
    left.progress(trials[0], 50)
    assert left.seconds() == pytest.approx(95.0)
    clock.now += 5.0
    left.done(trials[0])
    assert left.seconds() == pytest.approx(90.0)
    # From now on everything takes twice as long.
    for trial in trials[1:9]:
        left.start(trial)
        clock.now += 20.0
        left.done(trial)
    assert 18.0 < left.seconds() < 20.0
    left.start(trials[9])
    clock.now += 20.0
    left.done(trials[9])
    assert left.seconds() == 0.0


def test_time_left_without_an_estimate_goes_by_what_finished(tiny) -> None:
    clock = Clock()
    left = TimeLeft(clock)
    trials = make_trials(tiny, ["fp32", "bf16"], 2)
    left.plan(trials)
    left.done(trials[3])  # kept from an earlier run
    left.start(trials[0])
    assert left.seconds() is None
    clock.now += 1.0
    left.progress(trials[0], 10)
    assert left.seconds() == pytest.approx(9 + 10 + 10)
    left.start(trials[1])
    assert left.seconds() == pytest.approx(10 + 9)  # two at once
    clock.now += 9.0
    left.done(trials[0])
    assert left.seconds() == pytest.approx(10)  # trial 1 takes one more second, beside the last one's 10


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.1, "5 s"), (61, "60 s"), (89, "90 s"), (95, "1.6 min"), (7200, "2.0 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_recipes_alike_in_cost_differ_in_updates_alone() -> None:
    """What a class of cost leaves out are fields that a Recipe has."""
    from halfulp.trials.running._estimate import _ALIKE

    assert set(_ALIKE) < set(recipes.get("bf16").to_dict())
