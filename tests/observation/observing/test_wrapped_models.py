"""A model inside a trainer's wrapper is observed under its own names."""

import pytest
import torch

import halfulp as hu
from halfulp.observation.scripts._find import find


class _Fabricated(torch.nn.Module):
    """As Fabric wraps a model."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = self._original_module = model

    def forward(self, x):
        return self._forward_module(x).float()


class _Checkpointed(torch.nn.Module):
    """As torch wraps a module whose activations it computes again."""

    def __init__(self, model):
        super().__init__()
        self._checkpoint_wrapped_module = model

    def forward(self, x):
        return self._checkpoint_wrapped_module(x)


def _model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).bfloat16()


def _set_up(model, optimizer):
    fabric = pytest.importorskip("lightning.fabric")
    return fabric.Fabric(accelerator="cpu", devices=1).setup(model, optimizer)


WRAPPERS = {
    "Fabric's shape": lambda model, optimizer: (_Fabricated(model), optimizer),
    "twice": lambda model, optimizer: (_Fabricated(_Fabricated(model)), optimizer),
    "Fabric": _set_up,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_the_models_own(wrapper):
    model = _model()
    wrapped, optimizer = WRAPPERS[wrapper](model, hu.optim.AdamW(model.parameters(), lr=1e-3))
    with hu.observe(wrapped, optimizer, interval=1) as seen:
        wrapped(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    assert list(seen.record.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {name for role, name in seen.record.tensors if role == "activation"} >= {"0", "1"}
    assert find([hu.optim.AdamW(model.parameters())]).model is model


def test_parameters_of_checkpointed_modules_have_their_own_names_and_parallel_ones_their_modules():
    model = _model()
    model[0] = _Checkpointed(model[0])
    outer = torch.nn.Module()
    outer.module = model
    seen = hu.observe(outer, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(seen.record.parameters) == [f"module.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
