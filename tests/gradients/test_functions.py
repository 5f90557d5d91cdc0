"""What policies are shown of a product: factors whose sums over the seam are the gradient that it passes on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfulp.gradients._functions import list_second_factors


def parameter(*shape):
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


def activation(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def products():
    x, y = activation(5, 3), activation(3, 4)
    image, columns = activation(2, 6, 7), torch.randn(2, 4, 9, dtype=torch.float64)
    return {
        "linear": (F.linear, (activation(2, 5, 3), parameter(4, 3)), {}, [0], 4),
        "linear by name": (F.linear, (x,), {"weight": parameter(4, 3)}, [0], 4),
        "matmul": (torch.matmul, (x, y), {}, [0, 1], None),
        "a square parameter first": (torch.matmul, (parameter(3, 3), y), {}, [1], 3),
        "@": (torch.Tensor.__matmul__, (x, parameter(3, 4)), {}, [0], 4),
        "addmm": (torch.addmm, (parameter(4), x, y), {}, [1, 2], None),
        "conv1d": (F.conv1d, (image, parameter(4, 6, 1)), {}, [0], 4),
        "conv1d of no batch": (F.conv1d, (activation(6, 7), parameter(4, 6, 1)), {}, [0], 4),
        "conv_transpose1d": (F.conv_transpose1d, (image, parameter(6, 4, 1)), {}, [0], 4),
        "the first layer": (F.conv1d, (columns, parameter(4, 4, 1)), {}, [], 4),
    }


@pytest.mark.parametrize("name", products())
def test_factors_make_the_gradient(name, seed):
    function, args, options, passed, fan = products()[name]
    out = function(*args, **options)
    received = torch.randn_like(out)
    found = [one.align_operands(received) for one in list_second_factors(function, args, options)]
    assert len(found) == (len(passed) or 1)
    if not passed:
        return
    wanted = torch.autograd.grad(out, [args[i] for i in passed], received)
    for operands, gradient in zip(found, wanted, strict=True):
        made = torch.tensordot(operands.gradient, operands.weight.flatten(1), 1)
        # Up to the order of dimensions, which no statistic reads.
        assert torch.allclose(made.flatten().sort()[0], gradient.flatten().sort()[0])
        assert operands.fan == operands.weight.shape[0] == operands.gradient.shape[-1]
        assert fan in (None, operands.fan)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("function", [F.conv2d, F.conv_transpose2d])
def test_sums_of_convolutions_have_the_terms_of_a_group_and_a_kernel(function, groups, seed):
    x = torch.randn(2, 6, 9, 9, dtype=torch.float64, requires_grad=True)
    weight = parameter(12, 6 // groups, 3, 3) if function is F.conv2d else parameter(6, 12 // groups, 3, 3)
    out = function(x, weight, groups=groups)
    (factor,) = list_second_factors(function, (x, weight), {"groups": groups})
    operands = factor.align_operands(torch.ones_like(out))
    assert operands.gradient.shape[-1] == operands.weight.shape[0] == 12
    assert operands.fan == 12 // groups * 9
    # A weight of ones counts the terms, in the middle where all are there.
    (counted,) = torch.autograd.grad(function(x, torch.ones_like(weight), groups=groups).sum(), x)
    assert counted.max() == operands.fan


def test_complex_factors_are_the_real_numbers_of_a_sum(seed):
    x, y = (activation(3, 3, dtype=torch.complex128) for _ in range(2))
    for factor in list_second_factors(torch.matmul, (x, y), {}):
        operands = factor.align_operands(torch.ones(3, 3, dtype=torch.complex128))
        assert operands.fan == operands.weight.shape[0] == operands.gradient.shape[-1] == 6
        assert not operands.weight.is_complex()


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (F.scaled_dot_product_attention, (activation(1, 2, 3), activation(1, 2, 3), activation(1, 2, 3))),
        (torch.mv, (activation(3, 3), activation(3))),
        (torch.relu, (activation(3, 3),)),
    ],
)
def test_others_have_none(function, args):
    assert list(list_second_factors(function, args, {})) == []
