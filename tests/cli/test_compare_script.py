"""halfulp compare SCRIPT.py: a user's script under recipes, and what it says where it cannot."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from halfulp import recipes
from halfulp.trials import _script as _compare_script
from halfulp.trials._script import RecipeRefusal, substitute_optimizers

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
        assert options == {"stdout": subprocess.DEVNULL, "check": False}
        # The server's filters are those of tests.
        ended, printed = forked(f"import warnings; warnings.resetwarnings()\n{code}", *arguments)
        print(printed, file=sys.stderr)
        return subprocess.CompletedProcess(command, ended)

    monkeypatch.setattr(_compare_script, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))


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
    assert code == 2, err
    assert "fp16-adaptive could not be used: it takes objects that the script has to use: hu.AdaptiveGradScaler" in err
    found = json.loads(out)
    rows = {row["recipe"]: row for row in found["rows"]}
    assert list(rows) == ["fp32", "fp32-twin", "bf16", "bf16-kahan"]
    assert rows["fp32"]["verdict"] == "reference"
    assert all(len(record["result"]["curve"]) == 40 for record in found["trials"])
    assert {record["settings"]["steps"] for record in found["trials"]} == {40}
    assert abs(rows["bf16-kahan"]["gap"]) < rows["bf16"]["gap"], "rounding to nearest loses updates of 1e-4"
    assert rows["bf16"]["bytes_per_parameter"] < rows["bf16-kahan"]["bytes_per_parameter"]
    (refused,) = found["run"]["refused"]
    assert refused["recipe"] == "fp16-adaptive"
    assert "could not be used: it takes objects that the script has to use: hu.AdaptiveGradScaler" in refused["why"]
    kept = Path("halfulp-compare", "compare-script.json").read_text()
    assert json.loads(kept) == json.loads(out)
    assert "script.py" not in kept
    assert "epochs" not in kept


@pytest.mark.usefixtures("forked_runs")
def test_a_model_that_is_narrow_already_cannot_be_converted(compare):
    text = SCRIPT.format(parameters="model.parameters()").replace("x @ truth", "(x @ truth).bfloat16()")
    text = text.replace("nn.Linear(32, 4))", "nn.Linear(32, 4)).bfloat16()").replace("model(x)", "model(x.bfloat16())")
    code, _, err = compare(text, "--recipe", "bf16")
    assert code == 2
    assert "cannot be compared under recipes" in err
    assert "float32" in err


PLAIN = SCRIPT.format(parameters="model.parameters()")
SUBCLASS = "class Mine(torch.optim.AdamW): ...\noptimizer = Mine"
KINDS = {
    "crash": ("raise RuntimeError('boom')", [], "fp32 crashed with exit code 1, see above"),
    "no optimizer": (
        "import torch; torch.ones(1, requires_grad=True).sum().backward()",
        [],
        "made no optimizer to replace",
    ),
    "no loss": ("print('nothing')", [], "called no backward of a loss"),
    "option of tasks": ("", ["--task", "digits"], "give --recipe and --out alone"),
    "no steps": ("", ["--steps", "0"], "give --recipe and --out alone"),
    "no workers": ("", ["--workers", "0"], "give --recipe and --out alone"),
    "unknown recipe": ("", ["--recipe", "bf61"], "unknown recipe 'bf61'"),
    "exit code": (f"{PLAIN}sys.exit(3)", [], "fp32 exited with exit code 3"),
    "killed": (
        "import os; os.kill(os.getpid(), 9)",
        [],
        "fp32 was killed by SIGKILL, as where memory is short",
    ),
    "never steps": (PLAIN.replace("optimizer.step()", "pass"), [], "never stepped its optimizer"),
    "another optimizer": (
        PLAIN.replace("AdamW", "RMSprop").replace(", fused=False", ""),
        [],
        "it trains by RMSprop; recipes replace one optimizer, torch.optim's SGD, Adam or AdamW",
    ),
    "a subclass": (PLAIN.replace("optimizer = torch.optim.AdamW", SUBCLASS), [], "it trains by Mine"),
    "several optimizers": (f"{PLAIN}torch.optim.SGD(nn.Linear(1, 1).parameters())", [], "it makes several optimizers"),
}


@pytest.mark.parametrize(("text", "arguments", "words"), KINDS.values(), ids=KINDS)
def test_what_is_wrong_is_said_with_exit_code_2(compare, text, arguments, words, request):
    """What exits by itself does so in a Python of its own, as a user's runs."""
    if "exit" not in text:
        request.getfixturevalue("forked_runs")
    code, out, err = compare(text, *arguments)
    assert code == 2
    assert out == ""
    assert words in err.splitlines()[-1]


@pytest.mark.parametrize("command", [["tune"], ["compare"], ["compare", "script.py"]])
def test_torchrun_is_refused(monkeypatch, capsys, tmp_path, command):
    from halfulp.cli import main

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main([*command, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert f"halfulp {command[0]} does not run under torchrun, which says WORLD_SIZE=2: start it without" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("forked_runs")
def test_a_reference_that_diverges_gives_no_verdict_and_a_scaler_no_other_loss(compare):
    text = SCRIPT.format(parameters="model.parameters()").replace("lr=1e-4", "lr=1e-3")
    stepping = "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()"
    scaled = text.replace("loss.backward()\n    optimizer.step()", stepping)
    scaled = scaled.replace("for step", "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\nfor step")
    assert scaled != text
    _, out, _ = compare(text, "--recipe", "fp32", "--json")
    plain = json.loads(out)["rows"][0]["loss"]
    _, out, _ = compare(scaled, "--recipe", "fp32", "--json")
    assert json.loads(out)["rows"][0]["loss"] == pytest.approx(plain, rel=1e-5)
    code, out, err = compare(text.replace("lr=1e-3", "lr=1e30"), "--recipe", "bf16", "--json")
    assert code == 0, err
    rows = {row["recipe"]: row for row in json.loads(out)["rows"]}
    assert rows["bf16"]["verdict"] in ("no verdict", "diverged")
    assert rows["fp32"]["verdict"] == "diverged"
    assert "diverged" in Path("halfulp-compare", "compare-script.html").read_text()


@pytest.mark.usefixtures("forked_runs")
def test_a_class_that_was_imported_before_is_no_matter(compare):
    text = "from torch.optim.adamw import AdamW\n" + SCRIPT.format(parameters="model.parameters()")
    text = text.replace("torch.optim.AdamW", "AdamW")
    code, out, err = compare(text, "--recipe", "bf16-kahan")
    assert code == 0, err
    assert "no difference" in out
    assert "compare-script.html shows the curves" in out
    assert "bf16-kahan" in Path("halfulp-compare", "compare-script.html").read_text()


@pytest.mark.usefixtures("forked_runs")
def test_a_recipe_under_which_it_crashes_is_named_and_the_others_go_on(compare):
    text = SCRIPT.format(parameters="model.parameters()").replace("x @ truth", "x @ truth.to(model[0].weight.dtype)")
    code, out, err = compare(text, "--recipe", "bf16,fp32-twin,bf16-split")
    assert code == 2, err
    assert "RuntimeError" in err
    assert "bf16 crashed with exit code 1, see above; bf16-split crashed with exit code 1, see above" in err
    assert "fp32-twin" in out
    assert Path("halfulp-compare", "compare-script.html").exists()


def test_classes_are_put_back_and_subclasses_stay_themselves():
    class Mine(torch.optim.AdamW):
        pass

    model = torch.nn.Linear(2, 2)
    before = {name: vars(getattr(torch.optim, name)).get("__init__") for name in ("SGD", "Adam", "AdamW")}
    with substitute_optimizers(recipes.get("bf16-kahan")) as done:
        mine = Mine(torch.nn.Linear(2, 2).parameters())
        assert type(mine) is Mine
        assert done.optimizer_ref is None
        with pytest.raises(RecipeRefusal, match="it trains by Mine"):
            mine.step()
        optimizer = torch.optim.AdamW(model.named_parameters(), 1e-3, betas=(0.8, 0.9))
    assert type(optimizer).__module__.startswith("halfulp.optim")
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for recipe in ("fp32", "bf16"):
        with substitute_optimizers(recipes.get(recipe)):
            pass
    assert before == {name: vars(getattr(torch.optim, name)).get("__init__") for name in ("SGD", "Adam", "AdamW")}
    assert type(torch.optim.AdamW([torch.zeros(1, requires_grad=True)])) is torch.optim.AdamW


def test_in_float32_an_optimizer_is_of_torchs_own_class_and_so_is_a_copy():
    own, model = torch.optim.AdamW, torch.nn.Linear(2, 2)
    with substitute_optimizers(recipes.get("fp32-twin")) as done:
        optimizer = own(model.parameters())  # by a name that was bound before
        assert torch.optim.AdamW is type(optimizer) is own
        assert isinstance(optimizer, torch.optim.Adam) == issubclass(own, torch.optim.Adam)
        copy.deepcopy(optimizer).step()
        assert done.step_count == 1


@pytest.mark.parametrize("recipe", ["scaled-fp16", "e8m3", "fp16-none"])
def test_recipes_that_need_the_scripts_help_are_refused(recipe):
    with pytest.raises(RecipeRefusal, match=r"hu\."), substitute_optimizers(recipes.get(recipe)):
        pass


@pytest.mark.parametrize("recipe", ["fp32", "bf16-kahan"])
def test_a_model_that_the_script_converts_is_refused(recipe):
    with substitute_optimizers(recipes.get(recipe)):
        converted = recipes.convert(torch.nn.Linear(2, 2), "bf16")
        with pytest.raises(RecipeRefusal, match="converted already, by recipe 'bf16'"):
            torch.optim.SGD(converted.parameters(), lr=0.1)


def test_a_mistake_in_the_script_is_torchs_own_error():
    model = torch.nn.Linear(2, 2)
    with substitute_optimizers(recipes.get("fp32")), pytest.raises(ValueError, match="Invalid learning rate"):
        torch.optim.SGD(model.parameters(), lr=-1.0)


def test_parameters_without_a_module_are_refused():
    loose = torch.nn.Parameter(torch.ones(3))
    with substitute_optimizers(recipes.get("bf16")), pytest.raises(RecipeRefusal, match="no module holds"):
        torch.optim.SGD([loose], lr=0.1)
