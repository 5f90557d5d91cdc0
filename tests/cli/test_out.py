"""--out: the folder with the page and the JSON of an instrument."""

import json
from pathlib import Path

import pytest
import torch

import halfulp as hu
from halfulp.cli import main
from halfulp.cli._conventions import prepare_out_folder, write_page_and_json


@pytest.fixture(scope="module")
def found() -> hu.observation.Forecast:
    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    return hu.observation.forecast(model, torch.optim.AdamW(model.parameters(), lr=1e-4), "cosine", steps=50)


def test_page_and_json_lie_in_the_folder(found: hu.observation.Forecast, tmp_path: Path) -> None:
    out = str(tmp_path / "new" / "folder")
    prepare_out_folder(out, "forecast")
    assert list(Path(out).iterdir()) == []
    write_page_and_json(out, "forecast", found)
    assert sorted(path.name for path in Path(out).iterdir()) == ["forecast.html", "forecast.json"]
    assert json.loads((Path(out) / "forecast.json").read_text(encoding="utf-8")) == found.to_dict()
    assert (Path(out) / "forecast.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_without_a_folder_nothing_is_written(found: hu.observation.Forecast) -> None:
    prepare_out_folder(None, "forecast")
    write_page_and_json(None, "forecast", found)


def test_a_file_in_the_way_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write .*: File exists; give another folder"):
        prepare_out_folder(str(tmp_path / "file"), "audit")
    (tmp_path / "out" / "audit.html").mkdir(parents=True)
    with pytest.raises(ValueError, match="it is a folder"):
        prepare_out_folder(str(tmp_path / "out"), "audit")


def test_the_name_of_a_page_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give a folder, and audit\.html and audit\.json stand in it"):
        prepare_out_folder(str(tmp_path / "report.html"), "audit")
    assert not list(tmp_path.iterdir())


def test_an_audit_writes_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("a", 1.0), ("b", 1.5)):
        torch.save({"norm.weight": torch.ones(4), "head.weight": torch.full((4,), value)}, tmp_path / f"{name}.pt")
    arguments = ["audit", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--json", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(arguments)
    said = capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "audit.json").read_text(encoding="utf-8")) == json.loads(said)
    page = (tmp_path / "out" / "audit.html").read_text(encoding="utf-8")
    assert "<code>norm.weight</code>" in page
    assert str(tmp_path) not in page
    assert str(tmp_path) not in said
