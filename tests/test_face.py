"""The public face, name by name, so that none comes or goes unseen; a change here is a change in the changelog."""

import ast
import importlib
import typing
from pathlib import Path

import pytest
import torch

import halfulp as hu

MOST_NAMES = 44
FACE = {
    "halfulp": {
        *("arithmetic", "formats", "gradients", "hyperbolic", "kernels", "optim", "recipes", "rounding", "scaled"),
        *("tensors", "testing", "trials"),
        *("MCTensor", "exact_dot", "exact_partial", "exact_round", "exact_sum", "fallbacks", "multicomponent"),
        *("ScaledTensor", "rescale", "scalify"),
        *("ScaledTensor", "cast", "rescale", "scalify", "verify"),
        *("BlockFormat", "Format", "AdaptiveGradScaler"),
        *("Down", "Nearest", "Stochastic", "TowardZero", "Up", "quantize"),
        *("Components", "Feedback", "Kahan", "Master", "Split", "float32_gradients"),
        *("Evidence", "Recipe", "compare", "emulate"),
    },
    "halfulp.gradients": {
        *("AdaptiveGradScaler", "LastStep", "Policy", "Amax", "Constant", "Dynamic", "Measured", "RisingFloor"),
        *("UnderflowBound", "ElementWise", "AbsRange"),
    },
    "halfulp.optim": {
        *("Adam", "AdamW", "Lion", "SGD", "Optimizer", "EMA", "wrap", "float32_gradients"),
        *("WeightUpdate", "Components", "Feedback", "Kahan", "KahanStochastic", "Master", "Split"),
        *("State", "LostUpdateReport"),
    },
}


def _exported(package: str) -> set[str]:
    """The names that a package's __init__ hands on, each by `from ._x import y as y`."""
    tree = ast.parse(Path(importlib.import_module(package).__file__).read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                assert alias.asname == alias.name, f"{alias.name} is not re-exported as itself"
                found.add(alias.name)
    return found


@pytest.mark.parametrize("package", FACE)
def test_the_face_is_as_it_was(package):
    assert _exported(package) == FACE[package]
    for name in FACE[package]:
        assert getattr(importlib.import_module(package), name) is not None


@pytest.mark.parametrize("package", FACE)
def test_every_public_thing_says_what_it_is(package):
    module = importlib.import_module(package)
    for name in FACE[package]:
        assert (getattr(module, name).__doc__ or "").strip(), f"{package}.{name} has no docstring"


def test_the_face_is_small():
    assert len(FACE["halfulp"]) <= MOST_NAMES
    assert hu.__version__


@pytest.mark.parametrize("name", ["float32_gradients", "multicomponent", "scalify"])
def test_what_changes_a_model_returns_the_type_it_was_given(name):
    function = getattr(hu, name)
    hints = typing.get_type_hints(function)
    assert isinstance(hints["model"], typing.TypeVar)
    assert hints["return"] is hints["model"]
    assert isinstance(torch.nn.Linear(1, 1), hints["model"].__bound__)
