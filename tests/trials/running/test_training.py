"""What a run of trials says of itself: how many were trained, how long that took, and which were there before."""

import pytest

from halfulp import recipes
from halfulp.environment import count_cores, describe_processor
from halfulp.trials.running import _training
from halfulp.trials.running._plan import Trial
from halfulp.trials.running._store import TrialStore
from halfulp.trials.running._training import TrainingRun


@pytest.fixture
def rehearsed(make_record, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Trials that take two seconds each and train nothing: of each call, their number and the workers."""
    calls, clock = [], [100.0]

    def train(trials, workers):
        calls.append((len(trials), workers))
        for trial in trials:
            yield "start", trial, None
            clock[0] += 2.0
            yield "done", trial, make_record(trial.recipe.name, trial.seed, 1.0)["result"]

    monkeypatch.setattr(_training, "train_trials", train)
    monkeypatch.setattr(_training.time, "monotonic", lambda: clock[0])
    return calls


def test_a_run_trains_each_trial_once(tiny, rehearsed) -> None:
    events: list[str] = []
    run = TrainingRun(3, lambda kind, *_: events.append(kind), None, False)
    assert run.make_evidence().run["seconds"] == 0.0
    one, two, more = (Trial(tiny.Tiny(), recipes.get("fp32"), seed, 4) for seed in range(3))
    run.train_trials_without_result([one, two])
    run.train_trials_without_result([one, two, more])
    assert rehearsed == [(2, 2), (1, 1)]
    assert events == ["plan", *["start", "done"] * 2, "plan", "reused", "reused", "start", "done"]
    evidence = run.make_evidence()
    assert [record["settings"]["seed"] for record in evidence.trials] == [0, 1, 2]
    facts = {"workers": 3, "cores": count_cores(), "seconds": 6.0, "trained": 3, "reused": 0}
    assert evidence.run == facts | {"processor": describe_processor()}


@pytest.mark.parametrize("cores", [1, 8, 9])
def test_workers_are_as_many_as_cores_and_no_more_than_eight(tiny, rehearsed, cores, monkeypatch) -> None:
    monkeypatch.setattr(_training, "count_cores", lambda: cores)
    run = TrainingRun(None, None, None, False)
    run.train_trials_without_result([Trial(tiny.Tiny(), recipes.get("fp32"), seed, 4) for seed in range(10)])
    assert rehearsed == [(10, min(cores, 8))]


def test_what_is_kept_in_a_folder_is_not_trained_again(tiny, rehearsed, tmp_path) -> None:
    trials = [Trial(tiny.Tiny(), recipes.get("fp32"), seed, 4) for seed in range(3)]
    first = TrainingRun(1, None, TrialStore(tmp_path), False)
    first.train_trials_without_result(trials[:2])
    events: list[str] = []
    again = TrainingRun(1, lambda kind, *_: events.append(kind), TrialStore(tmp_path), True)
    again.train_trials_without_result(trials)
    assert events == ["plan", "reused", "reused", "start", "done"]
    facts = again.make_evidence().run
    assert (facts["trained"], facts["reused"], facts["seconds"]) == (1, 2, 2.0)
    assert again.results.keys() == {trial.key for trial in trials}
