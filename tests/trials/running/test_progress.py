"""What a person reads while trials run, without a terminal."""

import io
import re

import pytest

from halfulp.trials.running._plan import plan
from halfulp.trials.running._progress import Progress, estimate, name_cost_class


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("terminal", [False, True])
def test_the_estimate_comes_first_and_the_time_left_falls(
    tiny, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    clock = Clock()
    progress = Progress(clock)
    trials = plan(tiny.Tiny(), ["fp32"], 3, 100, None)
    done = {"float32": {"validation": {"loss": 1.5}}, "diverged_at": None}
    lefts = []
    with progress:
        progress("plan", None, trials)
        progress("timing", None, 1)
        assert progress.bars.tasks[0].fields["said"] == "timing a few steps of 1 kind of trial"
        costs = {name_cost_class(trials[0]): 60.0}
        progress(
            "estimate",
            None,
            estimate(trials, costs, 1, 2, 3.0, "A Processor 7 with a name that is longer than the line"),
        )
        for trial in trials:
            progress("start", trial, None)
            clock.now += 30.0
            progress("progress", trial, (50, 2.0))
            lefts.append(progress.bars.tasks[0].fields["said"])
            clock.now += 30.0
            progress("done", trial, done)
        total, finished = progress.bars.tasks[0].total, progress.bars.tasks[0].completed
    said = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", progress.console.file.getvalue())
    first = "About 3.0 min by 1 worker of one thread on A Processor 7 with a name that is longer than the line.\n"
    assert first in said
    assert progress.live == terminal
    if terminal:
        assert lefts == ["about 2.5 min left", "about 1.5 min left", "about 30 s left"]
        assert total == finished
    else:
        assert said.startswith(first)
        assert "1/3  tiny · fp32 · seed 0" in said
        assert re.findall(r"about (.*) left", said) == ["2.0 min", "60 s"]


@pytest.mark.parametrize(("timed", "first"), [(True, "At least 65 s"), (False, "How long it takes is not known")])
def test_what_is_known_is_told_though_a_kind_of_trial_was_not_timed(
    tiny, monkeypatch: pytest.MonkeyPatch, timed: bool, first: str
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    progress = Progress()
    trials = plan(tiny.Tiny(), ["fp32", "bf16"], 2, 100, None)
    costs = {name_cost_class(trials[0]): 30.0 if timed else None, name_cost_class(trials[1]): None}
    with progress:
        progress("plan", None, trials)
        progress("timing", None, 2)
        progress("estimate", None, estimate(trials, costs, 1, 2, 3.0, "a processor"))
    said = progress.console.file.getvalue()
    assert said.startswith(first)
    assert ("; 2 of 4 trials were not timed." in said) == timed


def test_nothing_is_left_after_the_last_trial(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    clock = Clock()
    progress = Progress(clock)
    trials = plan(tiny.Tiny(), ["fp32"], 7, 100, None)
    done = {"float32": {"validation": {"loss": 1.5}}, "diverged_at": None}
    with progress:
        progress("plan", None, trials)
        # Seconds whose parts add up to less than the whole.
        progress("estimate", None, estimate(trials, {name_cost_class(trials[0]): 4.7}, 1, 2, 3.0, "a processor"))
        for trial in trials:
            progress("start", trial, None)
            for step in range(3, 100, 3):
                clock.now += 0.1
                progress("progress", trial, (step, 2.0))
            progress("done", trial, done)
    assert progress.bars.tasks[0].completed < progress.bars.tasks[0].total
    *_, before, last = progress.console.file.getvalue().splitlines()
    assert "left" in before
    assert "left" not in last
