"""Interpolation with weights that have the components' digits: against four float64, and torch's own float64."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.mctensor import MCTensor
from halfulp.subclass import strict

SHAPES = {"linear": (2, 5), "bilinear": (1, 4, 5), "trilinear": (1, 3, 4, 2), "bicubic": (1, 4, 5)}
WAYS = {
    "larger": lambda x, mode: F.interpolate(x, size=[7] * (x.dim() - 2), mode=mode),
    "smaller": lambda x, mode: F.interpolate(x, size=[2] * (x.dim() - 2), mode=mode),
    "corners": lambda x, mode: F.interpolate(x, size=[7] * (x.dim() - 2), mode=mode, align_corners=True),
    "factor": lambda x, mode: F.interpolate(x, scale_factor=1.7, mode=mode),
    "one": lambda x, mode: F.interpolate(x, size=[1] * (x.dim() - 2), mode=mode, align_corners=True),
}
BOUNDS = {(2, torch.float64): 2.0**-98, (3, torch.float32): 2.0**-64}


def _differentiated(x, way, mode):
    x = x.detach().requires_grad_()
    found = WAYS[way](x, mode)
    weights = torch.arange(1.0, 1 + found.numel(), dtype=torch.float64).reshape(found.shape) / 8
    return found.detach(), torch.autograd.grad((found * weights).sum(), x)[0]


def _gap(x, y):
    return float((MCTensor.encode(x, 4, torch.float64) - y).decode().abs().max() / y.decode().abs().max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", SHAPES)
def test_all_digits_forward_and_backward(mode, way, seed):
    values = torch.randn(1, *SHAPES[mode])
    wanted = _differentiated(MCTensor.encode(values, 4, torch.float64, gradients="components"), way, mode)
    with strict():
        for form, bound in BOUNDS.items():
            found = _differentiated(MCTensor.encode(values, *form, gradients="components"), way, mode)
            assert max(map(_gap, found, wanted)) <= bound
    assert max(map(_gap, _differentiated(values.double(), way, mode), wanted)) <= 2.0**-44


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_compiled_one_has_them_too(mode, seed):
    x = MCTensor.encode(torch.randn(1, 1, 4, 5, dtype=torch.float64), 2)
    compiled = torch.compile(WAYS["factor"], backend="aot_eager", fullgraph=True)
    assert _gap(compiled(x, mode), WAYS["factor"](MCTensor.encode(x, 4, torch.float64), mode)) <= 2.0**-98
