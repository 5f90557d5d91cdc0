"""A kernel folder of each test's own, and a way to run Python in a process of its own."""

import itertools
import os
import subprocess
import sys
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
def python(tmp_path: Path) -> Callable[..., str]:
    """Run programs, one after the other, in a new process and return what it prints; a failure shows its errors."""

    def run(*programs: str, **environment: str) -> str:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        result = subprocess.run(
            [sys.executable, "-c", "".join(map(textwrap.dedent, programs))],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


@pytest.fixture
def forked_python(tmp_path: Path, in_process: Callable[..., str]) -> Callable[..., str]:
    """The same in a process that has imported numba and torch, but compiled nothing; no two in a row hash alike."""
    turns = itertools.count()

    def run(*programs: str, **environment: str) -> str:
        start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True\n"
        return in_process(start + "".join(map(textwrap.dedent, programs)), next(turns) % 2, **environment)

    return run
