"""torch.compile(fullgraph=True): the eager bits, forward and backward."""

import pytest
import torch
from torch import nn

from halfulp.kernels import same_bits
from halfulp.mctensor import MCTensor

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


def _same(a, b):
    if not isinstance(a, MCTensor):
        return same_bits(a, b)
    return len(a.components) == len(b.components) and all(map(same_bits, a.components, b.components))


FUNCTIONS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b * 2.0,
    "exp": lambda a, b: (a.exp() + b).sum(0),
    "mm": lambda a, b: torch.mm(a, b.T) + 1,
    "views": lambda a, b: torch.cat([a.T, b.T[:2] * a.T[:2]])[1:],
}


DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gradients", ["first", "components"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_eager_bits(function, dtype, gradients, seed):
    function = FUNCTIONS[function]
    results = []
    values = torch.randn(2, 5, 4, dtype=torch.float64)
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        a, b = (MCTensor.encode(value, 2, dtype, gradients=gradients).requires_grad_() for value in values)
        out = run(a, b)
        (out * out).sum().backward()
        results.append((out.detach(), a.grad, b.grad))
    assert all(_same(x, y) for x, y in zip(*results))


def test_inductor_gives_the_eager_bits(seed):
    def function(a, b):
        return torch.mm((a * b + a).exp(), b.T) - 1.5

    values = torch.randn(2, 5, 4, dtype=torch.float64)
    results = []
    for run in (function, torch.compile(function, fullgraph=True)):
        a, b = (MCTensor.encode(value, 2, torch.float32).requires_grad_() for value in values)
        out = run(a, b)
        out.sum().backward()
        results.append((out.detach(), a.grad, b.grad))
    assert all(_same(x, y) for x, y in zip(*results))


def test_a_module_and_a_plain_gradient(seed):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(MCTensor.encode(parameter.detach(), 2))
    batch = torch.randn(5, 4)
    found = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        out = run(batch)
        out.backward(torch.ones(5, 2))
        found.append([out.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(_same(x, y) for x, y in zip(*found))


def test_writing_in_place_and_decoding(seed):
    def function(a, b):
        a.add_(b, alpha=-0.5)
        return (a * a).decode(torch.float64)

    values = torch.randn(2, 5, dtype=torch.float64)
    found = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        a, b = (MCTensor.encode(value, 2, torch.float32) for value in values)
        found.append((run(a, b), a))
    assert all(_same(x, y) for x, y in zip(*found))
