"""compare, with real worker processes: results, resuming, crashed and killed workers."""

import json
from pathlib import Path

import pytest

from halfulp import recipes
from halfulp.trials import TrialError, compare


@pytest.mark.usefixtures("forked_workers")
def test_every_trial_gives_evidence(tiny, tmp_path: Path) -> None:
    events: list[str] = []
    names = ["fp32", "fp32-twin", "bf16", "bf16-kahan"]
    evidence = compare(
        tiny.Tiny(), names, seeds=2, steps=3, out=tmp_path, workers=2, listen=lambda kind, *_: events.append(kind)
    )
    assert [row.recipe for row in evidence.rows()] == names
    assert len(evidence.trials) == events.count("done") == events.count("start") == 8
    assert evidence.row("tiny", "bf16").bytes_per_parameter < evidence.row("tiny", "fp32").bytes_per_parameter
    assert json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert (tmp_path / "compare.html").read_text().startswith("<!doctype html>")


def test_the_same_settings_give_the_same_losses(tiny, request) -> None:
    """In two processes that hash differently: the one is forked, the other a Python of its own."""
    first = compare(tiny.Tiny(), ["bf16-stochastic"], seeds=[3], steps=5, workers=1)
    request.getfixturevalue("forked_workers")
    second = compare(tiny.Tiny(), ["bf16-stochastic"], seeds=[3], steps=5, workers=1)
    assert [row.loss for row in first.rows()] == [row.loss for row in second.rows()]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("trap", "words"),
    [
        ("kill", r"the worker of trial tiny · bf16 · seed 1 was killed by SIGKILL"),
        ("exit", r"the worker of trial tiny · bf16 · seed 1 ended with exit code 7"),
        ("raise", r"trial tiny · bf16 · seed 1 failed: ZeroDivisionError: a mistake in the task$"),
    ],
)
def test_a_lost_trial_is_no_result_and_can_be_resumed(tiny, tmp_path: Path, trap: str, words: str) -> None:
    out = tmp_path / "out"
    names = ["fp32", recipes.get("bf16")]
    once = tmp_path / "once"
    task = tiny.Tiny(trap=trap, once=str(once))
    once.touch()
    compare(task, ["fp32"], seeds=2, steps=3, out=out, workers=1)
    once.unlink()
    with pytest.raises(TrialError, match=words) as caught:
        compare(task, names, seeds=2, steps=3, out=out, workers=1, resume=True)
    assert caught.value.trial.key == "tiny.bf16.seed1"
    assert not (out / "compare.json").exists()
    kept = {path.name for path in (out / "trials").iterdir()}
    assert kept == {"tiny.fp32.seed0.json", "tiny.fp32.seed1.json", "tiny.bf16.seed0.json"}
    reused: list[str] = []

    def listen(kind: str, trial, content) -> None:
        reused.extend([trial.key] if kind == "reused" else [])

    evidence = compare(task, names, seeds=2, steps=3, out=out, workers=1, resume=True, listen=listen)
    assert len(evidence.trials) == 4
    assert len(reused) == 3


@pytest.mark.usefixtures("forked_workers")
def test_other_hyper_parameters_are_not_resumed(tiny, tmp_path: Path) -> None:
    compare(tiny.Tiny(), ["fp32"], seeds=1, steps=2, out=tmp_path, workers=1)
    with pytest.raises(ValueError, match=r"cannot resume: .* task\.hyper = .*0\.1}, this run has .*0\.2}"):
        compare(tiny.Tiny(lr=0.2), ["fp32"], seeds=1, steps=2, out=tmp_path, workers=1, resume=True)


@pytest.mark.usefixtures("forked_workers")
def test_divergence_is_a_result(tiny) -> None:
    evidence = compare(tiny.Tiny(trap="diverge"), ["fp32", "bf16"], seeds=1, steps=20, workers=1)
    assert evidence.row("tiny", "fp32").diverged == 1
    assert "diverged" in evidence.table()


def test_nothing_is_trained_for_an_unwritable_folder(tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    started: list[str] = []
    with pytest.raises(ValueError, match="cannot write into the output folder"):
        compare(tiny.Tiny(), ["fp32"], out=tmp_path / "file" / "x", listen=lambda kind, *_: started.append(kind))
    assert started == []


@pytest.mark.usefixtures("forked_workers")
def test_a_listener_that_stops_ends_the_workers(tiny, tmp_path: Path) -> None:
    import multiprocessing

    def listen(kind: str, trial, content) -> None:
        if kind == "start":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(tiny.Tiny(trap="wait"), ["fp32"], seeds=[1], out=tmp_path, workers=1, listen=listen)
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("halfulp-trials")]
    assert not list((tmp_path / "trials").iterdir())


@pytest.mark.parametrize(("options", "words"), [({"workers": 0}, "workers"), ({"resume": True}, "out=")])
def test_impossible_requests(tiny, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compare(tiny.Tiny(), ["fp32"], **options)
