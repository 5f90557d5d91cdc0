"""Weight updates without a companion, and the float32 master."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

from ...laws.optim.cases import Adder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("store", [*DTYPES, "e4m3fn", "e8m3"])
def test_nearest_rounds_the_float32_sum(seed, store):
    held = Adder("nearest", torch.randn(4096), store)
    for _ in range(10):
        u = torch.randn(4096) * 2 ** torch.empty(4096).uniform_(-12, 0)
        wanted = held.parameter.detach().float() + u
        held.add(u)
        rounded = wanted.to(DTYPES[store]) if store in DTYPES else hu.quantize(wanted, store)
        assert same_bits(held.parameter.detach(), rounded)


@pytest.mark.parametrize("store", DTYPES)
def test_master_is_float32_and_shows_its_nearest(seed, store):
    start = torch.randn(4096).to(DTYPES[store])
    held, whole = Adder("master", start.float(), store), start.float()
    for _ in range(20):
        u = torch.randn(4096) * 2 ** torch.empty(4096).uniform_(-20, 0)
        held.add(u)
        whole = whole + u
        assert torch.equal(held.part("master"), whole)
        assert torch.equal(held.parameter.detach(), whole.to(DTYPES[store]))


def test_the_parameter_has_the_last_word_over_its_master():
    held = Adder("master", torch.ones(4))
    held.add(torch.full((4,), 2.0**-12))
    with torch.no_grad():
        held.parameter[0] = 3.0
    held.add(torch.full((4,), 2.0**-12))
    # The first write drops the masters of the whole parameter, later ones those of what they change.
    assert held.part("master").tolist() == [3 + 2.0**-12] + [1 + 2.0**-12] * 3
    with torch.no_grad():
        held.parameter[0] = 5.0
    held.add(torch.full((4,), 2.0**-12))
    assert held.part("master").tolist() == [5 + 2.0**-12] + [1 + 2.0**-11] * 3


def test_float32_parameters_add_in_float32(seed):
    start = torch.randn(4096)
    held = Adder("exact", start, "fp32", engine="llvm")
    u = torch.randn(4096) * 1e-3
    held.add(u)
    assert torch.equal(held.parameter.detach(), start + u)
    for dtype, options in ((torch.bfloat16, {}), (torch.float32, {"format": "e8m3"})):
        with pytest.raises(ValueError, match="float32 parameters"):
            hu.optim.SGD([torch.nn.Parameter(torch.zeros(2, dtype=dtype))], weight_update="exact", **options)


def test_stochastic_bits_depend_on_seed_step_name_and_index_only(seed):
    def run(numbers, seed_, name, steps=1):
        parameter = torch.nn.Parameter(numbers.clone())
        optimizer = hu.optim.SGD([(name, parameter)], lr=1.0, weight_update="stochastic", seed=seed_)
        for _ in range(steps):
            parameter.grad = torch.full_like(parameter, 2.0**-9)
            optimizer.step()
        return parameter.detach()

    ones = torch.ones(512).bfloat16()
    first = run(ones, 0, "a")
    torch.manual_seed(99)
    torch.rand(7)
    assert torch.equal(first, run(ones, 0, "a"))
    assert not torch.equal(first, run(ones, 1, "a"))
    assert not torch.equal(first, run(ones, 0, "b"))
    second = run(ones, 0, "a", 2)
    assert not torch.equal((second != first), (first != ones))
