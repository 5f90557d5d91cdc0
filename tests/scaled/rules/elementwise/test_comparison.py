"""Comparisons: by value, whatever the representation, with plain truth values."""

import operator

import pytest
import torch

from halfulp.scaled import ScaledTensor
from halfulp.testing import check_rule

COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
UNARY = ("isnan", "isinf", "isposinf", "isneginf", "isfinite", "isreal", "signbit", "logical_not", "nonzero")


def some():
    """Values of which many are equal, and every special one."""
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    return torch.cat([torch.randint(-2, 3, (30,)) * 0.75, special])


@pytest.mark.parametrize("name", COMPARE)
def test_tensors_and_numbers(seed, name):
    check_rule(getattr(torch, name), lambda: (some(), some()), seed=seed, trials=3)
    check_rule(lambda x: getattr(torch, name)(x, 0.75), lambda: (some(),), seed=seed, trials=3)
    check_rule(lambda x: getattr(operator, name)(0.75, x), lambda: (some(),), seed=seed, trials=3)


@pytest.mark.parametrize("name", UNARY)
def test_tests_of_values(seed, name):
    check_rule(getattr(torch, name), lambda: (some(),), seed=seed, trials=3)


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor", "isclose", "isin"])
def test_pairs(seed, name):
    check_rule(getattr(torch, name), lambda: (some(), some()), seed=seed, trials=3)


def test_plain_tensors_and_other_storages():
    x = ScaledTensor.encode(torch.tensor([1.0, 2.0]), torch.float8_e4m3fn)
    assert (x == torch.tensor([1.0, 3.0])).tolist() == [True, False]
    assert (torch.tensor([1.0, 3.0]) > x).tolist() == [False, True]
    assert (x < torch.tensor([1, 3])).tolist() == [False, True]
    assert type(x == 1) is torch.Tensor


def test_whole_tensors():
    x = ScaledTensor(torch.tensor([1.0, 2.0]), 1.0)
    y = ScaledTensor(torch.tensor([4.0, 8.0]), 0.25)
    assert torch.equal(x, y)
    assert torch.allclose(x, y + 1e-9)
    assert not torch.equal(x, y * 2)
    assert not torch.allclose(x, y * 2)
    assert torch.equal(x, torch.tensor([1.0, 2.0]))
