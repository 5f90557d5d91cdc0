"""halfulp forecast: checkpoints of every layout, its table and JSON, exit codes."""

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn


@pytest.fixture
def forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `halfulp forecast` in this process: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        from halfulp.cli import main

        with pytest.raises(SystemExit) as caught:
            main(["forecast", *arguments])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


def trained(dtype: torch.dtype = torch.bfloat16):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        model(torch.randn(4, 16).to(dtype)).float().square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_weights_alone(forecast):
    model, _ = trained()
    safetensors.torch.save_file(model.state_dict(), "model.safetensors")
    code, out, err = forecast("model.safetensors", "--lr", "1e-4", "--schedule", "cosine", "--steps", "1000")
    assert (code, err) == (1, "")
    # Where the biases happen to be large, they freeze as the norm's weight does.
    first = r"AdamW, cosine schedule, steps 0 to 1000\n\n\d findings, of one cause:\nerror    freeze-ahead: "
    assert re.match(first + r".*from the first step on: bf16 weights", out)
    assert re.search("(frozen|freezes) in bf16 from now", out)
    assert "kahan" in out


def test_weights_and_optimizer_of_one_file(forecast):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    code, out, _ = forecast("checkpoint.pt", "--schedule", "linear", "--steps", "100", "--json", "--out", "page")
    assert code == 1
    found = json.loads(out)
    assert (found["start"], found["steps"], found["rule"]) == (3, 100, "AdamW")
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert set(layers) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert {layer["updates"] for layer in layers.values()} == {"the optimizer's state"}
    assert layers["1.weight"]["freeze_step"] == 3
    assert layers["1.weight"]["lr"] == pytest.approx(1e-4 * 0.97)
    assert {"freeze_lr", "lost"} <= set(layers["0.weight"])
    codes = [finding["code"] for finding in found["findings"]]
    assert codes[0] == "freeze-ahead"
    assert "weight-decay-lost" not in codes, "the saved options have no weight decay"
    assert json.loads(Path("page", "forecast.json").read_text())["layers"] == found["layers"]
    assert "1.weight" in Path("page", "forecast.html").read_text()


def test_a_healthy_plan_has_exit_code_0(forecast):
    model, _ = trained(torch.float32)
    safetensors.torch.save_file(model.state_dict(), "model.safetensors")
    code, out, _ = forecast("model.safetensors", "--lr", "1e-3", "--schedule", "cosine", "--steps", "1000")
    assert code == 0
    assert "error" not in out
    assert "warning" not in out
    assert forecast("model.safetensors", "--lr", "1e-3", "--dtype", "bf16")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.safetensors", "--lr", "1"], "nothing.safetensors does not exist"),
        (["model.safetensors"], "holds no optimizer: give the learning rate"),
        (["model.safetensors", "--lr", "1", "--schedule", "cosine"], "give steps="),
        (["model.safetensors", "--lr", "1", "--schedule", "cosin", "--steps", "3"], "did you mean 'cosine'"),
        (["model.safetensors", "--lr", "1", "--optimizer", "adamx"], "unknown optimizer 'adamx'"),
        (["model.safetensors", "--lr", "1", "--beta1", "0.9"], "--beta1 and --beta2 together"),
        (["model.safetensors", "--lr", "-1"], "a finite number from 0"),
        (["model.safetensors", "--lr", "1", "--weight-decay", "nan"], "weight_decay=nan: give a finite number from 0"),
        (["cut.safetensors", "--lr", "1"], "cut.safetensors"),
        (["model.safetensors", "--lr", "1", "--out", "model.safetensors"], "cannot write"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(forecast, arguments, words):
    safetensors.torch.save_file(trained()[0].state_dict(), "model.safetensors")
    Path("cut.safetensors").write_bytes(Path("model.safetensors").read_bytes()[:-100])
    code, out, err = forecast(*arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
