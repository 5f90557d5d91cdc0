"""Activations and their gradients: the scale of what is gated stays, bits do not depend on it."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.scaled import ScaledTensor
from halfulp.subclass import strict
from halfulp.testing import check_rule


def one():
    return (torch.randn(3, 4) * 3,)


CASES = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "softplus": F.softplus,
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "threshold": lambda x: F.threshold(x, 0.3, -2.0),
    "glu": lambda x: F.glu(x, 1),
    "logsigmoid": F.logsigmoid,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu eval": lambda x: F.rrelu(x),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_plain_tensors_under_all_scales(case, seed):
    with strict():
        check_rule(CASES[case], one, seed=seed, trials=2)


def test_prelu_is_close(seed):
    with strict():
        check_rule(lambda x, w: F.prelu(x, w[0]), lambda: (*one(), *one()), seed=seed, exact=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case != "rrelu"])
def test_narrow_payloads(case, differences, seed):
    # A payload that is rounded may step over a threshold; both sides start from the rounded one.
    assert max(differences(CASES[case], [(8, 8)])) < 2e-2


@pytest.mark.parametrize("case", ["gelu", "silu", "mish", "hardswish", "elu", "leaky_relu", "softshrink", "glu"])
def test_the_scale_stays(case):
    x = ScaledTensor.encode(torch.tensor([1e-4, -2e-4]), torch.float16)
    assert torch.equal(CASES[case](x.view(1, 2)).scale, x.scale)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("softsign", "tanhshrink")])
def test_the_gradients_scale_stays(case, seed):
    x = ScaledTensor.encode(torch.randn(3, 4), torch.float16).requires_grad_()
    y = CASES[case](x)
    gradient = ScaledTensor(torch.randn(y.shape).half(), 2.0**-21)
    (found,) = torch.autograd.grad(y, x, gradient)
    assert torch.equal(found.scale, gradient.scale)


@pytest.mark.parametrize("case", ["softplus", "logsigmoid", "hardsigmoid"])
def test_what_does_not_vanish_at_zero_fits(case):
    for x in (torch.tensor([1e-9, -2e-9]), torch.zeros(2)):
        y = CASES[case](ScaledTensor.encode(x, torch.float16))
        assert torch.allclose(y.decode(), CASES[case](x), rtol=1e-3)


def test_large_numbers_and_zeros():
    large = torch.tensor([1e20, -1e20])
    zeros = torch.zeros_like(ScaledTensor.encode(torch.ones(2), torch.float16))
    for case, function in CASES.items():
        if case != "glu" and "rrelu" not in case:
            y = function(ScaledTensor.encode(large, torch.float16))
            assert torch.allclose(y.decode(), function(large), rtol=1e-3, atol=1e-6 * y.abs().max().item() + 2e-3), case
            assert torch.allclose(function(zeros).decode(), function(torch.zeros(2)), rtol=1e-3), case
