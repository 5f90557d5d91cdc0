"""Law: finite gradients stay finite, and a sum of positives is never 0 under a division, in both tensors.

Functions whose derivatives divide by a sum, at arguments beside which the small ones are lost under one scale."""

import random

import pytest
import torch

from halfulp import MCTensor, ScaledTensor

KINDS = {
    "float16": lambda x: ScaledTensor.encode(x),
    "float16 at home": lambda x: ScaledTensor.encode(x, home=torch.float16),
    "bfloat16": lambda x: ScaledTensor.encode(x, torch.bfloat16),
    "float8_e5m2": lambda x: ScaledTensor.encode(x, torch.float8_e5m2),
    "two float16": lambda x: MCTensor.encode(x, 2, torch.float16),
}
# Functions, and the magnitudes between which their arguments lie.
FUNCTIONS = {
    "logaddexp": (torch.logaddexp, 1e-2, 80.0),
    "logaddexp2": (torch.logaddexp2, 1e-2, 100.0),
    "log1p": (lambda a, b: torch.log1p(a.abs()), 1e-2, 3e8),
    "atan": (lambda a, b: torch.atan(a), 1e-2, 3e5),
    "atan2": (torch.atan2, 1e-2, 1e4),
    "asinh": (lambda a, b: torch.asinh(a), 1e-2, 3e5),
    "acosh": (lambda a, b: torch.acosh(a.abs() + 1.5), 1e-2, 1e4),
    "hypot": (torch.hypot, 1e-2, 1e3),
    "addcdiv": (lambda a, b: torch.addcdiv(a, a, b.abs() + 0.5), 1e-2, 100.0),
    "logcumsumexp": (lambda a, b: a.logcumsumexp(0), 1e-2, 20.0),
}


def values(x):
    return x.detach().decode(torch.float64) if hasattr(x, "decode") else x.detach().double()


def draw(least, most, n=24):
    """Signed numbers, their logarithms uniform between two magnitudes."""
    size = torch.empty(n).uniform_(torch.tensor(least).log().item(), torch.tensor(most).log().item()).exp()
    return size * torch.randn(n).sign()


def gradients(function, a, b):
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    y = function(a, b)
    total = y.sum()
    return [g for g in torch.autograd.grad(total, (a, b), allow_unused=True) if g is not None]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_beside_large_arguments(name, kind, seed):
    function, least, most = FUNCTIONS[name]
    near = {"bfloat16": 3e-2, "float8_e5m2": 0.5}.get(kind, 1e-2)
    if name == "logcumsumexp" and kind in ("bfloat16", "float8_e5m2"):
        # Its derivative e^(x - y) multiplies by e to the error of y, below 8: a 64th in bfloat16, a half in e5m2.
        most, near = 4.0, {"bfloat16": 3e-2, "float8_e5m2": 0.9}[kind]
    a, b = KINDS[kind](draw(least, most)), KINDS[kind](draw(least, most))
    for found, wanted in zip(gradients(function, a, b), gradients(function, values(a), values(b)), strict=True):
        found = values(found)
        assert found.isfinite().all(), (name, found, wanted)
        # hypot's result is 0 in a payload beside one 2^24 times as large.
        assert (found - wanted).abs().max() <= near * wanted.abs().max().clamp(min=1.0), (name, found, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eps", [1e-2, 1e-5, 1.0])
@pytest.mark.parametrize("large", [3e8, 1e4, 1e12])
def test_a_sum_of_positives_is_no_zero_divisor(kind, eps, large, seed):
    y = torch.cat([torch.rand(8), torch.zeros(4), torch.tensor([large])])
    x = KINDS[kind](y).detach().requires_grad_()
    other = KINDS[kind](torch.full((13,), eps))
    for total in (x + eps, eps + x, x + other, torch.add(other, x), x + torch.full((13,), eps)):
        for quotient in (torch.rsqrt(total), 1 / total, total.log(), x / total.sqrt()):
            assert values(quotient).isfinite().all()
        (gradient,) = torch.autograd.grad(torch.rsqrt(total).sum(), x, retain_graph=True)
        if eps > 1e-5:  # whose gradients are beyond float16 in plain components
            assert values(gradient)[:-1].isfinite().all() or isinstance(x, MCTensor)


def test_results_without_a_home_have_the_storage_of_their_operands(seed):
    """What is computed in float32 within a formula leaves it rounded."""
    chance = random.Random(seed)
    for dtype in (torch.float16, torch.float8_e5m2, torch.bfloat16):
        name = chance.choice(["logaddexp", "log1p", "atan", "asinh"])
        function, least, most = FUNCTIONS[name]
        a, b = (ScaledTensor.encode(draw(least, most), dtype) for _ in range(2))
        for gradient in gradients(function, a, b):
            assert gradient.payload.dtype == dtype
            assert gradient.home is None
        leaf = a.detach().requires_grad_()
        function(leaf * 2.0, b).sum().backward()
        assert leaf.grad.payload.dtype == dtype


def test_compiled_gradients_are_finite_too(fresh_compiler, seed):
    a, b = (ScaledTensor.encode(draw(1e-2, 80.0)).detach().requires_grad_() for _ in range(2))
    torch.compile(torch.logaddexp, backend="aot_eager")(a, b).sum().backward()
    wanted = gradients(torch.logaddexp, values(a), values(b))
    for x, y in zip((a, b), wanted):
        assert (values(x.grad) - y).abs().max() < 1e-2
