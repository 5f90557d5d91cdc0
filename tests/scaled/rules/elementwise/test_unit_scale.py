"""Functions with results about 1: bits of the plain operator, small arguments that stay, ends of the range."""

import pytest
import torch

from halfulp.scaled import ScaledTensor
from halfulp.scaled import _powers_of_two as _powers
from halfulp.testing import check_rule

SMOOTH = {
    "anywhere": "exp exp2 expm1 tanh sin cos tan atan asinh sinh cosh erf erfc sinc sigmoid angle sgn sign frac "
    "special.i0e special.i1e special.i1 special.bessel_j0 special.bessel_j1 special.spherical_bessel_j0 "
    "special.modified_bessel_i1",
    "between -1 and 1": "asin acos atanh erfinv",
    "between 0 and 1": "special.ndtri logit",
    "above 1": "acosh log log2 log10 log1p",
}
DRAW = {
    "anywhere": lambda: torch.randn(40),
    "between -1 and 1": lambda: torch.rand(40) * 1.9 - 0.95,
    "between 0 and 1": lambda: torch.rand(40) * 0.9 + 0.05,
    "above 1": lambda: torch.rand(40) + 1.1,
}
UNARY = [(name, domain) for domain, names in SMOOTH.items() for name in names.split()]
# Their gradients are sums and quotients of several rounded steps, which rules round in another order.
ODD = "tanh sin asin atan asinh atanh erf log1p expm1 sinh tan erfinv frac"


def function(name):
    return torch.special.__dict__[name.removeprefix("special.")] if "." in name else getattr(torch, name)


@pytest.mark.parametrize(("name", "domain"), UNARY)
def test_results_have_the_plain_operators_bits_under_every_scale(seed, name, domain):
    check_rule(function(name), lambda: (DRAW[domain](),), seed=seed, trials=3, gradients=False)


@pytest.mark.parametrize(("name", "domain"), [(n, d) for n, d in UNARY if not n.startswith("special.") and n != "frac"])
def test_gradients_do_not_depend_on_scales(seed, name, domain):
    check_rule(function(name), lambda: (DRAW[domain](),), seed=seed, trials=2, exact=1e-5)


def test_functions_of_two_arguments(seed):
    def positive():
        return torch.rand(20) + 0.1, torch.rand(20) + 0.1

    for name in ("igamma", "igammac", "atan2"):
        check_rule(getattr(torch, name), positive, seed=seed, trials=3, gradients=name == "atan2", exact=1e-6)


@pytest.mark.parametrize("name", ODD.split())
def test_small_arguments_do_not_vanish_in_float16(seed, name):
    x = torch.randn(30) * 1e-9
    found = function(name)(ScaledTensor.encode(x)).decode()
    torch.testing.assert_close(found, function(name)(x), rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize("name", ["exp", "exp2", "expm1", "cosh", "sinh"])
def test_large_results_keep_their_magnitude_in_float16(name):
    x = torch.tensor([-20.0, 0.0, 3.0, 19.0, float("inf"), float("nan")])
    encoded = ScaledTensor.encode(x)
    found, expected = function(name)(encoded).decode(), function(name)(encoded.decode())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=20.0, equal_nan=True)


def test_zeros_of_any_scale_and_empty_tensors():
    zeros = torch.zeros_like(ScaledTensor.encode(torch.ones(3)))
    for name, _ in UNARY:
        found, expected = function(name)(zeros).decode(), function(name)(torch.zeros(3))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0, equal_nan=True)
        assert function(name)(ScaledTensor.encode(torch.ones(0))).shape == (0,)
    assert zeros.tanh().scale == _powers.ZERO_SCALE


def test_the_sign_is_of_the_payload():
    x = ScaledTensor(torch.tensor([-2.0, 0.0, 1.0, -0.0]), 2.0**9)
    assert x.sign().scale == 1
    assert x.sign().tolist() == [-1, 0, 1, 0]


def test_frexp_is_of_the_value():
    mantissa, exponent = torch.frexp(ScaledTensor(torch.tensor([1.5, 3.0]), 2.0**9))
    assert mantissa.tolist() == [0.75, 0.75]
    assert exponent.tolist() == [10, 11]


def test_scales_of_results_are_their_own():
    x = ScaledTensor(torch.randn(3), 2.0**-3)
    for name, _ in UNARY:
        assert function(name)(x).scale is not x.scale


@pytest.mark.parametrize("storage", [torch.float32, torch.float16])
def test_rules_of_values_trace_into_one_graph(seed, storage):
    def many(x):
        y = x.tanh() + x.exp() + x.square().sqrt() + x.sign() + (x * x + 1).rsqrt() + x.floor() + x**3
        return torch.where(y > x, y.log1p(), torch.erf(y)) + torch.lgamma(y.square() + 1) + x.sort()[0]

    x = ScaledTensor.encode(torch.rand(12) + 0.5, storage).requires_grad_()
    eager = many(x)
    compiled = torch.compile(many, backend="aot_eager", fullgraph=True)(x)
    # A graph keeps squares in float32 that float16 payloads round eagerly.
    apart = 1e-6 if storage == torch.float32 else 4e-3
    torch.testing.assert_close(compiled.detach().decode(), eager.detach().decode(), rtol=apart, atol=apart)
    (expected,), (found,) = (torch.autograd.grad(y.sum(), x) for y in (eager, compiled))
    rtol = 1e-5 if storage == torch.float32 else 1e-2
    torch.testing.assert_close(found.decode(), expected.decode(), rtol=rtol, atol=rtol)
