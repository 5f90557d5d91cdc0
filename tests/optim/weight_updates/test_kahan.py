"""Kahan's weight update: the paper's algorithm by torch's own bfloat16 operations, and the default by float32 sums."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

from ...laws.optim.cases import Adder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _updates(steps, elements):
    """Updates over ten binades, so that some vanish, some change a last place and some cancel the weight."""
    return [torch.randn(elements) * 2 ** torch.empty(elements).uniform_(-12, 1).round() for _ in range(steps)]


@pytest.mark.parametrize("store", DTYPES)
def test_literal_is_the_papers_algorithm_in_sixteen_bit_operations(seed, store):
    start = torch.randn(4096).to(DTYPES[store])
    held = Adder("kahan-literal", start.float(), store)
    w, c = start.clone(), torch.zeros_like(start)
    for u in _updates(30, 4096):
        held.add(u)
        # Every line one rounding: torch computes a 16-bit operation in float32 and rounds its result.
        y = u.to(w.dtype) + c
        s = w + y
        c = (w - s) + y
        w = s
        assert same_bits(held.parameter.detach(), w)
        assert torch.equal(held.part("residual"), c)


@pytest.mark.parametrize("store", DTYPES)
def test_nearest_residual_is_kahan_in_float32_registers(seed, store):
    start = torch.randn(4096).to(DTYPES[store])
    held = Adder("kahan-nearest", start.float(), store)
    p, c = start.clone(), torch.zeros_like(start)
    for u in _updates(30, 4096):
        held.add(u)
        y = u + c.float()
        s = (p.float() + y).to(p.dtype)
        c = ((p.float() - s.float()) + y).to(p.dtype)
        p = s
        assert same_bits(held.parameter.detach(), p)
        assert torch.equal(held.part("residual"), c)


def test_a_stochastic_residual_is_a_neighbour_and_right_on_average(seed):
    p = torch.ones(200_000)
    u = torch.full_like(p, 2.0**-9 * (1 + 2**-9))
    held = Adder("kahan", p, seed=seed)
    held.add(u)
    assert torch.equal(held.parameter.detach(), torch.ones_like(p).bfloat16())
    kept = held.part("residual").double()
    below, ulp = 2.0**-9, 2.0**-16
    assert set(kept.unique().tolist()) == {below, below + ulp}
    share = float((kept > below).double().mean())
    expected = (float(u[0]) - below) / ulp
    assert abs(share - expected) < 6 * (expected * (1 - expected) / len(p)) ** 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"residual": "up"}, "nearest"),
        ({"weight": hu.Up()}, "nearest"),
        ({"literal": True, "weight": "stochastic"}, "leave"),
    ],
)
def test_roundings_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        hu.Kahan(**given)


def test_rounding_objects_are_taken_by_name():
    assert hu.Kahan(weight=hu.Nearest(), residual=hu.Stochastic()) == hu.Kahan()
    assert hu.Kahan(literal=True).residual == "nearest"
