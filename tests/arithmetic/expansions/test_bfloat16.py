"""Sums and products of bfloat16 pairs: the kernel in float32 has the bits of float64, and those of exact rationals."""

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


@pytest.mark.parametrize("kinds", list(itertools.combinations_with_replacement(KINDS, 2)), ids=" and ".join)
def test_float32_has_the_bits_of_float64(kinds, seed):
    x, y = (pointwise("renormalize", KINDS[kind](), components=2, dtype=B) for kind in kinds)
    near = pointwise("add", (-x[0], x[1]), ((2.0**-12 * y[0].double()).to(B),), components=2, dtype=B)
    for name, other in itertools.product(OPERATIONS, (y, y[:1], near)):
        got = pointwise(name, x, other, components=2, dtype=B)
        with engine("reference"):
            wanted = pointwise(name, x, other, components=2, dtype=B)
        assert all(same_bits(a, b) for a, b in zip(got, wanted)), name


@pytest.mark.parametrize("name", OPERATIONS)
def test_components_are_the_nearest_to_what_is_left(name, seed):
    rows = [canonical(2, B, -20, 20) for _ in range(600)]
    x, y = stacked(rows, B), stacked([opponent(row, B, 20) for row in rows], B)
    got = [part.tolist() for part in pointwise(name, x, y, components=2, dtype=B)]
    seen = 0
    for first, second, a, b in zip(*got, exact(x), exact(y)):
        left = OPERATIONS[name](a, b)
        if Fraction(float(left)) == left:  # float64, which other results pass through, loses nothing of it
            seen += 1
            assert first == round_exact(left, formats.bf16)
            assert second == round_exact(left - Fraction(first), formats.bf16)
    assert seen > 300
