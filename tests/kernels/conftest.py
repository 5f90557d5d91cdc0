"""A kernel folder of each test's own, and a way to run Python in a process of its own."""

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HALFULP_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def python(tmp_path: Path, in_bare_process: Callable[..., str]) -> Callable[..., str]:
    """Run programs, one after the other, in a process that has imported torch alone, and return what it prints."""

    def run(*programs: str, **environment: str) -> str:
        start = f"import sys, warnings\nwarnings.resetwarnings()\nsys.path.insert(0, {str(tmp_path)!r})\n"
        return in_bare_process(start + "".join(map(textwrap.dedent, programs)), **environment)

    return run


@pytest.fixture
def forked_python(tmp_path: Path, in_process: Callable[..., str]) -> Callable[..., str]:
    """The same in a process that has imported llvmlite and torch, but compiled nothing; no two in a row hash alike."""
    turns = itertools.count()

    def run(*programs: str, **environment: str) -> str:
        start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True\n"
        return in_process(start + "".join(map(textwrap.dedent, programs)), next(turns) % 2, **environment)

    return run
