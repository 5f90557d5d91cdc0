"""Split: float32 words cut in two and put together again."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.weight_updates._weight_update import find_weight_update

from ...laws.optim.cases import Adder


def _words(count: int) -> torch.Tensor:
    """Every exponent and sign with random and extreme mantissas, as float32; also zeros, infinities and NaNs."""
    exponents = torch.arange(512).repeat_interleave(count)
    mantissas = torch.randint(0, 2**23, (512, count))
    mantissas[:, :8] = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F, 0x80, 0x7FFFFF])
    words = (exponents << 23) + mantissas.flatten()
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("engine", ["reference", "llvm"])
def test_split_is_exact_for_every_exponent(seed, engine):
    values = _words(400)
    held = Adder("split", torch.zeros_like(values), engine=engine)
    held.fill(values)
    assert same_bits(held.weight, values)
    parameter = held.parameter.detach()
    assert torch.equal(parameter.isnan(), values.isnan())
    held.add(torch.where(values.signbit(), -0.0, 0.0))
    assert same_bits(held.weight, values)


def test_the_parameter_is_the_nearest_bfloat16_ties_away(seed):
    values = _words(400)
    values = values[values.isfinite() & (values.abs() < 3.38e38)]
    held = Adder("split", torch.zeros_like(values))
    held.fill(values)
    shown = held.parameter.detach().double()
    away = (values.double() - values.bfloat16().double()).abs()
    assert torch.equal((shown - values.double()).abs(), away)
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert (shown[tie].abs() > values[tie].double().abs()).all()


def test_random_updates_are_float32_additions(seed):
    start = torch.randn(8192).bfloat16().float()
    held, whole = Adder("split", start), start.clone()
    for _ in range(20):
        u = torch.randn(8192) * 2 ** torch.empty(8192).uniform_(-20, 0)
        held.add(u)
        whole = whole + u
        assert torch.equal(held.weight, whole)


@pytest.mark.parametrize("store", ["bf16", "fp16"])
def test_split8_keeps_sixteen_bits(seed, store):
    values = torch.randn(50_000) * 2 ** torch.empty(50_000).uniform_(-10, 10)
    held = Adder("split8", torch.zeros_like(values), store)
    held.fill(values)
    bits, digits, subnormal = (16, 8, 0.0) if store == "bf16" else (19, 11, 2.0**-24)
    size = values.abs()
    assert ((held.weight - values).abs() <= 1.01 * size * 2.0**-bits + subnormal * 2**-8).all()
    assert ((held.parameter.float() - held.weight).abs() <= size * 2.0**-digits * 1.01 + subnormal).all()


@pytest.mark.parametrize("store", ["bf16", "fp16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_split8_is_right_on_average_and_never_stalls(seed, store, sign):
    """A quarter of a unit per step, past several places of the parameter, in both directions."""
    unit = 2.0**-15 if store == "bf16" else 2.0**-18
    held = Adder("split8", torch.full((4000,), 1.5), store, seed=seed, engine="llvm")
    u, steps = torch.full((4000,), sign * unit / 4), 2000
    for _ in range(steps):
        held.add(u)
    moved = (held.weight.double() - 1.5) / (sign * unit)
    # A fair coin of one unit, a quarter of the time.
    assert abs(float(moved.mean()) - steps / 4) < 6 * (steps * 0.1875 / 4000) ** 0.5 + 1e-9
    assert float((moved - steps / 4).abs().max()) < 7 * (steps * 0.1875) ** 0.5


def test_split_is_for_bfloat16_and_says_what_else():
    for dtype, update in ((torch.float16, "split"), (torch.float16, hu.Split(16))):
        with pytest.raises(ValueError, match="'kahan', 'split8' or 'master'"):
            hu.optim.SGD([torch.nn.Parameter(torch.zeros(2, dtype=dtype))], weight_update=update)
    for name in ("split", "split8"):
        with pytest.raises(ValueError, match="kahan"):
            hu.optim.SGD([torch.nn.Parameter(torch.zeros(2))], weight_update=name, format="bf16")


@pytest.mark.parametrize("bits", [0, 4, 24, 32, "8"])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(ValueError, match="16"):
        hu.Split(bits=bits)


@pytest.mark.parametrize("name", ["split", "split-stochastic"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_split_is_known_by_the_rounding_that_files_name_too(name, rounding):
    given = {"name": name, "rounding": rounding}
    wanted = "split-stochastic" if "stochastic" in (rounding, *name.split("-")) else "split"
    assert find_weight_update(given) == find_weight_update(wanted)
