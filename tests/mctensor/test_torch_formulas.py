"""Torch's own formulas, above all derivatives: within the float64 numbers in them; rules of our own hold all digits.

A formula multiplies by a number of its own, such as 2 / sqrt(pi) in erf's derivative or 2 / n in a mean loss's: a
float64, and so within 2^-53 of itself. A result that went through up to eight such steps is within 2^-50.
"""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F

from halfulp.mctensor import MCTensor
from halfulp.subclass import strict

from .exact_values import exact

ALPHA = (
    "1.67326324235437728481704299167165203846115534828121627091524483424858612",
    "1.05070098735548049341933498529460635195898120437640454697787838780199462",
)


def _third(values):
    return mpmath.root(sum(v**3 for v in values), 3)


def _mean(function):
    return lambda values: sum(function(v - mpmath.mpf(i) / 4) for i, v in enumerate(values)) / len(values)


def _curved(d):
    return d * d / 2 if abs(d) < 1 else abs(d) - mpmath.mpf(1) / 2


def _targets(x):
    return torch.arange(len(x), dtype=torch.float64) / 4


# Element by element, or one number of all elements.
ELEMENTWISE = {
    "log2": (torch.log2, lambda v: mpmath.log(v) / mpmath.log(2)),
    "log10": (torch.log10, mpmath.log10),
    "hardsigmoid": (F.hardsigmoid, lambda v: (v + 3) / 6),
    "hardswish": (F.hardswish, lambda v: v * (v + 3) / 6),
    "x ** (1 / 3)": (lambda x: x ** (1 / 3), lambda v: v ** mpmath.mpf(1 / 3)),
    "3 ** x": (lambda x: 3**x, lambda v: mpmath.mpf(3) ** v),
    "x ** 1.00000001": (lambda x: x**1.00000001, lambda v: v ** mpmath.mpf(1.00000001)),
    "sinc": (torch.sinc, lambda v: mpmath.sincpi(v)),
    "deg2rad": (torch.deg2rad, lambda v: v * mpmath.pi / 180),
    "rad2deg": (torch.rad2deg, lambda v: v * 180 / mpmath.pi),
    "lerp": (lambda x: torch.lerp(x, x * x, 0.1), lambda v: v + mpmath.mpf(0.1) * (v * v - v)),
    "selu": (F.selu, lambda v: v * mpmath.mpf(ALPHA[1])),
    "selu below 0": (
        lambda x: F.selu(-x),
        lambda v: mpmath.expm1(-v) * mpmath.mpf(ALPHA[0]) * mpmath.mpf(ALPHA[1]),
    ),
    "celu": (lambda x: F.celu(-x, 0.3), lambda v: mpmath.mpf(0.3) * mpmath.expm1(-v / mpmath.mpf(0.3))),
    "elu": (lambda x: F.elu(-x, 0.3), lambda v: mpmath.mpf(0.3) * mpmath.expm1(-v)),
    "mish": (F.mish, lambda v: v * mpmath.tanh(mpmath.log1p(mpmath.exp(v)))),
}
OF_ALL = {
    "norm(3)": (lambda x: torch.norm(x, 3), _third),
    "mse_loss": (lambda x: F.mse_loss(x, _targets(x)), _mean(lambda d: d * d)),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, _targets(x)), _mean(_curved)),
    "huber_loss": (lambda x: F.huber_loss(x, _targets(x)), _mean(_curved)),
    "var": (
        lambda x: x[:4].var(),
        lambda values: (sum(v * v for v in values[:4]) - sum(values[:4]) ** 2 / 4) / 3,
    ),
}


def _mpf(value):
    return mpmath.mpf(value) if isinstance(value, float) else mpmath.mpf(value.numerator) / value.denominator


def _run(function):
    x = MCTensor.encode(torch.rand(5, dtype=torch.float64) + 0.25, 2, gradients="components").requires_grad_()
    with strict():
        result = function(x)
        result.sum().backward()
    return [[_mpf(v) for v in exact(y)] for y in (x.detach(), result.detach(), x.grad)]


# Values that torch computes by a formula with numbers of its own.
NUMBERED = ("sinc", "deg2rad", "rad2deg", "selu", "selu below 0")
ALL_DIGITS, NUMBERS = 2.0**-98, 2.0**-50
# torch inverts alpha in float32, for plain float64 too.
SLOPES = {"celu": 2.0**-22}


def _near(found, wanted, bound):
    return abs(found - wanted) <= bound * max(abs(wanted), mpmath.mpf(2) ** -4)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_values_and_slopes(name, seed):
    function, reference = ELEMENTWISE[name]
    with mpmath.workdps(60):
        for x, value, slope in zip(*_run(function)):
            assert _near(value, reference(x), NUMBERS if name in NUMBERED else ALL_DIGITS)
            assert _near(slope, mpmath.diff(reference, x), SLOPES.get(name, NUMBERS))


@pytest.mark.parametrize("name", OF_ALL)
def test_losses_and_norms(name, seed):
    function, reference = OF_ALL[name]
    with mpmath.workdps(60):
        values, (result,), slopes = _run(function)
        assert _near(result, reference(values), ALL_DIGITS)
        for i, slope in enumerate(slopes):
            along = [*values]

            def moved(x, along=along, i=i):
                return reference([*along[:i], x, *along[i + 1 :]])

            assert _near(slope, mpmath.diff(moved, values[i]), NUMBERS)


def test_a_users_number_is_what_it_is():
    x = MCTensor.encode([3.0], 2, torch.float64, gradients="components").requires_grad_()
    result = F.leaky_relu(-x, 1 / 3) * math.pi
    result.backward()
    with mpmath.workdps(60):
        assert _near(_mpf(exact(x.grad)[0]), -mpmath.mpf(1 / 3) * mpmath.mpf(math.pi), ALL_DIGITS)


def test_a_compiled_graph_holds_the_same_numbers(seed):
    values, found = torch.rand(5, dtype=torch.float64), []

    def function(x):
        return (torch.tanh(x) + torch.deg2rad(x) + F.mse_loss(x, x * 0)).sum()

    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        x = MCTensor.encode(values, 2, gradients="components").requires_grad_()
        result = call(x)
        result.backward()
        found.append([*exact(result.detach()), *exact(x.grad)])
    assert found[0] == found[1]
