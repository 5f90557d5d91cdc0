"""Sums, products and running sums along dimensions against exact rationals; the same bits by both engines."""

import math
from fractions import Fraction

import pytest
import torch

from halfulp.arithmetic import average, product, running_sum, split, total
from halfulp.kernels import engine, same_bits

from ..expansion_values import PRECISION, exact

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "dim"), CASES, ids=str)
@pytest.mark.parametrize(("dtype", "n"), FORMS)
def test_both_engines_and_torchs_shape(shape, dim, dtype, n, seed):
    # 1.887 is 1 / exp(mean of log |N(0, 1)|): products stay far from underflow, where the two engines differ.
    x = split(1.887 * torch.randn(shape, dtype=torch.float64), dtype, n)
    for function, plain in ((total, torch.sum), (product, torch.prod)):
        for keepdim in (False, True):
            got = function(x, dim, n, keepdim)
            with engine("reference"):
                wanted = function(x, dim, n, keepdim)
            assert all(same_bits(a, b) for a, b in zip(got, wanted))
            if plain is torch.sum:
                shape_of = plain(x[0], list(range(len(shape))) if dim is None else dim, keepdim=keepdim).shape
                assert got[0].shape == shape_of


WAYS = {
    "segments of a line": ((140_001,), 0),
    "segments of lines": ((2, 131_100), 1),
    "segments of narrow matrices": ((2, 9_000, 17), 1),
    "segments of wide matrices": ((2, 1_500, 100), 1),
    "lines that end within a vector": ((40, 1_003), 1),
    "narrow matrices": ((3, 150, 31), 1),
    "columns that overlap": ((3, 150, 33), 1),
    "many small matrices": ((300, 9, 3), 1),
    "dimensions apart": ((5, 60, 7, 8), (0, 2)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "n"), [(torch.float32, 2), (torch.float64, 2), (torch.bfloat16, 1)], ids=str)
def test_every_way_through_memory_gives_the_references_bits(way, dtype, n, seed):
    shape, dim = WAYS[way]
    x = parts_of(shape, dtype, n)
    for function in (total, average):
        got = function(x, dim, n)
        with engine("reference"):
            wanted = function(x, dim, n)
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
    whole = sum(part.double() for part in x)
    loss = 2.0 ** -(min(n * PRECISION[dtype], 50) - 1)
    error = (sum(part.double() for part in total(x, dim, n)) - whole.sum(dim)).abs()
    assert bool((error <= 2.0**-49 * whole.abs().sum(dim) + loss * whole.sum(dim).abs() + 2.0**-40).all())


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


@pytest.mark.parametrize(("dtype", "n"), FORMS)
def test_means_within_the_bound(dtype, n, seed):
    x = parts_of((700,), dtype, n)
    values = exact(x)
    wanted = sum(values) / 700
    got = exact(tuple(part.reshape(1) for part in average(x, None, n)))[0]
    p = PRECISION[dtype]
    inner = Fraction(2**8 + 140 + 15, 2**106) if dtype == torch.float64 else Fraction(1, 2**49)
    outer = Fraction(2) ** -(n * p - 1) * abs(wanted) + Fraction(2) ** -24 * (dtype == torch.float16)
    assert abs(got - wanted) <= inner * sum(map(abs, values)) / 700 + outer


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


def test_an_infinity_stays_in_its_column_and_its_sum(seed):
    x = torch.randn(3, 400, 40, dtype=torch.float64)
    x[1, 77, 5], x[2, 3, 39] = math.inf, math.nan
    x[0, 1, 1], x[0, 300, 1] = math.inf, -math.inf
    for dtype in (torch.float32, torch.float64):
        parts = split(x, dtype, 2)
        for dim in (0, 1, 2, (1, 2), None):
            for function, plain in ((total, torch.sum), (average, torch.mean), (product, None)):
                if plain is None and not isinstance(dim, int):
                    continue
                wanted = (plain or torch.prod)(parts[0].double(), dim)
                got = function(parts, dim, 2)
                odd = ~wanted.isfinite()
                assert same_bits(got[0][odd], wanted.to(dtype)[odd])
                assert bool((got[1][odd] == 0).all())
                assert bool(got[0][~odd & (wanted.abs() < 1e30)].isfinite().all())


@pytest.mark.parametrize("function", [total, average, product])
@pytest.mark.parametrize(("dtype", "n"), FORMS)
def test_a_result_is_the_same_where_nobody_may_ask_whether_it_is_finite(function, dtype, n, monkeypatch, seed):
    """As on a device, which the question would wait for."""
    x = 1.887 * torch.randn(4, 90, 5, dtype=torch.float64)
    x[1, :, 2] *= 2.0**9  # a product beyond the range of the components
    x[2, 7, 1], x[2, 8, 2], x[2, 9, 2], x[3, 1, 0] = math.inf, math.inf, -math.inf, math.nan
    for value in (x[:1], x):
        parts = split(value, dtype, n)
        wanted = function(parts, 1, n)
        with monkeypatch.context() as patch:
            patch.setattr("halfulp.arithmetic._reductions._is_finite", lambda x: False)
            assert all(map(same_bits, function(parts, 1, n), wanted))
        first = function(tuple(part[:1] for part in parts), 1, n)
        assert all(same_bits(one, part[:1]) for one, part in zip(first, wanted)), "what others are does not show"


def test_sums_beyond_the_components_range_are_infinite():
    x = torch.full((3, 40), 6e4, dtype=torch.float16)
    assert total((x, torch.zeros_like(x)), 1, 2)[0].tolist() == [math.inf] * 3
    assert average((x, torch.zeros_like(x)), 1, 2)[0].tolist() == x[:, 0].tolist()


def test_no_elements_sum_to_nothing():
    x = torch.ones(3, 0, 2), torch.zeros(3, 0, 2)
    assert total(x, 1, 2)[0].tolist() == [[0.0] * 2] * 3
    assert product(x, 1, 2)[0].tolist() == [[1.0] * 2] * 3
    assert bool(average(x, 1, 2)[0].isnan().all())


def test_threads_and_strides_do_not_change_bits(seed):
    x = parts_of((64, 3000), torch.float64, 2)
    turned = tuple(part.t().contiguous().t() for part in x)
    wanted = [total(x, dim, 2) for dim in (0, 1, None)]
    torch.set_num_threads(2)
    try:
        for dim, sums in zip((0, 1, None), wanted):
            assert all(same_bits(a, b) for a, b in zip(total(turned, dim, 2), sums))
            assert all(same_bits(a, b) for a, b in zip(total(x, dim, 2), sums))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("shape", [(100,), (3, 17), (2, 0), ()], ids=str)
def test_running_sums(shape, seed):
    x = parts_of(shape, torch.float64, 2)
    got = running_sum(x, -1, 2) if shape else running_sum(x, 0, 2)
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
