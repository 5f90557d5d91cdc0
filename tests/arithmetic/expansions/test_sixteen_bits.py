"""Sums and products of 16-bit components have the bits of exact rationals."""

from fractions import Fraction

import pytest
import torch

from halfulp import formats
from halfulp.arithmetic import pointwise
from halfulp.formats import round_exact

from ..expansion_values import canonical, exact, opponent, stacked

OPERATIONS = {"add": Fraction.__add__, "sub": Fraction.__sub__, "mul": Fraction.__mul__}
B = torch.bfloat16


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
