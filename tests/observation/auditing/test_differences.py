"""Counts and changes in ulps of two tensors against exact rationals, for every pair of floating-point dtypes."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

import halfulp as hu
from halfulp import formats
from halfulp.observation.auditing._tensors import (
    COMPARED_CHUNK_SIZE,
    TensorDifferences,
    TensorStatistics,
    add_difference_counts,
    count_equal_elements,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_subnormal_numbers_differ_where_the_thread_flushes_them(dtypes):
    states = [
        {"w": (torch.tensor([1.0, -3.0, 0.0, 5.0]) * 2.0**-130 * factor).to(dtype)}
        for factor, dtype in zip((1.0, 2.0), dtypes)
    ]
    wanted = hu.audit(*states).to_dict()
    was_flushing = hu.kernels._threads.flushes_subnormals()
    torch.set_flush_denormal(True)
    try:
        assert hu.audit(*states).to_dict() == wanted
        assert hu.kernels._threads.flushes_subnormals()
    finally:
        torch.set_flush_denormal(was_flushing)
    assert wanted["tensors"][0]["share_unchanged"] == 0.25


def _from_bytes(dtype: str, *codes: int) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(getattr(torch, dtype))


def log2_floor(x: Fraction) -> int:
    power = x.numerator.bit_length() - x.denominator.bit_length()
    return power if Fraction(2) ** power <= x else power - 1


def ulp(value: Fraction, *forms: formats.Format) -> Fraction:
    """Return the spacing at a value of the format that is coarser there."""
    powers = [form.emin if not value else max(log2_floor(abs(value)), form.emin) for form in forms]
    return max(Fraction(2) ** (power - form.mantissa_bits) for power, form in zip(powers, forms, strict=True))


def exact_changes(a: torch.Tensor, b: torch.Tensor) -> list[Fraction]:
    forms = formats.get(a.dtype), formats.get(b.dtype)
    pairs = zip(a.double().tolist(), b.double().tolist(), strict=True)
    return [
        abs(Fraction(y) - Fraction(x)) / ulp(Fraction(x), *forms)
        for x, y in pairs
        if math.isfinite(x) and math.isfinite(y)
    ]


def random_codes(dtype: torch.dtype, count: int) -> torch.Tensor:
    low, high = (
        (0, 256) if dtype.itemsize == 1 else (-(1 << (8 * dtype.itemsize - 1)), (1 << (8 * dtype.itemsize - 1)) - 1)
    )
    return torch.randint(low, high, (count,)).to(WORDS[dtype.itemsize]).view(dtype)


def find_rounding_neighbours(a: torch.Tensor) -> torch.Tensor:
    """Return tensors whose codes differ by a few from given ones."""
    words = a.view(WORDS[a.dtype.itemsize])
    return (words + torch.randint(0, 3, words.shape).to(words.dtype)).view(a.dtype)


def special_values(dtype: torch.dtype) -> torch.Tensor:
    form = formats.get(dtype)
    small = form.smallest_subnormal
    values = [0.0, -0.0, small, -small, form.smallest_normal, 1.0, 1.0 + form.eps, 2.0, -2.0, form.max, -form.max]
    values += [math.inf, -math.inf, math.nan]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def no_differences(a: torch.Tensor, b: torch.Tensor) -> TensorDifferences:
    firsts = [float(x.flatten()[0]) if x.numel() else None for x in (a, b)]
    return TensorDifferences(*(TensorStatistics(x.dtype, constant=first) for x, first in zip((a, b), firsts)))


def measured(a: torch.Tensor, b: torch.Tensor):
    found = no_differences(a, b)
    add_difference_counts(found, a, b)
    return found


def check(a: torch.Tensor, b: torch.Tensor) -> None:
    found, changes = measured(a, b), exact_changes(a, b)
    x, y = a.double(), b.double()
    # A change of more bits than that is rounded before it is counted; whole ulps are not.
    bits = 50 if torch.float64 in (a.dtype, b.dtype) else 23
    assert found.equal_count == int((x == y).sum()) + int((x.isnan() & y.isnan()).sum())
    assert found.finite_count == len(changes)
    for counts, values in ((found.a, x), (found.b, y)):
        wanted = [int(mask.sum()) for mask in (values.isnan(), values.isinf(), values == 0)]
        assert [counts.nan, counts.infinite, counts.zeros] == wanted
    moved = [change for change in changes if change]
    if moved and max(moved) < Fraction(2) ** 1000:
        assert found.largest_ulps == pytest.approx(float(max(moved)), rel=2.0**-bits)
    if changes:
        median = sorted(changes)[(len(changes) - 1) // 2]
        if not median or Fraction(2) ** -180 < median < Fraction(2) ** 300:
            shown = Fraction(found.compute_median())
            assert shown * (1 - Fraction(1, 2**bits)) <= median <= shown * Fraction(33, 32)
            assert shown == median or median >= 64 or median.denominator > 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_and_neighbouring_codes_of_one_dtype_equal_exact_rationals(dtype):
    a = random_codes(dtype, 400)
    check(a, random_codes(dtype, 400))
    check(a, find_rounding_neighbours(a))
    check(a, a)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pair", list(itertools.permutations(DTYPES, 2)), ids=str)
def test_random_codes_of_two_dtypes_equal_exact_rationals(pair):
    a = random_codes(pair[0], 200)
    check(a, random_codes(pair[1], 200))
    check(a, a.double().to(pair[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pair_of_special_values_equals_exact_rationals(dtype):
    values = special_values(dtype)
    a, b = (part.contiguous() for part in torch.cartesian_prod(values.double(), values.double()).unbind(1))
    check(a.to(dtype), b.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_give_what_the_whole_gives(dtype):
    count = 2 * COMPARED_CHUNK_SIZE + 5
    a = torch.randn(count).to(dtype)
    b = torch.where(torch.rand(a.shape) < 0.5, a, (a.double() * 1.01).to(dtype))
    b[7], b[count - 1] = math.nan, math.inf
    whole, parts = measured(a, b), no_differences(a, b)
    for x, y in zip(a.split(70_000), b.split(70_000), strict=True):
        add_difference_counts(parts, x, y)
    assert (whole.a, whole.b, whole.equal_count, whole.finite_count) == (
        parts.a,
        parts.b,
        parts.equal_count,
        parts.finite_count,
    )
    assert torch.equal(whole.count_by_bucket, parts.count_by_bucket)
    assert whole.largest_ulps == parts.largest_ulps


def test_views_empty_and_constant_tensors():
    a = torch.randn(6, 5)
    assert measured(a.t(), (a + 1).t()).finite_count == 30
    assert math.isnan(measured(a[:0], a[:0]).compute_median())
    constant = measured(torch.full((9,), 2.0), torch.full((9,), 3.0))
    assert (constant.a.constant, constant.b.constant) == (2.0, 3.0)
    assert measured(a.flatten(), a.flatten()).a.constant is None
    assert measured(torch.tensor(1.0).reshape(1), torch.tensor(1.5).reshape(1)).largest_ulps == 2.0**22


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (_from_bytes("float8_e4m3fn", 56, 57, 127), _from_bytes("float8_e4m3fn", 56, 56, 127), 2),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), 1),
        (_from_bytes("float8_e4m3fn", 0, 128, 56), torch.tensor([0.0, 0.0, 1.0], dtype=torch.bfloat16), 3),
        (torch.tensor([2**24, 7], dtype=torch.uint32), torch.tensor([2**24 + 1, 7], dtype=torch.uint32), 1),
        (torch.tensor([1, 2], dtype=torch.uint16), torch.tensor([1.0, 2.5]), 1),
        (torch.tensor([1, 2], dtype=torch.uint64), torch.tensor([1, 3]), 1),
        (torch.tensor([1, 2], dtype=torch.complex64), torch.tensor([1.0, 3.0]), 1),
        (torch.tensor([1, 2]), torch.tensor([[1, 2]]), 0),
    ],
    ids=["codes", "NaN", "floats", "beyond float32", "integer and float", "integers", "complex and float", "shapes"],
)
def test_equal_elements_are_counted_by_value(first: torch.Tensor, second: torch.Tensor, equal: int) -> None:
    assert count_equal_elements(first, second) == equal
