"""What kernels do in Triton's interpreter, which must be asked for before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def interpreted(module: str, expression: str) -> str:
    """Return what an expression on `test`, a module of the tests, prints in a process that interprets Triton."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {module} as test; print({expression})"
    command = [sys.executable, "-c", code, str(ROOT)]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.strip()
