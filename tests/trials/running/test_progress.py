"""What a person reads while trials run, without a terminal."""

import io
import re
import types

import pytest

from halfulp.trials.running._plan import plan_trials
from halfulp.trials.running._progress import TrialProgress


@pytest.mark.parametrize("terminal", [False, True])
def test_each_trial_that_ends_is_a_line(tiny, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    progress = TrialProgress()
    trials = plan_trials(tiny.Tiny(), ["fp32"], 3, 100, None)
    done = {"float32": {"validation": {"loss": 1.5}}, "diverged_at": None}
    with progress:
        progress("plan", None, trials)
        progress("reused", trials[0], done)
        for trial in trials[1:]:
            progress("start", trial, None)
            progress("progress", trial, (50, 2.0))
            progress("done", trial, done)
    said = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", progress.console.file.getvalue())
    assert progress.console.is_terminal == terminal
    assert re.search(r"1/3  tiny · fp32 · seed 0 +validation loss 1\.5000  kept", said)
    assert re.search(r"3/3  tiny · fp32 · seed 2 +validation loss 1\.5000\n", said)
    assert progress.finished_trial_count == progress.trial_count == 3


def test_the_bar_counts_the_steps_of_all_trials(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that run, end and ended before; what ends twice, or starts, counts once and not at all."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    calls: list[object] = []
    progress = TrialProgress()
    progress._bars = types.SimpleNamespace(
        start=lambda: calls.append("start"),
        stop=lambda: calls.append("stop"),
        update=lambda bar, **shown: calls.append((shown["completed"], shown["total"], shown["description"])),
    )
    first, second = plan_trials(tiny.Tiny(), ["fp32"], 2, 100, None)
    done, lost = ({"float32": {"validation": {"loss": x}}, "diverged_at": 7} for x in (1.5, None))
    with progress:
        progress("plan", None, [first])
        progress("start", first, None)
        progress("progress", first, (40, 2.0))
        progress("done", first, done)
        progress("plan", None, [first, second])
        progress("reused", first, done)
        progress("progress", second, (30, 2.0))
        progress("done", second, lost)
    one, two = "1 trials", "2 trials"
    seen = [(0, 100, one), (0, 100, one), (40, 100, one), (100, 100, one), (100, 200, two), (100, 200, two)]
    assert calls == ["start", *seen, (130, 200, two), (200, 200, two), "stop"]
    said = progress.console.file.getvalue().splitlines()
    assert [line.split()[0] for line in said] == ["1/1", "2/2"]
    assert said[1].endswith("diverged at step 7")
    assert (progress.trial_count, progress.finished_trial_count) == (2, 2)
