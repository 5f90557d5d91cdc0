"""Law: every gradient that leaves an emulated region is in the format, whatever the operator and however it is read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfulp.emulation import emulate, region
from halfulp.kernels import same_bits
from halfulp.rounding import quantize

FORMAT = "e8m2"
FUNCTIONS = {
    "mul": lambda x, w: x * w.sum(0),
    "matmul": lambda x, w: x @ w.t(),
    "linear": lambda x, w: F.linear(x, w),
    "softmax": lambda x, w: (x @ w.t()).softmax(-1),
    "norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
    "conv": lambda x, w: F.conv1d(x[None], w[:, :3, None].contiguous(), padding=1),
    "gelu": lambda x, w: F.gelu(x * w[0]),
    "cat": lambda x, w: torch.cat([x, w, x]),
    "index": lambda x, w: x[[0, 0, 1]] * w[:3],
    "embedding": lambda x, w: F.embedding(torch.tensor([0, 2, 0]), w) * x[:3],
    "expand": lambda x, w: x[:, :1].expand(3, 4) * w[:3],
    "loss": lambda x, w: F.cross_entropy(x @ w.t(), torch.tensor([0, 1, 2])),
    "several uses": lambda x, w: x * w[:3] + x.square() + x.sum(),
    "where": lambda x, w: torch.where(x > 0, x * w[:3], w[:3]),
    "in place": lambda x, w: (x * 1.0).mul_(w[:3]).add_(x),
    "complex": lambda x, w: torch.view_as_real(torch.fft.rfft(x)) * w[0, 0],
}


def in_format(gradient):
    return gradient is not None and same_bits(gradient, quantize(gradient, FORMAT))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("reading", ["grad", "autograd.grad", "hook", "accumulated", "upstream"])
def test_a_gradient_that_leaves_is_in_the_format(name, reading, seed):
    before = [torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)]
    x, w = [3.0 * leaf for leaf in before] if reading == "upstream" else before
    seen = []
    for operand in (x, w):
        if reading in ("hook", "upstream"):
            operand.register_hook(seen.append)
    function = emulate(FUNCTIONS[name], FORMAT)
    for _ in range(2 if reading == "accumulated" else 1):
        result = function(x, w)
        ahead = torch.randn(result.shape)
        if reading == "autograd.grad":
            seen += torch.autograd.grad(result, [x, w], ahead)
        else:
            result.backward(ahead)
    found = seen or [leaf.grad for leaf in before]
    assert len(found) == 2
    assert all(map(in_format, found)), [float((g - quantize(g, FORMAT)).abs().max()) for g in found]


def test_gradients_of_a_models_parameters_and_inputs(seed):
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    x = torch.randn(5, 2, 8, requires_grad=True)
    with emulate(model, FORMAT), region(FORMAT):
        model(x).square().mean().backward()
    assert all(in_format(leaf.grad) for leaf in [x, *model.parameters()])
