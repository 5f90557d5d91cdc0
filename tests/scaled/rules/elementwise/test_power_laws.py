"""Powers: exact in the scale, odd powers of two under roots, other exponents on values."""

import pytest
import torch

from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor
from halfulp.scaled.rules import _elementwise as _power_laws
from halfulp.testing import check_rule

EXPONENTS = (0, 1, 2, 3, 4, 7, -1, -2, -3, 0.5, -0.5, 1.5, 0.3)


def positive():
    return (torch.rand(30) + 0.1,)


@pytest.mark.parametrize("name", ["sqrt", "rsqrt", "reciprocal", "square"])
def test_powers_have_the_plain_operators_bits(seed, name):
    check_rule(getattr(torch, name), positive, seed=seed, gradients=False)
    check_rule(getattr(torch, name), positive, seed=seed, exact=1e-6, trials=3)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_a_number_as_exponent(seed, exponent):
    check_rule(lambda x: x**exponent, positive, seed=seed, gradients=False)
    check_rule(lambda x: x**exponent, positive, seed=seed, exact=1e-5, trials=3)


def test_a_tensor_as_exponent_and_as_base(seed):
    check_rule(torch.pow, lambda: (*positive(), torch.randn(30)), seed=seed, exact=1e-5)
    check_rule(lambda x: 2.5**x, lambda: (torch.randn(30),), seed=seed, exact=1e-5)
    check_rule(torch.float_power, lambda: (*positive(), torch.randn(30)), seed=seed, exact=1e-5, gradients=False)


def test_scales_are_powers_of_two():
    for exponent in range(-20, 21):
        x = ScaledTensor(torch.tensor([1.5]), 2.0**exponent)
        for name in ("sqrt", "rsqrt", "square", "reciprocal"):
            assert torch.frexp(getattr(x, name)().scale)[0] == 0.5
        assert x.square().scale == 4.0**exponent


@pytest.mark.parametrize("exponent", [-126, -125, -1, 0, 1, 126, 127])
def test_roots_of_the_ends_of_the_range(exponent, monkeypatch):
    for traced in (False, True):
        if traced:
            monkeypatch.setattr(_power_laws._powers, "concrete_value", lambda scale: None)
        root, under = _power_laws.sqrt_of_scale(torch.tensor(2.0**exponent))
        assert float(root) ** 2 * float(under) == 2.0**exponent
        assert under in (1, 2)


def test_squares_keep_what_float32_holds(seed):
    x = ScaledTensor(torch.rand(10) + 1, 2.0**-70)
    assert torch.equal(x.square().decode(torch.float64).float(), x.decode(torch.float32).square())
    small = ScaledTensor.encode((torch.rand(10) + 1) * 1e-6)
    torch.testing.assert_close(small.square().decode(), small.decode().square(), rtol=1e-3, atol=0.0)


def test_zeros_infinities_and_negative_numbers():
    x = torch.tensor([0.0, float("inf"), -1.0, float("nan")])
    scaled = ScaledTensor(x / 8, 8.0)
    for operator in (torch.sqrt, torch.rsqrt, torch.reciprocal, torch.square):
        assert same_bits(operator(scaled).decode(), operator(x))
    zeros = torch.zeros_like(ScaledTensor.encode(torch.ones(2)))
    assert zeros.sqrt().tolist() == [0, 0]
    assert zeros.rsqrt().tolist() == [float("inf")] * 2
