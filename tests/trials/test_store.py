"""The output folder: whole files only, and resuming."""

import errno
import os
from pathlib import Path

import pytest

from halfulp.trials._plan import plan
from halfulp.trials._store import Store, write


@pytest.fixture
def trials():
    return plan("digits", ["fp32", "bf16"], 1, 5, None)


def test_what_is_kept_is_found_again(tmp_path: Path, trials) -> None:
    store = Store(tmp_path / "out")
    assert store.begin(trials, resume=False) == {}
    store.keep(trials[0], {"curve": [], "value": 1.5})
    assert Store(tmp_path / "out").begin(trials, resume=True) == {trials[0].key: {"curve": [], "value": 1.5}}


def test_other_settings_are_refused(tmp_path: Path, trials) -> None:
    store = Store(tmp_path / "out")
    store.keep(trials[0], {})
    longer = plan("digits", ["fp32"], 1, 6, None)
    with pytest.raises(ValueError, match="steps = 5, this run has 6"):
        store.begin(longer, resume=True)


def test_a_broken_file_is_refused(tmp_path: Path, trials) -> None:
    store = Store(tmp_path / "out")
    (store.trials / f"{trials[0].key}.json").write_text('{"settings": ')
    with pytest.raises(ValueError, match="is not a finished trial"):
        store.begin(trials, resume=True)


def test_an_interrupted_run_is_not_overwritten(tmp_path: Path, trials) -> None:
    store = Store(tmp_path / "out")
    store.keep(trials[0], {})
    with pytest.raises(ValueError, match="--resume"):
        store.begin(trials, resume=False)
    store.report.write_text("{}")
    assert store.begin(trials, resume=False) == {}
    assert not list(store.trials.iterdir())
    assert not store.report.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write into the output folder"):
        Store(tmp_path / "file" / "out")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "x.json").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left on device"):
        write(tmp_path / "x.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "old"
