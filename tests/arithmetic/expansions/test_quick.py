"""Sums and products of 16-bit components: short kernels have the bits of the networks, and those of exact rationals."""

import itertools
from fractions import Fraction

import pytest
import torch

from halfulp import formats
from halfulp.arithmetic import pointwise
from halfulp.formats import round_exact
from halfulp.kernels import engine, same_bits

from ..expansion_values import canonical, exact, opponent, stacked

OPERATIONS = {"add": Fraction.__add__, "sub": Fraction.__sub__, "mul": Fraction.__mul__}
B = torch.bfloat16
COUNT = 1 << 13


def sparse(low, high):
    """Numbers with few bits, or all, whose sums and products tie."""
    bits = torch.randint(128, (3, COUNT))
    bits = torch.where(torch.rand(COUNT) < 0.1, 127, bits[0] & bits[1] & bits[2])
    powers = torch.exp2(torch.randint(low, high + 1, (COUNT,), dtype=torch.float64))
    return (torch.where(torch.rand(COUNT) < 0.5, -1, 1) * (1 + bits / 128) * powers).to(B)


def wide(gap):
    """Pairs whose second component lies up to `gap` bits below the first, or is 0."""
    first = sparse(-3, 3)
    second = (sparse(-gap, -8).double() * first.abs()).to(B)
    return first, torch.where(torch.rand(COUNT) < 0.2, 0.0, second).to(B)


KINDS = {
    "float64": lambda: (torch.randn(COUNT, dtype=torch.float64),),
    "float32": lambda: (torch.randn(COUNT),),
    "any bits": lambda: tuple(torch.randint(-32768, 32768, (2, COUNT)).to(torch.int16).view(B)),
    "near": lambda: wide(14),
    "far": lambda: wide(30),
    "out of float64": lambda: wide(60),
    "huge": lambda: (sparse(120, 127), sparse(112, 120)),
    "tiny": lambda: (sparse(-133, -60), sparse(-140, -70)),
    "zeros": lambda: (torch.where(torch.rand(COUNT) < 0.5, sparse(-1, 1), -0.0 * sparse(0, 0)),),
}


def check_bits(x, y, components, dtype):
    for name in OPERATIONS:
        got = pointwise(name, x, y, components=components, dtype=dtype)
        with engine("reference"):
            wanted = pointwise(name, x, y, components=components, dtype=dtype)
        assert all(same_bits(a, b) for a, b in zip(got, wanted)), name


@pytest.mark.parametrize("kinds", list(itertools.combinations_with_replacement(KINDS, 2)), ids=" and ".join)
def test_pairs_of_bfloat16(kinds, seed):
    x, y = (pointwise("renormalize", KINDS[kind](), components=2, dtype=B) for kind in kinds)
    near = pointwise("add", (-x[0], x[1]), ((2.0**-12 * y[0].double()).to(B),), components=2, dtype=B)
    for other in (y, y[:1], near):
        check_bits(x, other, 2, B)


def test_products_that_float32_takes_for_zero():
    sizes = torch.tensor([2.0**-78, 2.0**-76, -(2.0**-75), 2.0**-70, -(2.0**-133), 0.0, -0.0, torch.inf])
    first = torch.outer(sizes, 1 + torch.arange(128) / 128).flatten().to(B)
    x = tuple(pointwise("renormalize", (first, (first.double() * 2.0**-9).to(B)), components=2, dtype=B))
    for signs in itertools.product((1.0, -1.0), repeat=2):
        for power in (1.0, 2.0**-60, 2.0**60):
            check_bits(x, tuple(sign * power * part for sign, part in zip(signs, x)), 2, B)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 3, 3), (4, 1, 4), (1, 1, 2), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [B, torch.float16], ids=str)
def test_other_counts_and_float16(counts, dtype, seed):
    left, right, components = counts
    for kind in KINDS:
        values = [torch.cat([part.to(dtype) for part in KINDS[kind]()]) for _ in range(4)]
        terms = [tuple(value * 2.0 ** (-9 * k) for k, value in enumerate(values)) for _ in range(2)]
        x, y = (pointwise("renormalize", t, components=n, dtype=dtype) for t, n in zip(terms, (left, right)))
        check_bits(x, y, components, dtype)
        check_bits(x, tuple(-part for part in x[:right]), components, dtype)


@pytest.mark.parametrize("dtype", [B, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_components_are_the_nearest_to_what_is_left(name, dtype, seed):
    format, reach = (formats.bf16, 20) if dtype == B else (formats.fp16, 4)
    for count in (2, 3):
        rows = [canonical(count, dtype, -reach, reach) for _ in range(400)]
        x, y = stacked(rows, dtype), stacked([opponent(row, dtype, reach) for row in rows], dtype)
        got = zip(*(part.tolist() for part in pointwise(name, x, y, components=count, dtype=dtype)))
        seen = 0
        for parts, a, b in zip(got, exact(x), exact(y)):
            left = OPERATIONS[name](a, b)
            if Fraction(float(left)) == left:  # float64, which other results pass through, loses nothing of it
                seen += 1
                for part in parts:
                    assert part == round_exact(left, format)
                    left -= Fraction(part)
        assert seen > 50
