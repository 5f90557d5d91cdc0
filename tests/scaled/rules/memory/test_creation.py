"""Tensors made like a scaled one: storage and dtype stay, numbers take their own power of two."""

import pytest
import torch

from halfulp.scaled import ScaledTensor


@pytest.fixture
def x():
    return ScaledTensor.encode(torch.randn(2, 3), torch.float16)


@pytest.mark.parametrize("value", [0.0, 1.0, -3e-12, 7e20, float("inf"), -float("inf"), float("nan")])
def test_numbers(x, value):
    for y in (torch.full_like(x, value), x.new_full((2, 3), value)):
        assert isinstance(y, ScaledTensor)
        assert y.payload.dtype == torch.float16
        assert torch.allclose(y.decode(), torch.full((2, 3), value), rtol=1e-3, atol=0, equal_nan=True)


def test_zeros_take_any_scale_and_ones_take_one(x):
    for y in (
        torch.zeros_like(x),
        x.new_zeros(2, 3),
        torch.empty_like(x),
        x.new_empty(2),
        x.new_empty_strided((2,), (1,)),
    ):
        assert y.scale.item() == 2.0**-126
        assert not y.any()
    for y in (torch.ones_like(x), x.new_ones(2, 3)):
        assert y.scale.item() == 1.0
        assert y.decode().eq(1).all()


def test_other_dtypes_are_plain(x):
    assert type(torch.zeros_like(x, dtype=torch.long)) is torch.Tensor
    assert type(x.new_ones(2, dtype=torch.bool)) is torch.Tensor
    assert torch.ones_like(x, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_strides_are_those_of_plain_tensors(x):
    assert torch.zeros_like(x.t()).stride() == torch.zeros_like(torch.zeros(2, 3).t()).stride()
    assert x.new_empty_strided((2, 3), (1, 2)).stride() == (1, 2)


def test_each_has_a_scale_of_its_own(x):
    zeros = torch.zeros_like(x)
    zeros.copy_(x)
    assert torch.zeros_like(x).scale.item() == 2.0**-126
