"""What a release needs: one version everywhere, types, extras, and an import that brings nothing heavy along."""

import tomllib
from pathlib import Path

import pytest

import halfulp as hu

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Each costs tens of milliseconds or more to import, and is needed by one function or command.
HEAVY = (
    *("llvmlite", "numba", "scipy", "sklearn", "matplotlib", "pyarrow", "PIL", "pandas", "typer", "rich", "jinja2"),
    *("transformers", "accelerate", "lightning", "timm", "diffusers", "torchtitan", "triton", "safetensors"),
    *("hypothesis", "pytest", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx"),
    *("torch.distributed.fsdp", "torch.utils.tensorboard", "torchvision", "torchaudio"),
)
NAMES = ("AdamW", "observe", "MCTensor", "scalify", "AdaptiveGradScaler", "compare")


def test_one_version_stands_everywhere():
    assert PROJECT["version"] == hu.__version__
    assert f"\nversion: {hu.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {hu.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_typed_and_its_extras_hold_no_trainer_but_those_of_integrations():
    assert (ROOT / "src" / "halfulp" / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert {"cli", "test", "docs", "trainers"} <= set(PROJECT["optional-dependencies"])
    modules = {path.stem for path in (ROOT / "src/halfulp/integrations").glob("[a-z]*.py")}
    extra = {entry.partition(">")[0] for entry in PROJECT["optional-dependencies"]["trainers"]}
    assert extra <= modules, "each of the extra has its module"
    assert modules - extra == {"torchtitan"}, "which is installed by hand"


# What each line imports in a process where torch is there already, a line of output each.
PROGRAM = """
import sys, torch
seen = set(sys.modules)
for line in {lines!r}:
    exec(line)
    print(*sorted(set(sys.modules) - seen))
    seen |= set(sys.modules)
"""


@pytest.fixture
def brought(in_bare_process) -> list[set[str]]:
    printed = in_bare_process(PROGRAM.format(lines=["import halfulp", *(f"halfulp.{name}" for name in NAMES)]))
    return [set(line.split()) for line in printed.split("\n")[: len(NAMES) + 1]]


def test_importing_brings_a_handful_of_modules(brought):
    """`import halfulp` costs milliseconds: no package of it is imported before a name of it is used."""
    own = {name for name in brought[0] if name.partition(".")[0] == "halfulp"}
    assert len(own) < 8, own
    assert brought[0] - own <= {"lazy_loader"}


def test_the_first_use_of_a_name_brings_nothing_heavy(brought):
    for name, found in zip(NAMES, brought[1:], strict=True):
        heavy = {module for module in found if any(module == word or module.startswith(f"{word}.") for word in HEAVY)}
        assert not heavy, f"hu.{name} imports {', '.join(sorted(heavy))}: import them where they are used"
    assert any("halfulp.optim" in module for module in brought[1])
