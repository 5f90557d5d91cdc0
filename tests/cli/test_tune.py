"""halfulp tune: its table, its files, its mistakes."""

import json

import pytest
import torch
from torch import nn

from halfulp.trials.tasks import Data, Task, _registry


class Line(Task):
    """A line through a few points."""

    name, title, rule, hyper = "line-for-tune", "a line", "SGD", {"lr": 0.05}
    steps, batch, judged_by, in_process, target = 30, 8, "train_loss", True, ""

    def load(self) -> Data:
        x = torch.linspace(-1, 1, 32).unsqueeze(1)
        return Data(train=(x, x), validation=(x, x), note="a line")

    def model(self, data: Data, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(1, 1)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (logits.float() - 2 * targets.float()).square().mean()

    def is_hit(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(targets), dtype=torch.bool)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(_registry._TASK_REGISTRY, Line.name, Line)
    return Line.name


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path):
    """main() in this process: its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        from halfulp.cli import main

        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


def test_a_recipe_is_found_and_kept(run, line: str, tmp_path) -> None:
    code, out, err = run("tune", "--task", line, "--tolerance", "0.5")
    assert code == 0
    assert err.count("validation loss") >= 7
    kept = json.loads((tmp_path / "halfulp-tune" / "tune.json").read_text())
    assert kept["recipe"]["name"] in out
    assert "instead of" in out
    assert (tmp_path / "halfulp-tune" / "compare.html").exists()
    code, out, _ = run("tune", "--task", line, "--tolerance", "0.5", "--resume", "--json")
    assert code == 0
    assert json.loads(out)["recipe"] == kept["recipe"]


def test_a_folder_that_holds_trials_is_kept(run, line: str) -> None:
    assert run("tune", "--task", line, "--recipe", "bf16", "--tolerance", "0.5")[0] == 0
    code, out, err = run("tune", "--task", line, "--recipe", "bf16", "--tolerance", "0.5")
    assert (code, out) == (2, "")
    assert "--resume takes over" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "2"], "a verdict needs three seeds, got 2"),
        (["--tolerance", "2"], "between 0 and 1"),
        (["--recipe", "bf16-khan"], "did you mean 'bf16-kahan'"),
        (["--task", "digts"], "did you mean 'digits'"),
    ],
)
def test_mistakes_are_one_line(run, arguments: list[str], words: str) -> None:
    code, out, err = run("tune", *arguments)
    assert (code, out) == (2, "")
    assert words in err
