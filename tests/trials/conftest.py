"""A task of a hundred parameters, in a module that worker processes can import, and records without training."""

import importlib
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TINY = '''
"""Tasks for tests: four points, a linear model, and ways to go wrong."""

import dataclasses
import os
import signal
import time

import torch
from torch import nn

from halfulp.trials.tasks import Data, Task


@dataclasses.dataclass(frozen=True)
class Tiny(Task):
    """Learns the sign of a number; ``trap`` is what happens in seed 1, once, if the file ``once`` is absent."""

    trap: str = ""
    once: str = ""
    lr: float = 0.1

    name = "tiny"
    title = "a sign"
    rule = "SGD"
    steps = 4
    batch = 2

    @property
    def hyper(self):
        return {"lr": self.lr}

    def load(self):
        inputs = torch.tensor([[-1.0], [-0.5], [0.5], [1.0]])
        targets = torch.tensor([0, 0, 1, 1])
        return Data(train=(inputs, targets), validation=(inputs, targets), note="four points")

    def loss(self, logits, targets):
        return super().loss(logits, targets) * (float("inf") if self.trap == "diverge" else 1.0)

    def model(self, data, seed):
        torch.manual_seed(seed)
        if seed == 1 and self.trap and not (self.once and os.path.exists(self.once)):
            if self.once:
                open(self.once, "w").close()
            if self.trap == "raise":
                raise ZeroDivisionError("a mistake in the task\\nwith more lines")
            if self.trap == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trap == "exit":
                os._exit(7)
            if self.trap == "wait":
                time.sleep(600)
        return nn.Linear(1, 2)
'''


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, on sys.path, which spawned workers inherit."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "halfulp_tiny_task.py").write_text(textwrap.dedent(TINY))
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    monkeypatch.delitem(__import__("sys").modules, "halfulp_tiny_task", raising=False)
    return importlib.import_module("halfulp_tiny_task")


def record(recipe: str, seed: int, loss: float | None, task: str = "tiny", **result: Any) -> dict[str, Any]:
    """A finished trial as ``compare`` stores it, without any training."""
    from halfulp import recipes

    score = {"loss": loss, "accuracy": None if loss is None else 0.9}
    plain = {
        "curve": [[step, 2.0 / step + (0.0 if loss is None else loss)] for step in range(1, 21)],
        "step_ms": 2.0 if recipe == "fp32" else 1.5,
        "bytes_per_parameter": 16.0 if recipe.startswith("fp32") else 8.0,
        "cancelled": 0.5 if recipe == "bf16" else 0.0,
        "realised": 0.25 if recipe == "bf16" else 1.0,
        "diverged_at": None if loss is not None else 3,
        "float32": {"validation": score, "train": {"loss": None, "accuracy": None}},
        "own": score,
        "parameters": 100,
        "targets": 50,
        "data": "nothing at all",
    }
    settings = {
        "task": {"name": task, "title": "a <b>task</b>", "rule": "SGD", "hyper": {"lr": 0.1}, "batch": 2},
        "recipe": recipes.get(recipe).to_dict(),
        "seed": seed,
        "steps": 20,
        "versions": {"halfulp": "0", "torch": "0", "python": "0"},
    }
    settings["task"] |= {"judged_by": "validation_loss", "target": "thing"}
    return {"settings": settings, "result": plain | result}


@pytest.fixture
def make_record() -> Any:
    """``record`` as a fixture, since test modules cannot import each other."""
    return record
