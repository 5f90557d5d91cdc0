"""Files of tasks: what is missing, what is broken, and which tasks run without any."""

import io
from pathlib import Path

import pytest

from halfulp.trials import tasks
from halfulp.trials.tasks._files import read_parquet


def test_missing_files_name_what_runs_without(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"task 'sst2' reads .*train.*\.parquet, .*Tasks that need no files: digits"
    ) as caught:
        tasks.get("sst2", str(tmp_path))
    assert "cifar10" not in str(caught.value)


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match=r"train.parquet is broken \(Arrow\w+: .*get the file again"):
        read_parquet(path, ["label"])


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    _write_table(tmp_path / "t.parquet", other=[1])
    with pytest.raises(ValueError, match="it has no column label"):
        read_parquet(tmp_path / "t.parquet", ["label"])


@pytest.mark.parametrize(
    ("name", "files", "column"),
    [("cifar10", ("train", "test"), "img"), ("fsdd", ("train", "test"), "audio")],
)
def test_a_broken_image_or_recording_is_named(name: str, files: tuple[str, ...], column: str, tmp_path: Path) -> None:
    for file in files:
        _write_table(tmp_path / f"{file}.parquet", **{column: [{"bytes": b"no such thing"}], "label": [0]})
    with pytest.raises(ValueError, match=r"row 0 of .*train.parquet is broken"):
        tasks.get(name, str(tmp_path)).load()


def test_text_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"input.txt is broken \(UnicodeDecodeError"):
        tasks.get("tinyshakespeare", str(tmp_path)).load()


def test_a_rating_of_nobody_is_named(tmp_path: Path) -> None:
    _write_table(tmp_path / "users.parquet", user_id=[1], age=[20], gender=["M"], occupation=["artist"])
    _write_table(tmp_path / "items.parquet", item_id=[1], title=["Film (1990)"], genres=[[0] * 19])
    _write_table(tmp_path / "ratings.parquet", user_id=[2], item_id=[1], rating=[3])
    with pytest.raises(ValueError, match=r"row 0 of .*ratings.parquet is broken \(KeyError: 2"):
        tasks.get("ml100k", str(tmp_path)).load()


def _write_table(path: Path, **columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    buffer = io.BytesIO()
    parquet.write_table(pa.table(columns), buffer)
    path.write_bytes(buffer.getvalue())
