"""Operands in blocks: layers with a forward of their own, single examples, shapes of one dimension."""

import copy
import pickle

import pytest
import torch
from torch import nn

import halfulp as hu


class Adapted(nn.Linear):
    """A linear layer with a low-rank addition."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


def test_a_forward_of_its_own_stays_and_is_said():
    model = nn.Sequential(Adapted(32, 8), nn.Linear(8, 8))
    model[1].forward = lambda x: x.sum(-1, keepdim=True)
    first, second = (plan for plan in hu.explain(model, "mxfp8").modules if plan.parameters)
    for plan in (first, second):
        assert plan.products is None
        assert "by torch's own forward" in plan.why
    plain, x = copy.deepcopy(model[0]), torch.randn(4, 32)
    hu.convert(model, "mxfp8")
    assert torch.equal(model[0](x), plain(x))
    model(x).sum().backward()
    assert model[0].down.grad is not None
    assert model(x).shape == (4, 1)
    hu.revert(model)
    assert model(x).shape == (4, 1)


def test_one_example_is_a_batch_of_one():
    x = torch.randn(32, 9) * torch.logspace(-3, 3, 32)[:, None]
    model = hu.convert(nn.Sequential(nn.Conv1d(32, 4, 3)), "nvfp4")
    model(x).sum().backward()
    alone, model[0].weight.grad = model[0].weight.grad, None
    model(x[None]).sum().backward()
    assert torch.equal(alone, model[0].weight.grad)
    linear = hu.convert(nn.Sequential(nn.Linear(32, 8)), "nvfp4")
    linear(torch.randn(32)).sum().backward()
    assert torch.equal(linear[0].bias.grad, torch.ones(8))


def test_a_transposed_convolution_takes_the_size_of_its_result():
    layer, x = nn.ConvTranspose1d(32, 4, 3, stride=2), torch.randn(2, 32, 9)
    plain = layer(x, output_size=[20])
    hu.convert(layer, "mxfp8")
    found = layer(x, output_size=[20])
    assert found.shape == plain.shape
    assert (found - plain).norm() < 0.1 * plain.norm()
    assert torch.equal(found, layer(x, [20]))
    found.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "e5m2"])
def test_a_copy_computes_with_its_own_numbers_or_is_refused(format, seed):
    """nn.DataParallel makes replicas by `_replicate_for_data_parallel`, and sets their parameters as attributes."""
    layer, x = nn.Linear(32, 8), torch.randn(4, 32)
    hu.convert(layer, hu.Recipe(name="narrow", operand_format=format))
    expected = layer(x)
    for deep in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            deep.weight.mul_(2)
            deep.bias.mul_(2)
        assert torch.equal(deep(x), 2 * expected)
        assert torch.equal(layer(x), expected)
    assert torch.equal(copy.copy(layer)(x), expected), "one table of parameters for both"
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = 2 * layer.weight, 2 * layer.bias
    with pytest.raises(NotImplementedError, match=f"rounded to {format}.*DistributedDataParallel in place of nn.Data"):
        replica(x)
    hu.revert(layer)
    assert not layer._forward_pre_hooks


def test_a_shallow_copy_with_a_weight_of_its_own_is_refused():
    layer = hu.convert(nn.Linear(32, 8), "mxfp8")
    other = copy.copy(layer)
    other._parameters = dict(layer._parameters, weight=nn.Parameter(torch.zeros(8, 32)))
    with pytest.raises(NotImplementedError, match=r"take copy\.deepcopy for copies"):
        other(torch.randn(4, 32))
    assert torch.equal(layer(torch.zeros(1, 32)), layer.bias[None])
