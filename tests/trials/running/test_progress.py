"""What a person reads while trials run, without a terminal."""

import io
import re

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
