"""halfulp compare: what a full disk and a killed worker leave."""

import errno
import os
from pathlib import Path

import pytest

from halfulp.trials import TrialError


@pytest.fixture
def command(make_record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The command line on trials that take no time; ``ends`` says of a trial how it ends."""
    from halfulp.cli import main
    from halfulp.trials.running import _training

    def call(*arguments: str, ends=lambda trial: 1.0) -> tuple[int, str]:
        def work(trials, *_):
            for trial in trials:
                yield "start", trial, None
                end = ends(trial)
                if isinstance(end, Exception):
                    raise end
                record = make_record("fp32", trial.seed, end if isinstance(end, float) else None)
                yield "done", trial, record["result"]

        monkeypatch.setattr(_training, "train_trials", work)
        common = ("--steps", "40", "--task", "linear-regression", "--recipe", "fp32,fp32-twin,bf16")
        with pytest.raises(SystemExit) as caught:
            main(["compare", *common, "--out", str(tmp_path / "out"), *arguments])
        return caught.value.code, capsys.readouterr().err

    return call


def test_what_a_full_disk_or_a_killed_worker_leaves(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = TrialError("the worker of trial x was killed by SIGKILL, as where memory is short")
    code, said = command("--seeds", "1", ends=lambda trial: killed if trial.recipe.name == "bf16" else 1.0)
    assert code == 2
    assert "was killed by SIGKILL" in said
    assert "2 of 3 trials are kept in" in said
    sync = os.fsync
    written: list[int] = []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 2:  # one a trial
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    code, said = command("--resume")
    assert code == 2
    assert "seed1.json: No space left on device; 4 of 9 trials are kept in" in said
    monkeypatch.setattr(os, "fsync", sync)
    assert command("--resume")[0] == 0
