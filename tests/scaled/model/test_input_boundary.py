"""What a scaled model is given: transforms of torch.func with respect to it, and copies of the model inside them."""

import copy

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor
from halfulp.subclass import strict

ROWS = 3
TRANSFORMS = {
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x[0]),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones(ROWS, 2))[0],
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda f, x: jacrev(f)(x[0]),
    "jacfwd": lambda f, x: jacfwd(f)(x[0]),
    "hessian": lambda f, x: hessian(lambda x: f(x).square().sum())(x[0]),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sum()))(x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(lambda x: f(x).square().sum()))(x[0]),
    "autograd": lambda f, x: torch.autograd.functional.jacobian(f, x[0]),
}


def _net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))


def _values(x):
    return (x.decode() if isinstance(x, ScaledTensor) else x).detach()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it loads its formulas
@pytest.mark.parametrize("storage", [torch.float32, torch.float16], ids=str)
def test_transforms_with_respect_to_inputs(storage, seed):
    plain, x = _net(), torch.randn(ROWS, 4)
    scaled = hu.scalify(copy.deepcopy(plain), storage)
    for name, transform in TRANSFORMS.items():
        expected = _values(transform(plain, x))
        for model in (scaled, lambda x: copy.deepcopy(scaled)(x)):
            with strict():
                found = _values(transform(model, x))
            most = 1e-5 if storage == torch.float32 else 3e-2
            assert (found - expected).norm() <= most * expected.norm(), name


def test_a_copy_inside_a_transform_is_the_model(seed):
    model, kept = hu.scalify(_net()), []
    vmap(lambda x: kept.append(copy.deepcopy(model)) or x)(torch.randn(2, 4))
    grad(lambda x: (kept.append(copy.deepcopy(model)) or x).sum())(torch.randn(4))
    for other in kept:
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            assert a.requires_grad
            assert a.is_leaf
            assert same_bits(a.payload, b.payload)
            assert same_bits(a.scale, b.scale)
        other(torch.randn(2, 4)).sum().backward()
