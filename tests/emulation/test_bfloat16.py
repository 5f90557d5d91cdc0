"""Emulated bf16 in float32 against torch's own bfloat16 kernels, where those round once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfulp.emulation import emulate


def distance(a, b):
    """The differences in units of bf16's last place, and the share of elements that differ."""
    a, b = a.detach().float(), b.detach().float()
    size = torch.maximum(a.abs(), b.abs()).clamp(min=2.0**-126)
    ulps = (a - b).abs() / torch.exp2(torch.floor(torch.log2(size)) - 7)
    return ulps, (ulps > 0).double().mean().item()


def both(function, shapes):
    """Outputs and gradients of torch's bfloat16 and of the emulation.

    Where the processor has no instructions for bfloat16, torch's convolution rounds its sums on the way: in place of it
    stands one in float64, rounded once.
    """
    numbers = [torch.randn(shape).bfloat16() for shape in shapes]
    wide = function is F.conv2d
    native = [(x.double() if wide else x.clone()).requires_grad_() for x in numbers]
    emulated = [x.float().requires_grad_() for x in numbers]
    y, z = function(*native), emulate(function, "bf16")(*emulated)
    gradient = torch.randn(y.shape).bfloat16()
    y.backward(gradient.to(y.dtype))
    z.backward(gradient.float())
    return (y.bfloat16(), z), [(a.grad.bfloat16(), b.grad) for a, b in zip(native, emulated)]


def softmax(x):
    return torch.softmax(x, -1)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (F.relu, [(16, 64)]),
        (torch.add, [(16, 64), (16, 64)]),
        (torch.sub, [(16, 64), (16, 64)]),
        (torch.mul, [(16, 64), (16, 64)]),
        (torch.abs, [(16, 64)]),
        (torch.maximum, [(16, 64), (16, 64)]),
        (lambda x: x * 0.3, [(16, 64)]),
        (lambda x: torch.cat([x, x.t().reshape(16, 64)]), [(16, 64)]),
        (lambda x: (x + x).transpose(0, 1).contiguous() * x.t(), [(16, 64)]),
    ],
)
def test_exact(seed, function, shapes):
    outputs, gradients = both(function, shapes)
    for a, b in (outputs, *gradients):
        assert torch.equal(a.float(), b)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (F.linear, [(16, 64), (32, 64), (32,)]),
        (F.linear, [(4, 8, 64), (32, 64), (32,)]),
        (F.linear, [(4, 8, 64), (32, 64)]),
        (torch.matmul, [(4, 8, 64), (4, 64, 8)]),
        (F.conv2d, [(2, 8, 8, 8), (4, 8, 3, 3), (4,)]),
        (softmax, [(16, 64)]),
        (torch.sigmoid, [(16, 64)]),
        (torch.tanh, [(16, 64)]),
        (torch.exp, [(16, 64)]),
        (F.gelu, [(16, 64)]),
        (F.silu, [(16, 64)]),
        (lambda x: x.sum(-1), [(16, 64)]),
        (lambda x: x.mean(), [(16, 64)]),
    ],
)
def test_up_to_the_order_of_sums(seed, function, shapes, needs_torch):
    """At most an ulp, in at most 2% of the elements: a float32 sum in another order, seen through a tie."""
    if function is softmax:
        needs_torch("a backward pass of bfloat16 softmax that rounds once")
    outputs, gradients = both(function, shapes)
    for a, b in (outputs, *gradients):
        # A sum with cancellation differs by more of its own ulps; measure against the size of the tensor then.
        ulps, share = distance(a, b)
        assert ((ulps <= 1) | ((a.float() - b).abs() <= 2.0**-8 * b.abs().max())).all()
        assert share <= max(0.02, 2 / a.numel())


def test_layer_norm_forward(seed):
    """Backward, torch's CPU kernel reads a mean that it rounded to bfloat16; its CUDA kernel and this do not."""
    outputs, _ = both(lambda x, w, b: F.layer_norm(x, (64,), w, b), [(16, 64), (64,), (64,)])
    a, b = (x.detach().float() for x in outputs)
    # What is left where the bias cancels the product has float32's roundings of both.
    left = b.abs() < 2.0**-10 * b.abs().max()
    assert distance(a[~left], b[~left])[0].max() <= 1
    assert ((a - b)[left].abs() <= 2.0**-17 * b.abs().max()).all()
    assert distance(a, b)[1] <= 0.02


def test_a_model_in_training(seed):
    native = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    emulated = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    emulated.load_state_dict({name: value.float() for name, value in native.state_dict().items()})
    emulate(emulated, torch.bfloat16)
    x = torch.randn(10, 16).bfloat16()
    native(x).square().mean().backward()
    out = emulated(x.float())
    (out.square().mean()).backward()
    for a, b in zip(native.parameters(), emulated.parameters()):
        assert (a.grad.float() - b.grad).abs().max() <= 2.0**-6 * b.grad.abs().max()
