"""Sums, products and running sums along dimensions against exact rationals; the same bits by both engines."""

import math
from fractions import Fraction

import pytest
import torch

from halfulp.arithmetic import product, running, split, total
from halfulp.kernels import engine, same_bits

from .expansions import PRECISION, exact

CASES = [
    ((1000,), None),
    ((37, 5), 0),
    ((37, 5), 1),
    ((40, 70), 0),
    ((7, 130, 3), 1),
    ((3, 70, 2), (0, 2)),
    ((4097,), 0),
    ((), None),
    ((0, 4), 0),
    ((4, 0), 0),
    ((1, 1), -1),
]


FORMS = [(torch.float64, 2), (torch.float32, 2), (torch.float16, 3), (torch.float64, 4)]


def parts_of(shape, dtype, n):
    return split(torch.randn(shape, dtype=torch.float64), dtype, n)


@pytest.mark.parametrize(("shape", "dim"), CASES, ids=str)
@pytest.mark.parametrize(("dtype", "n"), FORMS)
def test_both_engines_and_torchs_shape(shape, dim, dtype, n, seed):
    x = parts_of(shape, dtype, n)
    for function, plain in ((total, torch.sum), (product, torch.prod)):
        for keepdim in (False, True):
            got = function(x, dim, n, keepdim)
            with engine("reference"):
                wanted = function(x, dim, n, keepdim)
            assert all(same_bits(a, b) for a, b in zip(got, wanted))
            if plain is torch.sum:
                shape_of = plain(x[0], list(range(len(shape))) if dim is None else dim, keepdim=keepdim).shape
                assert got[0].shape == shape_of


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_sums_within_the_bound(dtype, n, seed):
    x = parts_of((3000,), dtype, n)
    values = exact(x)
    got = exact(tuple(part.reshape(1) for part in total(x, None, n)))[0]
    wanted = sum(values)
    p = PRECISION[dtype]
    inner = Fraction(2**8 + 600, 2**106) if dtype == torch.float64 or n * p > 48 else Fraction(1, 2**49)
    outer = Fraction(2) ** -(n * p - 1) * abs(wanted) + Fraction(2) ** -24 * (dtype == torch.float16)
    assert abs(got - wanted) <= inner * sum(map(abs, values)) + outer


def test_products_within_the_bound(seed):
    x = split(torch.rand(500, dtype=torch.float64) + 0.5, torch.float64, 2)
    wanted = math.prod(exact(x))
    got = exact(tuple(part.reshape(1) for part in product(x, None, 2)))[0]
    assert abs(got - wanted) <= 500 * 6 * Fraction(2) ** -106 * wanted


def test_infinities_and_nan_are_the_plain_sums(seed):
    for values in ([math.inf, 1.0], [math.inf, -math.inf], [math.nan, 1.0], [1e308, 1e308], [-math.inf, 2.0]):
        x = torch.tensor(values, dtype=torch.float64)
        got = total((x, torch.zeros_like(x)), None, 2)
        assert same_bits(got[0], x.sum())
        assert float(got[1]) == 0


def test_threads_and_strides_do_not_change_bits(seed):
    x = parts_of((64, 3000), torch.float64, 2)
    wanted = total(x, 1, 2)
    turned = tuple(part.t().contiguous().t() for part in x)
    torch.set_num_threads(2)
    try:
        assert all(same_bits(a, b) for a, b in zip(total(turned, 1, 2), wanted))
        assert all(same_bits(a, b) for a, b in zip(total(x, 1, 2), wanted))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("shape", [(100,), (3, 17), (2, 0), ()], ids=str)
def test_running_sums(shape, seed):
    x = parts_of(shape, torch.float64, 2)
    got = running(x, -1, 2) if shape else running(x, 0, 2)
    plain = x[0].cumsum(-1) if shape else x[0]
    assert got[0].shape == plain.shape
    if len(shape) == 1:
        so_far = Fraction(0)
        for value, sofar in zip(exact(x), exact(got)):
            so_far += value
            assert abs(sofar - so_far) <= Fraction(2) ** -98
    else:
        assert torch.allclose(got[0], plain)


def test_a_dimension_out_of_range():
    with pytest.raises(IndexError, match="out of range"):
        total((torch.ones(2, 2),), 2, 1)
