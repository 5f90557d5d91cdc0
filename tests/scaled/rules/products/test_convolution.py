"""Convolutions of scaled tensors, with their gradients: bit for bit the plain ones."""

import pytest
import torch
from torch.nn import functional

from halfulp.scaled import ScaledTensor
from halfulp.subclass import strict
from halfulp.testing import check_rule

CONVOLUTIONS = {
    "1d": (lambda x, w: functional.conv1d(x, w, groups=2, dilation=2), (2, 6, 19), (8, 3, 3)),
    "2d": (lambda x, w, b: functional.conv2d(x, w, b, padding=1, stride=2), (2, 6, 9, 9), (8, 6, 3, 3), (8,)),
    "2d same": (lambda x, w, b: functional.conv2d(x, w, b, padding="same"), (2, 3, 6, 6), (4, 3, 3, 3), (4,)),
    "2d without a batch": (functional.conv2d, (6, 9, 9), (8, 6, 3, 3), (8,)),
    "2d of a view": (lambda x, w: functional.conv2d(x.transpose(2, 3)[:, 1:], w), (2, 5, 7, 6), (3, 4, 2, 2)),
    "depthwise": (lambda x, w: functional.conv2d(x, w, groups=6), (2, 6, 7, 7), (6, 1, 3, 3)),
    "3d": (functional.conv3d, (1, 2, 5, 5, 5), (4, 2, 3, 3, 3), (4,)),
    "transposed 1d": (functional.conv_transpose1d, (2, 3, 7), (3, 4, 3), (4,)),
    "transposed 2d": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, stride=2, groups=2, output_padding=1),
        *((2, 6, 5, 5), (6, 4, 3, 3), (8,)),
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_the_plain_one_whatever_the_scales(name, seed):
    operator, *shapes = CONVOLUTIONS[name]
    with strict():
        check_rule(operator, lambda: [torch.randn(shape) for shape in shapes], trials=2, seed=seed)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_float16_payloads_is_near(name, differences, seed):
    operator, *shapes = CONVOLUTIONS[name]
    assert max(differences(operator, shapes)) < 1e-2


def test_a_convolution_over_time(seed):
    shapes = [(7, 2, 3), (3, 3, 16), (16,)]
    with strict():  # torch sums the plain one in another order
        check_rule(
            lambda *t: torch.conv_tbc(*t, 1), lambda: [torch.randn(s) for s in shapes], trials=2, seed=seed, exact=1e-6
        )


def test_only_the_gradients_asked_for(seed):
    x = ScaledTensor.encode(torch.randn(2, 3, 5, 5))
    weight = ScaledTensor.encode(torch.randn(4, 3, 3, 3)).requires_grad_()
    functional.conv2d(x, weight).sum().backward()
    assert weight.grad.isfinite().all()
    assert x.grad is None


def test_payloads_stay_near_1(seed):
    x = ScaledTensor.encode(torch.randn(8, 32, 16, 16)).requires_grad_()
    weight = ScaledTensor.encode(torch.randn(32, 32, 3, 3) * 0.02).requires_grad_()
    y = functional.conv2d(x, weight)
    y.backward(ScaledTensor.encode(torch.randn(y.shape) * 1e-4))
    for tensor in (y, x.grad, weight.grad):
        assert 0.25 < tensor.payload.detach().float().square().mean().sqrt() < 4


def test_zeros_and_infinities(seed):
    x = ScaledTensor.encode(torch.randn(1, 2, 5, 5))
    weight = ScaledTensor.encode(torch.randn(3, 2, 3, 3))
    assert not functional.conv2d(torch.zeros_like(x), weight).any()
    bias = ScaledTensor.encode(torch.tensor([1.0, float("inf"), 0.0]))
    y = functional.conv2d(torch.zeros_like(x), weight, bias)
    assert y.mean((0, 2, 3)).tolist() == [1.0, float("inf"), 0.0]


def test_one_graph_gives_the_same_bits(seed):
    tensors = [ScaledTensor.encode(torch.randn(s), torch.float32) for s in ((2, 4, 6, 6), (3, 4, 3, 3), (3,))]
    twins = [x.clone().requires_grad_() for x in tensors]
    tensors = [x.requires_grad_() for x in tensors]
    functional.conv2d(*tensors).sum().backward()
    torch.compile(functional.conv2d, fullgraph=True, backend="aot_eager")(*twins).sum().backward()
    assert all(torch.equal(x.grad.decode(), y.grad.decode()) for x, y in zip(tensors, twins))
