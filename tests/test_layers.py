"""The house: imports go one way, importing does no work, every file is one idea with a name and a docstring."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import halfulp

ROOT = Path(halfulp.__file__).parent
LAYERS = [
    {"_messages", "_names", "_extensions"},
    {"_torch_floor"},
    {"_needs_torch"},
    {"_torch_import"},
    {"kernels"},
    {"formats"},
    {"rounding"},
    {"arithmetic"},
    {"subclass"},
    {"mctensor", "scaled"},
    {"testing"},
    {"optim", "gradients", "hyperbolic"},
    {"emulation"},
    {"recipes"},
    {"observe"},
    {"trials"},
    {"integrations"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES = 420


def _imported_packages(path: Path) -> set[str]:
    """The first-level packages of halfulp that a file imports, anywhere in it."""
    package = ["halfulp", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [".".join([*module, alias.name]) for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("halfulp.")}
    return found


def _home(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_lies_below_it(path):
    home = _home(path)
    if home in ("__init__", "__main__"):
        return
    assert home in LEVEL, f"{home} has no place in the order of layers"
    for name in _imported_packages(path) - {home, "__version__"}:
        assert name in LEVEL, f"{path.name} imports halfulp.{name}, which is no layer"
        assert LEVEL[name] < LEVEL[home], f"{home} imports {name}: not below it"


def test_the_parser_sees_relative_and_absolute_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "optim" / "_x.py"
    file.parent.mkdir()
    file.write_text(
        "from .. import formats\nfrom ..rounding._random import mix64\nimport halfulp.cli\nfrom ._y import z\n"
    )
    assert _imported_packages(file) == {"formats", "rounding", "cli", "optim"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_and_says_what_it_is(path):
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    assert docstring, "no module docstring"
    assert docstring.splitlines()[0].strip().endswith((".", "?", "!", ")")), "the first line is no sentence"
    assert len(text.splitlines()) <= MOST_LINES


def test_importing_does_no_work():
    code = """
import sys
import torch
opened = []
SOURCES = (".py", ".pyi", ".pyc", ".so")
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and not arguments[0].endswith(SOURCES):
        opened.append(arguments[0])
before = set(sys.modules)
sys.addaudithook(hook)
import halfulp
for name in halfulp.__all__:
    getattr(halfulp, name)
new = set(sys.modules) - before
heavy = [name for name in ("numba", "llvmlite", "triton", "pandas", "sklearn", "matplotlib", "typer", "rich", "jinja2",
                           "transformers", "pyarrow", "torch._inductor", "torch._dynamo.convert_frame") if name in new]
assert not heavy, heavy
assert not torch.cuda.is_initialized()
mine = [path for path in opened if ".pyc." not in path and "__pycache__" not in path]
assert not mine, mine
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
