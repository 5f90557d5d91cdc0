"""halfulp compare SCRIPT.py: a user's script under recipes, and what it says where it cannot."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from halfulp import recipes
from halfulp.trials.script import _compare_script
from halfulp.trials.script._substitute import Refusal, substituted

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW({parameters}, lr=1e-4, fused=False)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
truth = torch.randn(16, 4)
for step in range(40):
    x = torch.randn(32, 16)
    loss = nn.functional.mse_loss(model(x), x @ truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
print(sys.argv[1:])
"""


@pytest.fixture
def forked_runs(forked: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of runs that need not import torch."""

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        executable, flag, code, *arguments = command
        assert (executable, flag) == (sys.executable, "-c")
        assert options == {"capture_output": True, "text": True, "check": False}
        # The server's filters are those of tests.
        ended, printed = forked(f"import warnings; warnings.resetwarnings()\n{code}", *arguments)
        return subprocess.CompletedProcess(command, ended, "", printed)

    monkeypatch.setattr(_compare_script, "subprocess", SimpleNamespace(run=run))


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `halfulp compare script.py` in this process, whose runs are processes: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def call(text: str, *arguments: str) -> tuple[int, str, str]:
        from halfulp.cli import main

        Path("script.py").write_text(text)
        with pytest.raises(SystemExit) as caught:
            main(["compare", "script.py", *arguments])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


@pytest.mark.usefixtures("forked_runs")
def test_a_script_under_recipes(compare):
    text = SCRIPT.format(parameters="[{'params': model[0].parameters()}, {'params': model[1:].parameters()}]")
    code, out, err = compare(text, "--recipe", "bf16,bf16-kahan,fp16-adaptive", "--json", "--", "--epochs", "3")
    assert code == 0, err
    rows = {row["recipe"]: row for row in json.loads(out)["recipes"]}
    assert list(rows) == ["fp32", "fp32-twin", "bf16", "bf16-kahan", "fp16-adaptive"]
    assert rows["fp32"]["verdict"] == "reference"
    assert {row["steps"] for row in rows.values() if row["verdict"] != "cannot"} == {40}
    assert abs(rows["bf16-kahan"]["gap"]) < rows["bf16"]["gap"], "rounding to nearest loses updates of 1e-4"
    assert rows["bf16"]["bytes_per_parameter"] < rows["bf16-kahan"]["bytes_per_parameter"]
    assert rows["fp16-adaptive"]["verdict"] == "cannot"
    assert "AdaptiveGradScaler" in rows["fp16-adaptive"]["reason"]
    kept = Path("halfulp-compare", "compare-script.json").read_text()
    assert json.loads(kept) == json.loads(out)
    assert "script.py" not in kept
    assert "epochs" not in kept


def test_a_model_that_is_narrow_already_cannot_be_converted(compare):
    text = SCRIPT.format(parameters="model.parameters()").replace("x @ truth", "(x @ truth).bfloat16()")
    text = text.replace("nn.Linear(32, 4))", "nn.Linear(32, 4)).bfloat16()").replace("model(x)", "model(x.bfloat16())")
    code, _, err = compare(text, "--recipe", "bf16")
    assert code == 2
    assert "cannot be compared under recipes" in err
    assert "float32" in err


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("raise RuntimeError('boom')", [], "the script crashed in float32 (exit code 1): RuntimeError: boom"),
        ("print('nothing')", [], "makes no torch.optim.SGD, Adam or AdamW itself"),
        ("", ["--task", "digits"], "--task: of tasks"),
        ("", ["--recipe", "bf61"], "unknown recipe 'bf61'"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(compare, text, arguments, words):
    code, out, err = compare(text, *arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_classes_are_put_back_and_subclasses_stay_themselves():
    class Mine(torch.optim.AdamW):
        pass

    model = torch.nn.Linear(2, 2)
    before = {name: vars(getattr(torch.optim, name)).get("__init__") for name in ("SGD", "Adam", "AdamW")}
    with substituted(recipes.get("bf16-kahan")) as done:
        assert type(Mine(torch.nn.Linear(2, 2).parameters())) is Mine
        assert not done
        optimizer = torch.optim.AdamW(model.named_parameters(), 1e-3, betas=(0.8, 0.9))
    assert type(optimizer).__module__.startswith("halfulp.optim")
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for recipe in ("fp32", "bf16"):
        with substituted(recipes.get(recipe)):
            pass
    assert before == {name: vars(getattr(torch.optim, name)).get("__init__") for name in ("SGD", "Adam", "AdamW")}
    assert type(torch.optim.AdamW([torch.zeros(1, requires_grad=True)])) is torch.optim.AdamW


@pytest.mark.parametrize("recipe", ["scaled-fp16", "e8m3", "fp16-none"])
def test_recipes_that_need_the_scripts_help_are_refused(recipe):
    with pytest.raises(Refusal, match=r"hu\."), substituted(recipes.get(recipe)):
        pass


def test_parameters_without_a_module_are_refused():
    loose = torch.nn.Parameter(torch.ones(3))
    with substituted(recipes.get("bf16")), pytest.raises(Refusal, match="no module holds"):
        torch.optim.SGD([loose], lr=0.1)
