"""Components against exact rationals, and their two against Kahan's."""

import itertools
from fractions import Fraction

import pytest
import torch

import halfulp as hu

from ...laws.optim.cases import Adder, differing, snapshot

NAMES = {3: "components-3", 4: "components-4"}


def _exact(held) -> list[Fraction]:
    parts = [part.double().tolist() for part in held.plan.weight_tensors]
    return [sum(map(Fraction, values), Fraction(0)) for values in zip(*parts)]


@pytest.mark.parametrize("store", ["bf16", "fp16", "e8m3"])
def test_two_components_are_kahan_with_a_nearest_residual(seed, store):
    start = torch.randn(4096)
    a, b = (Adder(update, start, store) for update in ("components", "kahan-nearest"))
    for _ in range(20):
        u = torch.randn(4096) * 2 ** torch.empty(4096).uniform_(-14, 0)
        a.add(u)
        b.add(u)
    assert differing(snapshot(a.optimizer), snapshot(b.optimizer)) == []


@pytest.mark.parametrize("n", NAMES)
@pytest.mark.parametrize("store", ["bf16", "fp16"])
def test_the_exact_total_after_an_update(seed, n, store):
    """Half an ulp of the last component, and what float32 loses of the errors of its own sums."""
    digits = 8 if store == "bf16" else 11
    start = torch.randn(300) * 2 ** torch.empty(300).uniform_(-3, 3)
    held = Adder(NAMES[n], start, store)
    spacing = Fraction(2) ** (-133 if store == "bf16" else -24)
    for scale in (1.0, 2.0**-5, 2.0**-9, 2.0**-14, 2.0**-20, 1.0):
        u = torch.randn(300) * scale
        before = _exact(held)
        held.add(u)
        for old, change, new in zip(before, u.double().tolist(), _exact(held)):
            wanted = old + Fraction(change)
            size = abs(old) + abs(Fraction(change))
            allowed = abs(wanted) * Fraction(2) ** -(n * digits) + size * Fraction(2) ** -46 + spacing
            assert abs(new - wanted) <= allowed


@pytest.mark.parametrize("n", NAMES)
def test_float32_fits_into_three_bfloat16_components(seed, n):
    values = torch.randn(20_000) * 2 ** torch.empty(20_000).uniform_(-40, 40).round()
    held = Adder(NAMES[n], torch.zeros_like(values))
    held.fill(values)
    assert torch.equal(held.weight, values)
    total = sum(part.double() for part in held.plan.weight_tensors)
    assert torch.equal(total, values.double())


@pytest.mark.parametrize("n", NAMES)
def test_components_do_not_overlap(seed, n):
    held = Adder(NAMES[n], torch.randn(4096))
    for _ in range(10):
        held.add(torch.randn(4096) * 0.01)
    parts = [part.float() for part in held.plan.weight_tensors]
    for larger, smaller in itertools.pairwise(parts):
        half_ulp = torch.ldexp(torch.ones_like(larger), torch.frexp(larger)[1] - 9)
        assert (smaller.abs() <= half_ulp).all()


@pytest.mark.parametrize("n", [0, 1, 5, -1, 2.5, "3"])
def test_other_numbers_of_components_are_refused(n):
    with pytest.raises(ValueError, match="2, 3 and 4"):
        hu.Components(n)
