"""What a stranger adds in one file is known by its name everywhere: examples/extending, a process each."""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import halfulp as hu
from halfulp._torch_versions import HAS_GRADIENT_DTYPE

HERE = Path(__file__).resolve().parents[1] / "examples" / "extending"
FILES = sorted(path.name for path in HERE.glob("*.py"))


def check_optimizer(kind, equation, second_moment, **options):
    """20 steps follow `equation(weight, gradients)`, which yields weights in float64, and recipes know the class.

    The source of this function goes before the code in USES.
    """
    torch.manual_seed(0)
    start, gradients = torch.randn(64), torch.randn(20, 64)
    narrow, float32 = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.clone())
    by_name = hu.optim.OPTIMIZERS[kind.__name__]
    optimizers = [by_name([narrow], weight_update="split", lr=0.01, **options), kind([float32], lr=0.01, **options)]
    *_, w = equation(start.double(), gradients.double())
    for g in gradients:
        for optimizer, parameter in zip(optimizers, (narrow, float32)):
            parameter.grad = g.to(parameter.dtype)
            optimizer.step()
    assert (float32.double() - w).abs().max() < 1e-5
    assert (narrow.double() - w).abs().max() < 0.03
    stored = {}
    for recipe in ("bf16-kahan", "bf16-mc2"):
        model = hu.convert(torch.nn.Linear(4, 4), recipe)
        optimizer = hu.recipes.optimizer(model, kind.__name__, lr=0.01)
        assert type(optimizer) is kind
        stored[recipe] = optimizer.param_groups[0]["state_dtype"]
    assert stored == {"bf16-kahan": None, "bf16-mc2": {second_moment: "bfloat16x2"}}


# What each example must be good for; the code runs after the file was loaded, as `extension`.
USES = {
    "format_e4m3b11fnuz.py": """
        x = torch.tensor([0.1, 3.0, 1e3])
        near, same, overflow = hu.quantize(x, "e4m3b11fnuz").tolist()
        assert (near, same) == (0.1015625, 3.0) and overflow != overflow
        assert "e4m3b11fnuz" in hu.formats.names() and hu.formats.get("e4m3b11fnuz") is extension.e4m3b11fnuz
        recipe = hu.recipes.get("gradients-e4m3b11fnuz")
        model = hu.convert(torch.nn.Linear(4, 4), recipe)
        optimizer, scaler = hu.recipes.optimizer(model, "SGD", lr=1e-2), hu.recipes.scaler(recipe, model)
        before = model.weight.detach().clone()
        for _ in range(8):  # the first scale is too large for a format that ends at 30
            scaler.scale(model(torch.randn(2, 4)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert not torch.equal(before, model.weight)
        assert hu.Recipe.from_json(recipe.to_json()) == recipe
    """,
    "adabelief.py": """
        def equation(w, gradients):
            m = s = torch.zeros(64).double()
            for t, g in enumerate(gradients, 1):
                m = 0.9 * m + 0.1 * g
                s = 0.999 * s + 0.001 * (g - m) ** 2 + 1e-16
                w = w - 0.01 / (1 - 0.9**t) * m / ((s / (1 - 0.999**t)).sqrt() + 1e-16)
                yield w

        check_optimizer(extension.AdaBelief, equation, second_moment="exp_avg_var")
    """,
    "yogi.py": """
        def equation(w, gradients):
            m, v = torch.zeros(64).double(), torch.full((64,), 0.5).double()
            for g in gradients:
                m = 0.9 * m + 0.1 * g
                v = v - 0.001 * torch.sign(v - g**2) * g**2
                w = w - 0.01 * m / (v.sqrt() + 1e-3)
                yield w

        check_optimizer(extension.Yogi, equation, second_moment="exp_avg_sq", initial_accumulator_value=0.5)
        try:
            extension.Yogi([torch.nn.Parameter(torch.ones(2))], initial_accumulator_value=-1.0)
        except ValueError as error:
            assert "'exp_avg_sq' begins with -1.0" in str(error)
        else:
            raise AssertionError("a negative second moment was taken")
    """,
    "adopt.py": """
        def equation(w, gradients):
            m, v = torch.zeros(64).double(), gradients[0] ** 2
            yield w
            for t, g in enumerate(gradients[1:], 1):
                m = 0.9 * m + 0.1 * (g / v.sqrt().clamp(min=1e-6)).clamp(-(t**0.25), t**0.25)
                v = 0.9999 * v + 0.0001 * g * g
                w = w - 0.01 * (m + 0.1 * w)
                yield w

        check_optimizer(extension.ADOPT, equation, second_moment="exp_avg_sq", weight_decay=0.1)
        try:
            extension.ADOPT([torch.nn.Parameter(torch.ones(2))], betas=(0.9, 0.99, 0.999))
        except ValueError as error:
            assert "give two numbers" in str(error)
        else:
            raise AssertionError("a third beta was taken")
    """,
    "coarse_policy.py": """
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        recipe, said, rule = hu.recipes.get("e5m2-coarse"), [], extension.Coarse.exponent
        extension.Coarse.exponent = lambda self, site: said.append(rule(self, site)) or said[-1]
        assert 'gradient_scale: coarse, The exponent of "amax", rounded down' in " ".join(recipe.explain().split())
        model = hu.convert(model, recipe)
        optimizer = hu.recipes.optimizer(model, "SGD", lr=0.1)
        scaler = hu.recipes.scaler(recipe, model)
        for _ in range(40):
            scaler.scale(model(torch.randn(16, 8)).square().mean() * 1e-3).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert len(said) > 10 and not any(exponent % 4 for exponent in said if exponent is not None), said
        # Between two measurements they follow the loss.
        assert {row.exponent for row in scaler.sites() if row.format and row.amax} - {16}
    """,
    "swiglu_rule.py": """
        torch.manual_seed(0)
        gate, x = torch.randn(64), torch.randn(64) * 2.0**30
        hu.testing.check_rule(torch.ops.extending.swiglu, lambda: (torch.randn(5), torch.randn(5)), gradients=False)
        found = torch.ops.extending.swiglu(hu.ScaledTensor.encode(gate), hu.ScaledTensor.encode(x))
        assert type(found) is hu.ScaledTensor and found.payload.dtype == torch.float16
        torch.testing.assert_close(found.decode(), extension.swiglu(gate, x), rtol=4e-3, atol=0.0)
    """,
    "half_away_rounding.py": """
        for engine in ("auto", "reference"):
            with hu.kernels.engine(engine):
                found = hu.quantize(torch.tensor([1.25, 2.5, -2.5, 3.4]), "e8m1", "half_away")
                assert found.tolist() == [1.5, 3.0, -3.0, 3.0]
                found = hu.quantize(torch.tensor([6.0, 2.5, -2.5]), "mxfp4", "half_away")
                assert found.tolist() == [6.0, 3.0, -3.0]
        ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
        assert hu.quantize(ties, "bf16", extension.HalfAway()).tolist() == [1.0078125, 1.015625, -1.0078125]
        layer = torch.nn.Linear(3, 3)
        with hu.emulate(layer, "bf16", rounding="half_away"):
            assert layer(torch.ones(2, 3)).bfloat16().float().equal(layer(torch.ones(2, 3)))
    """,
    "spiral_task.py": """
        assert hu.trials.tasks.get("spirals").title.startswith("two spirals")
        assert "spirals" in hu.trials.tasks.names()
    """,
}

# Laws that walk a registry, and an entry of the examples that each must have met.
LAWS = {
    "test_formats": "e4m3b11fnuz",
    "test_roundings": "half_away",
    "test_policies": "coarse",
    "test_recipes": "gradients-e4m3b11fnuz",
    "test_tasks": "spirals",
    "test_conversions": "AdaBelief",
    "optim/test_fused_steps": "AdaBelief",
    "optim/test_mean_steps": "AdaBelief",
    "optim/test_optimizers": "AdaBelief",
    "optim/test_state_dict": "AdaBelief",
    "optim/test_update_rules": "adabelief",
}


def test_every_example_has_a_use():
    assert sorted(USES) == FILES


@pytest.mark.parametrize("name", FILES)
def test_it_is_known_by_name(name, in_process):
    head = f"import sys; sys.path.insert(0, {str(HERE)!r})\nimport torch\nimport halfulp as hu\n"
    use = f"import {name[:-3]} as extension\n" + inspect.getsource(check_optimizer) + textwrap.dedent(USES[name])
    in_process(head + use)


def test_the_command_line_and_its_workers_know_extensions(tmp_path):
    """A task with its optimizer and a format's recipe, trained by worker processes."""
    sys_path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    extensions = [f"--extension={HERE / name}" for name in ("spiral_task.py", "format_e4m3b11fnuz.py")]
    options = ["--task", "spirals", "--recipe", "fp32,gradients-e4m3b11fnuz", "--seeds", "1", "--steps", "20"]
    command = [sys.executable, "-m", "halfulp.cli", *extensions, "compare", *options, "--workers", "1", "--json"]
    done = subprocess.run([*command, "--out", "out"], cwd=tmp_path, env=sys_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    trials = json.loads(done.stdout)["trials"]
    assert [trial["settings"]["task"]["rule"] for trial in trials] == ["AdaBelief", "AdaBelief"]


def test_what_is_registered_passes_the_laws_of_the_library(forked, monkeypatch):
    """tests/laws with the examples imported first: their entries are walked by the same functions as the library's."""
    files = ("adabelief", "coarse_policy", "format_e4m3b11fnuz", "half_away_rounding", "spiral_task")
    loaded = [word for name in files for word in ("-p", name)]
    entries = "e4m3b11fnuz or half_away or AdaBelief or adabelief or coarse or spirals"
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-rA", "-k", entries]
    monkeypatch.chdir(HERE.parents[1])
    script = f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport pytest\nsys.exit(pytest.main(sys.argv[1:]))\n"
    code, printed = forked(script, *loaded, *options, *(f"tests/laws/{law}.py" for law in LAWS), patience=900)
    assert code == 0, printed[-4000:]
    laws = dict(LAWS)
    if not HAS_GRADIENT_DTYPE:  # steps of 16-bit parameters by float32 gradients are skipped, with that reason
        assert printed.count("(Tensor.grad_dtype)") >= 1
        del laws["optim/test_fused_steps"], laws["optim/test_optimizers"]
    for law, entry in laws.items():
        assert re.search(rf"PASSED \S*{law}\.py::\w+\[.*{entry}", printed), (law, entry)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise RuntimeError('no')", "RuntimeError: no"),
        ("import halfulp as hu\nhu.formats.register(hu.Format('bf16', 4, 3))", "stands for bf16 already"),
        ("import halfulp as hu\nhu.formats.register(hu.Format('Mine', 4, 3))", "lower case"),
        ("import halfulp as hu\nhu.recipes.register(hu.Recipe(name='fp32', description='x'))", "exists already"),
        ("import halfulp as hu\nhu.recipes.register(hu.Recipe(name='x', description=' '))", "no words"),
        ("import halfulp as hu\n@hu.trials.tasks.register\nclass T(hu.trials.tasks.Task): name = 't'", "lacks title"),
        ("import halfulp as hu\n@hu.optim.register_optimizer\nclass O(hu.optim.Optimizer):\n    'o'", "has no rule"),
        (
            "import halfulp as hu\nclass P(hu.gradients.Amax):\n    name = 'dynamic'\n    'p'",
            "no words|exists already",
        ),
    ],
)
def test_what_cannot_be_registered_is_refused(text, words, tmp_path):
    from halfulp import _extensions

    file = tmp_path / f"extension_{abs(hash(text))}.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        _extensions.load_extensions([str(file)])
    assert file.stem not in sys.modules
    with pytest.raises(ValueError, match="no such file"):
        _extensions.load_extensions([str(tmp_path / "absent.py")])


def test_a_file_that_is_loaded_again_stays_and_another_of_its_name_is_refused(tmp_path, monkeypatch):
    from halfulp import _extensions

    monkeypatch.setenv(_extensions.EXTENSIONS_VARIABLE, "")
    first, second = tmp_path / "extension_of_one_name.py", tmp_path / "other" / "extension_of_one_name.py"
    second.parent.mkdir()
    for file in (first, second):
        file.write_text("made = object()")
    monkeypatch.delitem(sys.modules, first.stem, raising=False)
    _extensions.load_extensions([str(first)])
    made = sys.modules[first.stem].made
    _extensions.load_extensions([str(first)])
    assert sys.modules[first.stem].made is made
    with pytest.raises(ValueError, match="is there already: give the file another name"):
        _extensions.load_extensions([str(second)])
    del sys.modules[first.stem]
