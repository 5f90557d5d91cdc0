"""What a person reads while trials run, without a terminal."""

import io
import re

import pytest

from halfulp.trials.running._plan import plan_trials
from halfulp.trials.running._progress import TrialProgress


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_left_falls(tiny, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    clock = Clock()
    progress = TrialProgress(clock)
    trials = plan_trials(tiny.Tiny(), ["fp32"], 3, 100, None)
    done = {"float32": {"validation": {"loss": 1.5}}, "diverged_at": None}
    with progress:
        progress("plan", None, trials)
        for trial in trials:
            progress("start", trial, None)
            clock.now += 30.0
            progress("progress", trial, (50, 2.0))
            clock.now += 30.0
            progress("done", trial, done)
        assert progress.bar.total == progress.bar.completed
    said = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", progress.console.file.getvalue())
    assert progress.console.is_terminal == terminal
    assert "1/3  tiny · fp32 · seed 0" in said
    assert re.findall(r"about (.*) left", said) == ["2.0 min", "60 s"]


def test_nothing_is_left_after_the_last_trial(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    clock = Clock()
    progress = TrialProgress(clock)
    trials = plan_trials(tiny.Tiny(), ["fp32"], 7, 100, None)
    done = {"float32": {"validation": {"loss": 1.5}}, "diverged_at": None}
    with progress:
        progress("plan", None, trials)
        for trial in trials:
            progress("start", trial, None)
            for step in range(3, 100, 3):
                clock.now += 0.1
                progress("progress", trial, (step, 2.0))
            progress("done", trial, done)
    assert progress.bar.completed == progress.bar.total
    *_, before, last = progress.console.file.getvalue().splitlines()
    assert "left" in before
    assert "left" not in last
