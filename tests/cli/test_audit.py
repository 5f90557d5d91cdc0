"""halfulp audit: its table, its JSON and its exit codes."""

import json

import pytest
import torch

pytest.importorskip("typer")

from halfulp.cli import main


@pytest.fixture
def pair(tmp_path):
    before = {f"layers.{k}.weight": torch.randn(8, 8).bfloat16() for k in range(3)}
    after = {name: (value.float() * 1.1).bfloat16() for name, value in before.items()}
    torch.save(before, tmp_path / "a.pt")
    torch.save(after, tmp_path / "b.pt")
    torch.save({**after, "layers.1.weight": before["layers.1.weight"]}, tmp_path / "frozen.pt")
    return tmp_path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["audit", *map(str, arguments)])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_a_healthy_pair(pair, capsys):
    code, out, err = run(capsys, pair / "a.pt", pair / "b.pt")
    assert (code, err) == (0, "")
    assert "no findings" in out
    assert "layers.{0-2}.weight" in out


def test_a_finding_is_exit_code_1_and_stands_in_table_and_json(pair, capsys):
    code, out, _ = run(capsys, pair / "a.pt", pair / "frozen.pt")
    assert code == 1
    assert "warning  weight-frozen: layers.1.weight: not one of 64 elements moved in bf16\n" in out
    code, out, err = run(capsys, pair / "a.pt", pair / "frozen.pt", "--json")
    found = json.loads(out)
    assert (code, err) == (1, "")
    assert [one["where"] for one in found["findings"]] == [["layers.1.weight"]]
    (frozen,) = [row for row in found["tensors"] if row["status"] == "unchanged"]
    assert (frozen["name"], frozen["share_unchanged"], frozen["largest_change_ulps"]) == ("layers.1.weight", 1.0, 0.0)


def test_names_do_not_steer_the_terminal(tmp_path, capsys):
    torch.save({"w\x1b[2J\u202e": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w\x1b[2J\u202e": torch.zeros(2)}, tmp_path / "b.pt")
    torch.save({"v\x9b2J": torch.ones(2)}, tmp_path / "c.pt")
    code, out, _ = run(capsys, tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 0
    assert "w\\x1b[2J\\u202e (float32): moved" in out
    code, _, err = run(capsys, tmp_path / "a.pt", tmp_path / "c.pt")
    assert code == 2
    assert err.count("\n") == 1
    assert (out + err).replace("\n", "").isprintable()


def test_bad_input_is_one_line_and_exit_code_2(pair, capsys):
    (pair / "cut.pt").write_bytes((pair / "a.pt").read_bytes()[:500])
    (pair / "empty").mkdir()
    torch.save({"other": torch.ones(2)}, pair / "other.pt")
    for given, said in (
        ("cut.pt", "damaged"),
        ("missing.pt", "does not exist"),
        ("empty", "empty folder"),
        ("a.pt", "the same checkpoint"),
        ("other.pt", "different models"),
    ):
        code, out, err = run(capsys, pair / "a.pt", pair / given)
        assert (code, out) == (2, "")
        assert said in err
        assert err.count("\n") == 1
