"""scatter_reduce and index_reduce of components that no float64 holds, against exact rationals."""

from fractions import Fraction
from math import prod

import pytest
import torch

from halfulp.mctensor import MCTensor

from ..exact_values import exact

REDUCE = {"mean": lambda values: sum(values) / len(values), "prod": prod, "amax": max, "amin": min, "sum": sum}


def fractions(x: MCTensor) -> list[Fraction]:
    return [Fraction(value) for value in exact(x.reshape(-1))]


def terms(*shape: int) -> MCTensor:
    """Values of which some differ in their last component alone."""
    first = torch.randint(-2, 3, shape).double() / 3
    return MCTensor.from_components([first, torch.randn(shape, dtype=torch.float64) * 2.0**-70])


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning", "ignore:scatter_reduce:UserWarning")
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCE)
def test_every_reduction_has_all_digits(reduce, include_self, seed):
    x, source, index = terms(4, 3), terms(9, 3), torch.randint(0, 3, (9,))  # nothing goes to the last row
    spread = index.unsqueeze(1).expand(9, 3)
    found = [x.scatter_reduce(0, spread, source, reduce, include_self=include_self)]
    if reduce != "sum":
        found.append(x.index_reduce(0, index, source, reduce, include_self=include_self))
    first, others = fractions(x), fractions(source)
    for row in range(4):
        for column in range(3):
            here = [others[3 * i + column] for i in range(9) if int(index[i]) == row]
            wanted = REDUCE[reduce]([first[3 * row + column]] * (include_self or not here) + here)
            size = sum(map(abs, here)) + abs(first[3 * row + column]) + abs(wanted)
            for x_found in found:
                gap = abs(fractions(x_found)[3 * row + column] - wanted)
                assert gap == 0 if reduce.startswith("a") else gap <= size * Fraction(2) ** -100


@pytest.mark.filterwarnings("ignore:scatter_reduce:UserWarning")
def test_extremes_without_dimensions_and_of_what_is_no_number(seed):
    x = MCTensor.from_components([torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0**-80, dtype=torch.float64)])
    found = x.scatter_reduce(0, torch.zeros((), dtype=torch.int64), x * 3, "amax")
    assert torch.equal(found, x * 3)
    missing = torch.stack([x, x * torch.nan])
    for reduce in ("amax", "amin"):
        found = torch.stack([x, x]).scatter_reduce(0, torch.tensor([0, 0]), missing, reduce)
        assert found.isnan().tolist() == [True, False]
