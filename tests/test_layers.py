"""The house: imports go one way, importing does no work, every file is one idea with a name and a docstring."""

import ast
import functools
import graphlib
import sys
from pathlib import Path

import pytest

import halfulp

ROOT = Path(halfulp.__file__).parent
LAYERS = [
    {"_messages", "_names", "_qualified_names", "_extensions"},
    {"_torch_floor"},
    {"_needs_torch"},
    {"_torch_versions"},
    {"_torch_import"},
    {"pages", "sinks"},
    {"kernels"},
    {"environment"},
    {"formats"},
    {"rounding"},
    {"arithmetic"},
    {"subclass"},
    {"mctensor", "scaled"},
    {"optim", "gradients", "hyperbolic"},
    {"emulation"},
    {"recipes"},
    {"observation"},
    {"testing"},
    {"trials"},
    {"integrations"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))
# Folders inside of layers, in the same order.
FOLDERS = {
    "trials": ["tasks", "page", "evidence", "running"],
    "optim": ["rules", "weight_updates", "states", "parameters", "step"],
}
MOST_LINES = 800
MOST_FILES = 20


@functools.cache
def _imported(path: Path) -> set[str]:
    """What a file imports of halfulp, anywhere in it, as "optim._optimizer.Optimizer"."""
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
        found |= {name.removeprefix("halfulp.") for name in names if name.startswith("halfulp.")}
    return found


def _imported_packages(path: Path) -> set[str]:
    """The first-level packages of halfulp among them."""
    return {name.split(".")[0] for name in _imported(path)}


def _home(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _files_imported(path: Path, modules: set[str]) -> set[str]:
    """The modules that a file imports, a package's names as what they stand in where that is a module of its own."""
    found = {name if name in modules else name.rpartition(".")[0] for name in _imported(path)}
    return {name for name in found & modules if not _module(path).startswith(f"{name}.")} - {_module(path)}


def test_a_file_imports_only_what_lies_below_it():
    wrong = []
    for path in FILES:
        home = _home(path)
        if home in ("__init__", "__main__"):
            continue
        assert home in LEVEL, f"{home} has no place in the order of layers"
        for name in _imported_packages(path) - {home, "__version__"}:
            assert name in LEVEL, f"{path.relative_to(ROOT)} imports halfulp.{name}, which is no layer"
            if LEVEL[name] >= LEVEL[home]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}, which is not below {home}")
    assert not wrong, wrong


@pytest.mark.parametrize("layer", FOLDERS)
def test_the_folders_of_a_layer_import_those_before_them(layer):
    wrong = []
    for path in (ROOT / layer).glob("*/*.py"):
        later = {*FOLDERS[layer][FOLDERS[layer].index(path.parent.name) + 1 :]}
        rooms = {name.split(".")[1] for name in _imported(path) if name.startswith(f"{layer}.") and name.count(".") > 1}
        wrong += [f"{path.relative_to(ROOT)} imports {room}" for room in rooms & later]
    assert not wrong, wrong


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions count: to hide a circle there is no cure of it."""
    modules = {_module(path) for path in FILES} - {"__init__"}
    imports = {_module(path): _files_imported(path, modules) for path in FILES if _module(path) in modules}
    graphlib.TopologicalSorter(imports).prepare()


def test_no_folder_is_crowded():
    crowded = {
        str(folder.relative_to(ROOT)): count
        for folder in {path.parent for path in FILES} - {ROOT}
        if (count := sum(path.name != "__init__.py" for path in folder.glob("*.py"))) > MOST_FILES
    }
    assert not crowded, f"{crowded}: find rooms inside whose names say what lies there"


def test_the_parser_sees_relative_and_absolute_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "optim" / "_x.py"
    file.parent.mkdir()
    file.write_text(
        "from .. import formats\nfrom ..rounding._random import mix64\nimport halfulp.cli\nfrom ._y import z\n"
    )
    assert _imported_packages(file) == {"formats", "rounding", "cli", "optim"}


def test_a_file_is_short_and_says_what_it_is():
    wrong = []
    for path in FILES:
        text = path.read_text()
        docstring = (ast.get_docstring(ast.parse(text), clean=False) or "").splitlines() or [""]
        if not docstring[0].strip().endswith((".", "?", "!", ")")):
            wrong.append(f"{path.relative_to(ROOT)}: the first line is no sentence")
        if len(text.splitlines()) > MOST_LINES:
            wrong.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
    assert not wrong, wrong


def test_importing_does_no_work(in_bare_process):
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
heavy = [name for name in ("llvmlite", "triton", "pandas", "sklearn", "matplotlib", "typer", "rich", "jinja2",
                           "transformers", "pyarrow", "torch._inductor", "torch._dynamo.convert_frame") if name in new]
assert not heavy, heavy
assert not torch.cuda.is_initialized()
mine = [path for path in opened if ".pyc." not in path and "__pycache__" not in path]
assert not mine, mine
"""
    in_bare_process(code)
