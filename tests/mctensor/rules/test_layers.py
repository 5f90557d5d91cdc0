"""Interpolation: in float64, against torch's own, and counted where that does not hold the digits."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from halfulp.mctensor import MCTensor
from halfulp.subclass import FallbackWarning, record_fallbacks, strict

SHAPES = {"linear": (2, 5), "bilinear": (1, 4, 5), "trilinear": (1, 3, 4, 2), "bicubic": (1, 4, 5)}
WAYS = {
    "larger": lambda x, mode: F.interpolate(x, size=[7] * (x.dim() - 2), mode=mode),
    "smaller": lambda x, mode: F.interpolate(x, size=[2] * (x.dim() - 2), mode=mode),
    "corners": lambda x, mode: F.interpolate(x, size=[7] * (x.dim() - 2), mode=mode, align_corners=True),
    "factor": lambda x, mode: F.interpolate(x, scale_factor=1.7, mode=mode),
    "one": lambda x, mode: F.interpolate(x, size=[1] * (x.dim() - 2), mode=mode, align_corners=True),
}


def _differentiated(x, way, mode):
    x = x.detach().requires_grad_()
    found = WAYS[way](x, mode)
    weights = torch.arange(1.0, 1 + found.numel(), dtype=torch.float64).reshape(found.shape) / 8
    return found.detach(), torch.autograd.grad((found * weights).sum(), x)[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", SHAPES)
@pytest.mark.parametrize("form", [(2, torch.bfloat16), (2, torch.float64), (3, torch.float32)])
def test_it_has_float64s_digits_forward_and_backward_and_is_counted_beyond(form, mode, way, seed):
    values = torch.randn(1, *SHAPES[mode]).to(form[1])
    x = MCTensor.encode(values, *form, gradients="components")
    with record_fallbacks() as counts, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = _differentiated(x, way, mode)
    assert bool(counts) == (form[1] != torch.bfloat16)
    for mine, wanted in zip(found, _differentiated(values.double(), way, mode)):
        assert isinstance(mine, MCTensor)
        gap = (mine.decode() - wanted).abs().max() / wanted.abs().max()
        assert gap <= (2.0**-14 if form[1] == torch.bfloat16 else 2.0**-48)


@pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_strict_or_compiled_one_says_so_too(mode, seed):
    x = MCTensor.encode(torch.randn(1, 1, 4, 5, dtype=torch.float64), 2)
    with strict(), pytest.raises(NotImplementedError, match=r"upsample_.* has no rule for 2 components"):
        WAYS["factor"](x, mode)
    compiled = torch.compile(WAYS["factor"], backend="aot_eager", fullgraph=True)
    with record_fallbacks() as counts:
        found = compiled(x, mode)
    assert counts
    assert (found.decode() - WAYS["factor"](x.decode(), mode)).abs().max() < 2.0**-48
