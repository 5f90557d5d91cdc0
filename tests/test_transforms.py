"""Differentiable functions under every transform of torch.func, and in forward mode, beside torch's own."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad

import halfulp as hu
from halfulp.rounding import straight_through

# Ours, and what has the same derivatives.
FUNCTIONS = {
    "straight_through": (lambda x: straight_through(x, "e8m20") ** 2, lambda x: x**2),
    "quantize": (lambda x: hu.quantize(x, "e8m20") ** 2, lambda x: x.round() ** 2 * 0 + x.detach() ** 2),
}
TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(f(x)))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "grad of a batch": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, 2 * x])),
    "forward mode": lambda f, x: _forward(f, x),
}


def _forward(f, x):
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent
        return torch.zeros_like(f(x)) if tangent is None else tangent


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_torchs(name, transform, seed):
    ours, theirs = FUNCTIONS[name]
    x = torch.randn(5)
    with warnings.catch_warnings():
        # torch warns of what it uses itself.
        warnings.filterwarnings("ignore", module="torch")
        got, wanted = (TRANSFORMS[transform](f, x) for f in (ours, theirs))
    if name == "quantize" and transform != "vmap":
        wanted = torch.zeros_like(wanted)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_compiled_sum_has_a_gradient(seed):
    x = torch.randn(5, requires_grad=True)
    torch.compile(lambda x: hu.exact_dot(x, x), backend="aot_eager", fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


ROUND_AT_RANDOM = {
    "quantize": lambda x: hu.quantize(x, "e4m3fn", hu.Stochastic()),
    "quantize in blocks": lambda x: hu.quantize(x, "mxfp4", "stochastic"),
    "straight_through": lambda x: hu.rounding.straight_through(x, "e4m3fn", rounding="stochastic"),
}


@pytest.mark.parametrize("function", ROUND_AT_RANDOM.values(), ids=ROUND_AT_RANDOM)
def test_random_bits_of_a_batch_follow_its_randomness(function, seed):
    x = torch.rand(64).expand(3, 64)
    with pytest.raises(RuntimeError, match="randomness='different' or 'same'"):
        torch.func.vmap(function)(x)
    same, different = (torch.func.vmap(function, randomness=one)(x) for one in ("same", "different"))
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])
    assert not torch.equal(different[0], different[1])
    turned = torch.func.vmap(function, in_dims=1, out_dims=1, randomness="same")(x.t())
    assert torch.equal(turned[:, 0], turned[:, 1])


@pytest.mark.parametrize("rounding", [hu.Nearest(), hu.Stochastic(3), hu.Stochastic()])
@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
def test_a_batch_of_nothing(format, rounding):
    quantize = torch.func.vmap(lambda x: hu.quantize(x, format, rounding), randomness="different")
    assert quantize(torch.zeros(0, 4)).shape == (0, 4)


def test_random_bits_of_a_batch_are_those_of_each_sample(seed):
    x = torch.randn(3, 100)
    rounding = hu.rounding.Stochastic(seed)
    got = torch.func.vmap(lambda x: hu.quantize(x, "bf16", rounding))(x)
    assert torch.equal(got, torch.stack([hu.quantize(row, "bf16", rounding) for row in x]))
