"""Rounding inside a model: values, gradients, compilation, checkpointing, second derivatives."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfulp.kernels import same_bits
from halfulp.rounding import Down, Stochastic, StraightThrough, quantize, straight_through

# torch's own, about its own code.
inductor = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:.*should not be instantiated:DeprecationWarning"
)
CASES = [("bf16", None), (None, "e5m2"), ("e4m3fn", "e5m2"), ("mxfp4", "mxfp8_e5m2"), (None, None)]
cases = pytest.mark.parametrize(("forward", "backward"), CASES)


def seen(x: torch.Tensor, weight: torch.Tensor, function) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    (y * weight).sum().backward()
    return y.detach(), x.grad


@cases
def test_values_and_gradients(forward, backward, seed):
    x, weight = torch.randn(8, 32), torch.randn(8, 32)
    value = x if forward is None else quantize(x, forward)
    gradient = weight if backward is None else quantize(weight, backward)
    y, g = seen(x, weight, lambda x: straight_through(x, forward, backward))
    assert same_bits(y, value)
    assert same_bits(g, gradient)
    with torch.no_grad():
        assert same_bits(straight_through(x.requires_grad_(), forward, backward), value)
    y, g = seen(x.detach(), weight, StraightThrough(forward, backward))
    assert same_bits(y, value)
    assert same_bits(g, gradient)


@inductor
@cases
def test_compiled(forward, backward, seed):
    torch._dynamo.reset()
    x, weight = torch.randn(8, 32), torch.randn(8, 32)
    wanted = seen(x, weight, lambda x: straight_through(x * 2, forward, backward))
    got = seen(x, weight, torch.compile(lambda x: straight_through(x * 2, forward, backward), fullgraph=True))
    assert same_bits(got[0], wanted[0])
    assert same_bits(got[1], wanted[1])


def test_modes_of_the_two_ways(seed):
    x, weight = torch.randn(1000), torch.randn(1000)
    y, g = seen(x, weight, lambda x: straight_through(x, "bf16", "bf16", Down(), backward_rounding="up"))
    assert same_bits(y, quantize(x, "bf16", "down"))
    assert same_bits(g, quantize(weight, "bf16", "up"))


def test_fixed_seed_draws_apart(seed):
    """Value and gradient of one element do not share random bits."""
    x = torch.full((2**16,), 1.0 + 2.0**-8)
    y, g = seen(x, x, lambda x: straight_through(x, "bf16", "bf16", Stochastic(seed)))
    again, g_again = seen(x, x, lambda x: straight_through(x, "bf16", "bf16", Stochastic(seed)))
    assert same_bits(y, again)
    assert same_bits(g, g_again)
    agreement = float(((y > 1) == (g > 1)).double().mean())
    assert abs(agreement - 0.5) < 5.5 * 0.5 / 2**8


def test_second_derivative(seed):
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    y = straight_through(x, "bf16", "e5m2")
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    assert same_bits(g.detach(), quantize(3 * y.detach() ** 2, "e5m2"))
    (h,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(h, quantize(6 * y.detach(), "e5m2"))


def model() -> nn.Module:
    layer = StraightThrough("e4m3fn", "e5m2", "stochastic")
    return nn.Sequential(nn.Linear(32, 32), layer, nn.Linear(32, 1))


def gradients(net: nn.Module, call, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    net.zero_grad()
    call().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


@inductor
def test_checkpointing_eager_and_compiled(seed):
    torch._dynamo.reset()
    net, x = model(), torch.randn(16, 32)
    compiled = torch.compile(lambda x: checkpoint(net, x, use_reentrant=False), fullgraph=True)
    plain = gradients(net, lambda: net(x), seed)
    for call in (lambda: checkpoint(net, x, use_reentrant=False), lambda: compiled(x)):
        for a, b in zip(gradients(net, call, seed), plain):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.equal(gradients(net, lambda: net(x), seed + 1)[0], plain[0])


def test_bad_input():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="float32"):
        straight_through(torch.ones(3, dtype=torch.int64), "bf16")
    with pytest.raises(ValueError, match="unknown"):
        straight_through(x, "bf16", "e5m2x")
    with pytest.raises(ValueError, match="unknown rounding"):
        StraightThrough("bf16", rounding="nearst")


def test_repr_and_copies():
    import copy
    import pickle

    layer = StraightThrough("bf16", rounding=Stochastic(3))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(other) == repr(layer) == "StraightThrough(forward=bf16, backward=None, rounding=stochastic)"
