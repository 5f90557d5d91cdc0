"""Sinks: files whole to the line whatever ends a run, loggers by what they can do, and none that ends a training."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfulp.sinks import GuardedSink, JsonLinesFile, make_guarded_sink

ROW = {"step": 3, "loss": 0.5, "updates_lost/layers.*.norm.weight": None}
needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")


def test_lines_of_json_hold_what_was_given_and_are_continued(tmp_path):
    rows = [{**ROW, "step": step} for step in range(4)]
    for start in (0, 2):
        file = JsonLinesFile(tmp_path / "seen.jsonl")
        file.check()
        for row in rows[start : start + 2]:
            file.write(row)
    assert [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()] == rows


def test_what_json_has_no_word_for_is_a_word(tmp_path):
    JsonLinesFile(tmp_path / "seen.jsonl").write({"a": math.nan, "b": [-math.inf], "c": {"d": math.inf}})

    def refuse(word):
        raise AssertionError(word)

    found = json.loads((tmp_path / "seen.jsonl").read_text(), parse_constant=refuse)
    assert found == {"a": "nan", "b": ["-inf"], "c": {"d": "inf"}}


def test_anew_replaces_at_the_first_row_and_not_before(tmp_path):
    path = tmp_path / "seen.jsonl"
    path.write_text("old\n")
    file = JsonLinesFile(path, overwrite=True)
    file.check()
    assert path.read_text() == "old\n"
    file.write({"step": 0})
    file.write({"step": 1})
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_files_that_cannot_be_written_are_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match=r"a \.jsonl file, got .*seen\.csv.*pandas\.read_json"):
        JsonLinesFile(tmp_path / "seen.csv")
    with pytest.raises(ValueError, match=r"cannot write .*missing.*No such file or directory; give another path"):
        JsonLinesFile(tmp_path / "missing" / "seen.jsonl").check()
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"cannot write .*folder\.jsonl.*Is a directory"):
        JsonLinesFile(tmp_path / "folder.jsonl").check()
    assert [path.name for path in tmp_path.iterdir()] == ["folder.jsonl"]


def test_a_killed_process_leaves_whole_lines(tmp_path):
    script = (
        "import os, signal\n"
        "from halfulp.sinks import JsonLinesFile\n"
        "file = JsonLinesFile('seen.jsonl')\n"
        "os.mkdir('elsewhere'); os.chdir('elsewhere')\n"
        "for step in range(5):\n"
        "    file.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    lines = (tmp_path / "seen.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(5))


@needs_full_device
def test_a_full_disk_closes_the_outlet_with_one_warning_and_nothing_later(tmp_path):
    (tmp_path / "secret.jsonl").symlink_to("/dev/full")
    one = make_guarded_sink(tmp_path / "secret.jsonl")
    with pytest.warns(RuntimeWarning, match=r"No space left on device\) at step 3; the training goes on"):
        one.put(ROW)
    one.put(ROW)
    assert (
        one.failure == "the file of JSON lines gets no more rows: it raised OSError (No space left on device) at step 3"
    )
    assert "secret" not in one.failure


def test_an_error_is_told_where_warnings_are_errors_and_raises_nothing():
    one = GuardedSink("the run", lambda row: 1 / 0)
    one.put(ROW)  # the suite makes warnings errors
    one.put(ROW)
    assert "ZeroDivisionError" in one.failure


def test_keyboard_interrupts_pass():
    def interrupt(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedSink("the function", interrupt).put(ROW)


class Writer:
    def __init__(self):
        self.told = []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.told.append((tag, scalar_value, global_step))


class Run:
    def __init__(self):
        self.told = []

    def log(self, data, step=None):
        self.told.append((data, step))


class Metrics(Run):
    def log_metrics(self, metrics, **options):
        self.told.append((metrics, options))

    log = None


def test_loggers_get_what_is_known_under_a_name_of_its_own():
    writer, run, metrics, rows = Writer(), Run(), Metrics(), []
    for sink in (writer, run, metrics, rows.append):
        make_guarded_sink(sink).put(ROW)
    assert writer.told == [("halfulp/loss", 0.5, 3)]
    assert run.told == [({"halfulp/step": 3, "halfulp/loss": 0.5}, 3)]
    assert metrics.told == [({"halfulp/step": 3, "halfulp/loss": 0.5}, {"step": 3})]
    assert rows == [ROW]
    assert rows[0] is not ROW, "a function may change what it gets"


def test_a_summary_writer_takes_rows(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    writer = tensorboard.SummaryWriter(str(tmp_path))
    one = make_guarded_sink(writer)
    one.put({**ROW, "loss": math.nan})
    one.put(ROW)
    writer.close()
    assert one.failure is None
    assert list(tmp_path.iterdir())


def test_what_takes_no_rows_is_refused():
    with pytest.raises(TypeError, match=r"a sink is a path .* or a function of a dict; got an int"):
        make_guarded_sink(3)
