"""The output folder: whole files only, and resuming."""

import errno
import os
from pathlib import Path

import pytest

from halfulp.pages import write_file_atomically
from halfulp.trials.running._plan import Trial, plan_trials
from halfulp.trials.running._store import TrialStore


@pytest.fixture
def trials():
    return plan_trials("digits", ["fp32", "bf16"], 1, 5, None)


@pytest.fixture
def result(make_record):
    return make_record("fp32", 0, 1.5)["result"]


def test_what_is_kept_is_found_again(tmp_path: Path, trials, result) -> None:
    store = TrialStore(tmp_path / "out")
    store.refuse_or_delete_old_results(resume=False)
    store.write_trial(trials[0], result)
    again = TrialStore(tmp_path / "out")
    again.refuse_or_delete_old_results(resume=True)
    assert again.read_finished_results(trials) == {trials[0].key: result}


@pytest.mark.parametrize("resume", [False, True])
def test_two_comparisons_in_one_folder_do_not_take_each_others_trials(tmp_path: Path, trials, result, resume) -> None:
    one, other = TrialStore(tmp_path), TrialStore(tmp_path)
    for store in (one, other):
        store.refuse_or_delete_old_results(resume=resume)
    one.write_trial(trials[0], result)
    one.json_path.write_text("the report")
    with pytest.raises(ValueError, match=r"another comparison writes into .*give each a folder"):
        other.write_trial(trials[0], {**result, "curve": []})
    assert one.read_finished_results(trials) == {trials[0].key: result}
    assert one.json_path.read_text() == "the report"


@pytest.mark.parametrize("damage", [{}, None, {"curve": []}])
def test_a_file_without_a_result_is_refused(tmp_path: Path, trials, damage) -> None:
    store = TrialStore(tmp_path / "out")
    store.write_trial(trials[0], damage)
    with pytest.raises(ValueError, match=r"is not a finished trial .* delete it and resume again"):
        store.read_finished_results(trials)


def test_other_settings_are_refused(tmp_path: Path, trials) -> None:
    store = TrialStore(tmp_path / "out")
    store.write_trial(trials[0], {})
    longer = plan_trials("digits", ["fp32"], 1, 6, None)
    with pytest.raises(ValueError, match="steps = 5, this run has 6"):
        store.read_finished_results(longer)


@pytest.mark.parametrize("content", ['{"settings": ', "[1]", '{"settings": null, "result": {}}'])
def test_a_broken_file_is_refused(tmp_path: Path, trials, content: str) -> None:
    store = TrialStore(tmp_path / "out")
    (store.trials_folder / f"{trials[0].key}.json").write_text(content)
    with pytest.raises(ValueError, match="is not a finished trial"):
        store.read_finished_results(trials)


def test_any_version_change_refuses_reuse(tmp_path: Path, trials, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrialStore(tmp_path / "out")
    store.write_trial(trials[0], {})
    settings = trials[0].settings()
    assert {"halfulp", "torch", "numpy", "llvmlite", "python"} <= set(settings["versions"])
    for name in settings["versions"]:
        other = {**settings, "versions": {**settings["versions"], name: "0.0.1"}}
        monkeypatch.setattr(Trial, "settings", lambda self, other=other: other)
        with pytest.raises(ValueError, match=rf"versions\.{name} = .*, this run has '0\.0\.1'"):
            store.read_finished_results(trials[:1])


@pytest.mark.parametrize("complete", [False, True])
def test_a_comparison_is_deleted_only_on_request(tmp_path: Path, trials, complete: bool) -> None:
    store = TrialStore(tmp_path / "out")
    store.write_trial(trials[0], {})
    if complete:
        store.json_path.write_text("{}")
    before = {path: path.read_bytes() for path in store.root.rglob("*.json")}
    with pytest.raises(ValueError, match=r"--resume .* --overwrite .* --out"):
        store.refuse_or_delete_old_results(resume=False)
    with pytest.raises(ValueError, match="give one"):
        store.refuse_or_delete_old_results(resume=True, overwrite=True)
    assert {path: path.read_bytes() for path in store.root.rglob("*.json")} == before
    store.refuse_or_delete_old_results(resume=False, overwrite=True)
    assert not list(store.root.rglob("*.json"))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write into the output folder"):
        TrialStore(tmp_path / "file" / "out")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "x.json").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left on device"):
        write_file_atomically(tmp_path / "x.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "old"
