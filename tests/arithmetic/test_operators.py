"""Sums, products, quotients and roots of expansions against exact rationals; both engines, the same bits."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from halfulp.arithmetic import compare, merge, pointwise, renormalize, split
from halfulp.formats import get, round_exact
from halfulp.kernels import engine, same_bits

from .expansion_values import (
    PRECISION,
    SMALLEST,
    assert_canonical,
    canonical,
    exact,
    followed,
    nearest,
    opponent,
    stacked,
)

COUNT = 400
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else None,
}
TWO = {"add": 3, "sub": 3, "mul": 5, "div": 15}


def operands(n, dtype, count=COUNT):
    reach = {torch.float16: 5}.get(dtype, 60)
    xs = [canonical(n, dtype, -reach, reach) for _ in range(count)]
    return stacked(xs, dtype), stacked([opponent(x, dtype, reach) for x in xs], dtype)


def bound(n: int, dtype: torch.dtype, two: float) -> float:
    p = PRECISION[dtype]
    return two * 2.0 ** (-2 * p) if n == 2 else 2.0 ** -(n * p - 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", EXACT)
def test_every_finite_canonical_operand_within_the_bound(name, n, dtype, seed):
    x, y = operands(n, dtype)
    got = pointwise(name, x, y, components=n, dtype=dtype)
    assert_canonical(got)
    tiny = 4 * Fraction(2) ** SMALLEST[dtype]
    largest = Fraction(float(torch.finfo(dtype).max))
    for a, b, value, head in zip(exact(x), exact(y), exact_or_none(got), got[0].tolist()):
        wanted = EXACT[name](a, b)
        if wanted is None or abs(wanted) > largest:
            assert not math.isfinite(head)
            continue
        assert abs(value - wanted) <= Fraction(bound(n, dtype, TWO[name])) * abs(wanted) + tiny, (a, b)


def exact_or_none(parts):
    clean = tuple(torch.where(torch.isfinite(parts[0]), part, 0.0) for part in parts)
    return exact(clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["add", "mul"])
def test_a_plain_operand_costs_two_units(name, dtype, seed):
    x, y = operands(2, dtype)
    got = pointwise(name, x, y[:1], components=2, dtype=dtype)
    tiny = 4 * Fraction(2) ** SMALLEST[dtype]
    for a, b, value, head in zip(exact(x), exact(y[:1]), exact_or_none(got), got[0].tolist()):
        wanted = EXACT[name](a, b)
        if math.isfinite(head):
            assert abs(value - wanted) <= Fraction(bound(2, dtype, 2)) * abs(wanted) + tiny


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_roots(n, dtype, seed):
    x = operands(n, dtype)[0]
    x = tuple(torch.where(x[0] < 0, -part, part) for part in x)
    got = pointwise("sqrt", x, components=n, dtype=dtype)
    limit = Fraction(bound(n, dtype, 4)) if n > 1 else Fraction(2) ** -PRECISION[dtype]
    tiny = 4 * Fraction(2) ** SMALLEST[dtype]
    for a, value in zip(exact(x), exact(got)):
        # |r - sqrt(a)| = |r^2 - a| / (r + sqrt(a)), and r is close to the root
        assert abs(value * value - a) <= 2 * limit * a * Fraction(1001, 1000) + 2 * tiny * value + tiny**2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_operands_at_the_ends_of_the_range(n, dtype, seed):
    reach = 1020 if dtype == torch.float64 else 124
    xs = [canonical(n, dtype, *random_range) for random_range in [(-reach - 30, -reach), (reach - 3, reach)] * 60]
    x = stacked(xs, dtype)
    y = tuple(part.flip(0) for part in x)
    tiny, largest = 4 * Fraction(2) ** SMALLEST[dtype], Fraction(float(torch.finfo(dtype).max))
    for name in ("add", "mul", "div"):
        got = pointwise(name, x, y, components=n, dtype=dtype)
        for a, b, value, head in zip(exact(x), exact(y), exact_or_none(got), got[0].tolist()):
            wanted = EXACT[name](a, b)
            if wanted is None or abs(wanted) > largest * Fraction(999, 1000):
                continue
            assert math.isfinite(head)
            limit = Fraction(bound(n, dtype, 15)) if n > 1 else Fraction(2) ** -PRECISION[dtype]
            assert abs(value - wanted) <= limit * abs(wanted) + tiny


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("counts", [(1, 1), (1, 2), (2, 2)], ids=str)
def test_a_product_added(dtype, n, counts, seed):
    """The error of a + b c is relative to |a| + |b c|."""
    a, b = operands(n, dtype, 200)
    b, c = b[: counts[0]], tuple(part.flip(0) for part in a)[: counts[1]]
    got = pointwise("addcmul", a, b, c, components=n, dtype=dtype)
    limit = Fraction(6 * 2.0 ** (-2 * PRECISION[dtype]) if n == 2 else 2.0 ** -(n * PRECISION[dtype] - 4))
    tiny = 8 * Fraction(2) ** SMALLEST[dtype]
    rows = zip(exact(a), exact(b), exact(c), exact_or_none(got), got[0].tolist())
    for x, y, z, value, head in rows:
        if math.isfinite(head):
            assert abs(value - (x + y * z)) <= limit * (abs(x) + abs(y * z)) + tiny


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -2.5, 2.0**-24]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_special_values_follow_the_plain_operation(name, n, dtype):
    grid = torch.tensor(SPECIAL, dtype=dtype)
    a, b = (t.flatten() for t in torch.meshgrid(grid, grid, indexing="ij"))
    zeros = [torch.zeros_like(a)] * (n - 1)
    got = pointwise(name, (a, *zeros), (b, *zeros), components=n, dtype=dtype)
    wanted = getattr(torch, name)(a, b)
    close = torch.isfinite(wanted) & (wanted != 0)
    assert same_bits(torch.where(close, 0.0, got[0]), torch.where(close, 0.0, wanted))
    assert all(bool((part[~close] == 0).all()) for part in got[1:])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "div", "addcmul", "sqrt", "reciprocal", "renormalize", "compare"]
)
def test_both_engines_give_the_same_bits(name, n, dtype, seed):
    x, y = operands(n, dtype, 200)
    for k, value in enumerate(SPECIAL):
        x[0][k], y[0][-k - 1] = value, value
    taken = {"sqrt": (x,), "reciprocal": (x,), "renormalize": (x,), "addcmul": (x, y, x)}.get(name, (x, y))
    got = pointwise(name, *taken, components=n, dtype=dtype)
    with engine("reference"):
        wanted = pointwise(name, *taken, components=n, dtype=dtype)
    assert all(same_bits(a, b) for a, b in zip(got, wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splitting_keeps_every_digit_that_fits_and_merging_rounds_once(dtype, seed):
    x = torch.randn(500, dtype=torch.float64)
    parts = split(x, dtype, 4)
    assert_canonical(parts)
    limit = max(2.0 ** -(4 * PRECISION[dtype]), 2.0**-60)
    for value, wanted in zip(exact(parts), x.tolist()):
        assert abs(value - Fraction(wanted)) <= Fraction(limit) * abs(Fraction(wanted)) + Fraction(2) ** SMALLEST[dtype]
    rounded = [round_exact(value, get(dtype)) for value in exact(parts)]
    assert merge(parts, dtype).tolist() == rounded


def test_merging_at_a_tie_looks_at_the_components_behind():
    tie = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([2.0**-24, 2.0**-24, -(2.0**-25)])
    low = torch.tensor([2.0**-80, -(2.0**-80), 0.0], dtype=torch.float64)
    merged = merge((tie[0], tie[1].double(), low), torch.float32)
    assert merged.tolist() == [1 + 2.0**-23, 1.0, 1.0]


def test_renormalizing_takes_any_order_and_overlap(seed):
    parts = tuple(torch.randn(300, dtype=torch.float64) * 2.0**k for k in (-40, 3, -90, 0))
    got = renormalize(parts, 4)
    assert_canonical(got)
    for value, wanted in zip(exact(got), exact(parts)):
        assert abs(value - wanted) <= abs(wanted) * Fraction(2) ** -200


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_renormalizing_terms_that_cancel_or_are_not_finite(dtype):
    one, inf, nan, zero = (torch.tensor(v, dtype=dtype) for v in (1.0, math.inf, math.nan, 0.0))
    for parts, wanted in (((one, -one), 0.0), ((one, inf), math.inf), ((inf, -inf), math.nan), ((zero, one), 1.0)):
        got = renormalize(parts, 2)
        assert same_bits(got[0], torch.tensor(wanted, dtype=dtype))
        assert float(got[1]) == 0
    assert [float(p) for p in pointwise("reciprocal", (-inf,), components=2, dtype=dtype)] == [0.0, 0.0]
    assert math.isnan(float(pointwise("reciprocal", (nan,), components=2, dtype=dtype)[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_comparison_is_by_value(dtype, seed):
    x, y = operands(3, dtype)
    signs = [(a > b) - (a < b) for a, b in zip(exact(x), exact(y))]
    assert compare(x, y).tolist() == signs
    assert compare(x, x).abs().sum() == 0
    inf, nan = (torch.tensor([v], dtype=dtype) for v in (math.inf, math.nan))
    zero, minus = torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype)
    pairs = ((inf, zero), (zero, inf), (inf, inf), (nan, zero), (zero, minus))
    assert [int(compare((a,), (b,))) for a, b in pairs] == [1, -1, 0, 2, 0]


@pytest.mark.parametrize("name", ["reference", "auto"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_comparison_where_the_difference_overflows(dtype, n, name, seed):
    top = math.frexp(torch.finfo(dtype).max)[1] - 1
    heads = [torch.finfo(dtype).max, *(math.ldexp(m, top - k) for m in (1.0, 1.25) for k in (0, 1, 20))]
    rows = [followed([sign * nearest(head, dtype)], n, dtype) for head in heads for sign in (1, -1)]
    rows = [row for row in rows if abs(sum(map(Fraction, row))) <= Fraction(torch.finfo(dtype).max)]
    x, y = (stacked(list(side), dtype) for side in zip(*itertools.product(rows, rows)))
    wanted = [(a > b) - (a < b) for a, b in zip(exact(x), exact(y))]
    with engine(name):
        assert compare(x, y).tolist() == wanted
