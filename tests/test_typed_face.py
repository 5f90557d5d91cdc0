"""Every public name stands in tests/typed/consumer.py, its file is checked strictly, and ignores are few."""

import ast
import importlib.util
import inspect
import re
import tomllib
import types
from pathlib import Path

import pytest

import halfulp as hu
import halfulp.scaled.rules
import halfulp.testing
import halfulp.trials.tasks

ROOT = Path(__file__).parents[1]
CONSUMER = ROOT / "tests" / "typed" / "consumer.py"
MOST_IGNORES = 30


def public_names() -> dict[str, object]:
    """Every public name with what it stands for, by its path from halfulp."""
    found: dict[str, object] = {}
    modules, seen = [hu], set()
    while modules:
        module = modules.pop()
        seen.add(module)
        for name in getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]:
            value = getattr(module, name)
            if inspect.ismodule(value):
                # Public are the modules that a package names, and not the folders that it imports from.
                if value not in seen and is_named(module, name):
                    modules.append(value)
            else:
                found[f"{module.__name__}.{name}"] = value
    return found


def is_named(package: types.ModuleType, name: str) -> bool:
    """Return whether a package's __init__ says `from . import name as name`."""
    path = Path(package.__file__)
    stub = path.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else path).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level == 1 and not node.module]
    return name in {alias.asname for node in imports for alias in node.names}


NAMES = public_names()


def uses() -> set[str]:
    """The paths from halfulp that the consumer uses."""
    found = set()
    for node in ast.walk(ast.parse(CONSUMER.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node).replace("hu.", "halfulp.", 1))
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def strict_modules() -> set[str]:
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    return {name for one in overrides if one.get("warn_return_any") for name in one["module"]}


def consumer() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("typed_consumer", CONSUMER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_walk_finds_the_face():
    assert {"halfulp.quantize", "halfulp.scaled.rules.gated_activation", "halfulp.trials.tasks.get"} <= set(NAMES)
    assert len(NAMES) > 150


def test_the_consumer_uses_every_public_name():
    missing = sorted(set(NAMES) - uses())
    assert not missing, f"{', '.join(missing)}: use each in {CONSUMER.name}, with the type that must come out"


def test_files_of_public_names_are_checked_strictly():
    files = {getattr(value, "__module__", None) for value in NAMES.values()}
    files = {name for name in files if name and name.startswith("halfulp")}
    missing = sorted(files - strict_modules())
    assert not missing, f"{', '.join(missing)}: list each under the public face of pyproject.toml"
    for name in strict_modules() - {"consumer"}:
        assert importlib.util.find_spec(name), f"pyproject.toml names {name}, which is no module"


@pytest.mark.parametrize("name", [name for name in vars(consumer()) if not name.startswith("_")])
def test_what_the_consumer_does_works(name, seed):
    function = vars(consumer())[name]
    if inspect.isfunction(function) and function.__module__ == "typed_consumer" and not name.endswith("_read_only"):
        function()


def test_ignores_are_few():
    """The count is printed with -s, and by .ci/run."""
    files = [*(ROOT / "src").rglob("*.py*"), *CONSUMER.parent.rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    ignores = [line for path in files if path.suffix in (".py", ".pyi") for line in path.read_text().splitlines()]
    ignores = [line for line in ignores if re.search(r"# (type|pyright|mypy): *ignore", line)]
    print(f"{len(ignores)} ignores of type checkers")
    assert len(ignores) < MOST_IGNORES
