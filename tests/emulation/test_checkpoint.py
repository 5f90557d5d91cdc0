"""Activation checkpointing: the same bits as without it."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from halfulp._messages import ENV_HINT
from halfulp.emulation import emulate
from halfulp.rounding import Nearest, Stochastic
from halfulp.subclass.models._conversion import wrap_reentrant_recomputed_function


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.last = nn.Linear(6, 6)
        self.call = call

    def forward(self, x):
        return self.last(self.call(self._body, torch.sin(x)))

    def _body(self, x):
        return self.first(torch.exp(x) * 1.3) + x


def gradients(model, x, rounding, seed):
    handle = emulate(model, "e8m3", rounding)
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    out = model(x)
    # The generator stands where it stood, so that the roundings of the backward pass are comparable.
    out.square().sum().backward()
    handle.remove()
    return [out, x.grad, *[p.grad for p in model.parameters()]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_same_bits(seed, reentrant):
    model = Model(lambda f, x: f(x))
    x = torch.randn(5, 6)
    plain = gradients(model, x, Nearest(), seed)
    model.call = partial(checkpoint, use_reentrant=reentrant)
    for a, b in zip(gradients(model, x, Nearest(), seed), plain, strict=True):
        assert torch.equal(a, b)


def test_nested(seed):
    once = partial(checkpoint, use_reentrant=False)
    model = Model(lambda f, x: f(x))
    x = torch.randn(5, 6)
    plain = gradients(model, x, Nearest(), seed)
    model.call = lambda f, x: once(lambda x: once(f, x), x)
    for a, b in zip(gradients(model, x, Nearest(), seed), plain, strict=True):
        assert torch.equal(a, b)


def test_of_the_whole_model_and_sequential(seed):
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh())
    emulate(model, "e8m3")
    x = torch.randn(5, 6)
    model(x).sum().backward()
    plain = model[0].weight.grad
    model.zero_grad()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert torch.equal(model[0].weight.grad, plain)

    def parts(x):
        return checkpoint_sequential(model, 2, x, use_reentrant=False)

    model.forward.remove()
    model.zero_grad()
    emulate(parts, "e8m3")(x).sum().backward()
    assert torch.equal(model[0].weight.grad, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same_bits(seed, reentrant):
    """What the function computes again equals what it computed first."""
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            y = torch.sin(x)
            seen.append(y.detach().clone())
            return torch.exp(y * 1.3)

    watched = Watched()
    outer = emulate(lambda x: checkpoint(watched, x, use_reentrant=reentrant), "e8m1", Stochastic())
    outer(torch.randn(100, requires_grad=True)).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_other_saved_tensor_hooks_are_left_alone():
    packed = []

    def pack(x):
        packed.append(x)
        return x

    def f(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return torch.exp(x) * 3

    x = torch.randn(4, requires_grad=True)
    emulate(f, "bf16")(x).sum().backward()
    assert packed
    assert torch.equal(x.grad, x.grad.bfloat16().float())


def test_checkpointing_of_another_make_is_refused_by_name():
    name = "OtherCheckpointFunctionBackward"
    with pytest.raises(NotImplementedError, match=f"emulate does not know the checkpointing of {name}: .*{ENV_HINT}"):
        wrap_reentrant_recomputed_function(object(), name, lambda function: function, "emulate")
