"""Sorting, searching, counting, rounding."""

import pytest
import torch

from halfulp.scaled import ScaledTensor
from halfulp.testing import check_rule


def table():
    return (torch.randn(6, 8),)


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.sort(x, dim=0, descending=True),
        lambda x: torch.sort(x, stable=True),
        lambda x: torch.topk(x, 3),
        torch.argsort,
        torch.msort,
    ],
)
def test_sorting(seed, operator):
    check_rule(operator, table, seed=seed, trials=3)


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        lambda x: torch.unique(x, dim=0),
        lambda x: torch.unique_consecutive(x, return_counts=True),
        lambda x: torch.unique_consecutive(x, dim=1),
        lambda x: torch.histc(x, 5, -2, 2),
        lambda x: torch.histogram(x, 5, range=(-2.0, 2.0)),
        lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    ],
)
def test_counting(seed, operator):
    check_rule(operator, lambda: (torch.randint(-3, 4, (6, 8)) * 0.5,), seed=seed, trials=3, gradients=False)


def test_searching(seed):
    check_rule(torch.searchsorted, lambda: (torch.randn(20).sort()[0], torch.randn(5)), seed=seed, trials=3)
    check_rule(torch.bucketize, lambda: (torch.randn(5), torch.randn(20).sort()[0]), seed=seed, trials=3)
    index = torch.randint(0, 6, (10,))
    check_rule(lambda w: torch.bincount(index, w), lambda: (torch.rand(10),), seed=seed, trials=3, gradients=False)


@pytest.mark.parametrize("name", ["floor", "ceil", "round", "trunc", "frac", "fix"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_rounding(seed, name, size):
    check_rule(getattr(torch, name), lambda: (torch.randn(20) * size,), seed=seed, trials=3)
    x = ScaledTensor.encode(torch.randn(20) * size)
    torch.testing.assert_close(getattr(x, name)().decode(), getattr(x.decode(), name)(), rtol=1e-3, atol=0)


def test_rounding_to_decimals(seed):
    check_rule(lambda x: torch.round(x, decimals=2), table, seed=seed, trials=3)


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.bfloat16])
def test_narrow_payloads(storage):
    x = ScaledTensor.encode(torch.tensor([3.0, 1.0, 2.0]), storage)
    values, indices = x.sort()
    assert values.payload.dtype == storage
    assert indices.tolist() == [1, 2, 0]
    assert values.decode().tolist() == sorted(x.tolist())
