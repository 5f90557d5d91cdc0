"""Lets pytest run the doctests of any one file of the library, under any torch."""

import doctest
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "src"
# The examples of an integration run where its trainer is installed, with what that one needs itself.
NEEDS = {"transformers": ("transformers", "accelerate"), "timm": ("timm", "torchvision")}
INTEGRATIONS = [path for path in (SOURCES / "halfulp" / "integrations").glob("*.py") if path.stem != "__init__"]
collect_ignore = [
    str(path)
    for path in INTEGRATIONS
    if not all(importlib.util.find_spec(name) for name in NEEDS.get(path.stem, (path.stem,)))
]


def pytest_collect_file(file_path: Path) -> None:
    """Imports a source by its name, with the packages above it.

    pytest's own import of the first one would run the file twice: in its package's __init__ and again by itself, which
    would define every class and operator twice.
    """
    if file_path.suffix == ".py" and not file_path.name.startswith("__") and SOURCES in file_path.parents:
        with suppress(Exception):  # the collection of the file says it
            importlib.import_module(".".join(file_path.relative_to(SOURCES).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips an example of what halfulp refuses by name, as an older torch lacks it."""
    import torch

    try:
        return (yield)
    except doctest.UnexpectedException as error:
        said = str(error.exc_info[1])
        if not said.startswith(f"torch {torch.__version__} lacks it"):
            raise
    pytest.skip(said)
