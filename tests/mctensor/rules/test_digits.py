"""Beyond float64: functions, sums, order and layers keep the digits that two float64 or three float32 hold."""

from fractions import Fraction

import mpmath
import pytest
import torch
import torch.nn.functional as F

from halfulp.kernels import engine
from halfulp.mctensor import MCTensor
from halfulp.subclass import strict

from ..exact_values import exact

FORMATS = {(torch.float64, 2): 96, (torch.float32, 3): 62}


def _mpf(value):
    if isinstance(value, float):
        return mpmath.mpf(value)
    return mpmath.mpf(value.numerator) / value.denominator


def _draw(shape, dtype, components, low=0.1, high=2.0):
    values = torch.rand(shape, dtype=torch.float64) * (high - low) + low
    fine = torch.rand(shape, dtype=torch.float64) * 2.0**-54
    return MCTensor.encode(MCTensor.from_components([values, fine]), components, dtype)


FUNCTIONS = {
    "x ** 2.5": (lambda x: x**2.5, lambda x: x ** mpmath.mpf(2.5)),
    "x ** -3": (lambda x: x**-3, lambda x: x**-3),
    "3 ** x": (lambda x: 3**x, lambda x: mpmath.mpf(3) ** x),
    "log2": (torch.log2, lambda x: mpmath.log(x, 2)),
    "log10": (torch.log10, mpmath.log10),
    "rsqrt": (torch.rsqrt, lambda x: 1 / mpmath.sqrt(x)),
    "reciprocal": (torch.reciprocal, lambda x: 1 / x),
    "softplus": (F.softplus, lambda x: mpmath.log1p(mpmath.exp(x))),
    "silu": (F.silu, lambda x: x / (1 + mpmath.exp(-x))),
    "elu": (lambda x: F.elu(-x), lambda x: mpmath.expm1(-x)),
}


# Compiled for one format, in turn; for the other by the reference, whose bits the kernels have (test_pointwise).
@pytest.mark.sampled(1)
@pytest.mark.parametrize("by", ["auto", "reference"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, kind, by, seed):
    function, reference = FUNCTIONS[name]
    x = _draw((20,), *kind, 0.1, 1.9)
    with strict(), engine(by):
        found = exact(function(x))
    with mpmath.workdps(80):
        for value, result in zip(exact(x), found):
            wanted = reference(_mpf(value))
            assert abs(_mpf(result) - wanted) <= mpmath.mpf(2) ** -FORMATS[kind] * max(abs(wanted), 2**-10)


def test_rounding_to_integers_sees_every_component():
    large = torch.tensor([5.0, 5.0, 5.0, -5.0, 2.5, 3.5, 2.0**60], dtype=torch.float64)
    small = torch.tensor([0.0, -(2.0**-70), 2.0**-70, -(2.0**-70), 0.0, 0.0, 0.5], dtype=torch.float64)
    x = MCTensor.from_components([large, small])
    assert x.floor().tolist() == [5, 4, 5, -6, 2, 3, 2.0**60]
    assert x.ceil().tolist() == [5, 5, 6, -5, 3, 4, 2.0**60 + 1]
    assert x.trunc().tolist() == [5, 4, 5, -5, 2, 3, 2.0**60]
    assert exact(x.frac())[1] == 1 - Fraction(2) ** -70


def test_order_sees_every_component(seed):
    values = torch.randint(0, 3, (4, 40)).double()
    x = MCTensor.from_components([values, torch.randint(-4, 5, (4, 40)).double() * 2.0**-80])
    for row, found in zip(x, x.sort(1).values):
        assert exact(found) == sorted(exact(row))
    for row, largest, at in zip(x, *x.max(1)):
        assert exact(largest) == [max(exact(row))]
        assert exact(row)[int(at)] == max(exact(row))
    for row, values, at in zip(x, *x.topk(3, largest=False)):
        assert exact(values) == sorted(exact(row))[:3]
        assert [exact(row)[int(i)] for i in at] == exact(values)
    assert exact(x.min()) == [min(exact(x))]
    assert bool((x[0] == x[0].clone()).all())
    assert (x[0] < x[1]).tolist() == [a < b for a, b in zip(exact(x[0]), exact(x[1]))]
    assert exact(torch.maximum(x[0], x[1])) == [max(a, b) for a, b in zip(exact(x[0]), exact(x[1]))]
    assert exact(x[0].clamp(0.5, 1.0)) == [min(max(a, Fraction(1, 2)), Fraction(1)) for a in exact(x[0])]


def test_extremes_that_float64_does_not_hold_have_gradients(needs_torch):
    needs_torch("derivative of aminmax")
    parts = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0**-70, 0.0, -(2.0**-70)])
    x = MCTensor.from_components(parts, gradients="components").requires_grad_()
    low, high = torch.aminmax(x, dim=0)
    assert exact(low) + exact(high) == [exact(x)[0], exact(x)[2]]
    (low + 2 * high).backward()
    assert x.grad.tolist() == [1, 0, 2]


@pytest.mark.parametrize("gradients", ["first", "components"])
@pytest.mark.parametrize("bounds", [{"min": 0.5}, {"max": 1.0}, {"min": 0.5, "max": 1.0}], ids=str)
def test_clamped_tensors_keep_their_kind_of_gradients(bounds, gradients, seed):
    x = MCTensor.encode(torch.randn(20), 2, gradients=gradients).requires_grad_()
    y = x.clamp(**bounds)
    assert y._gradients == gradients
    y.sum().backward()
    low, high = bounds.get("min", -torch.inf), bounds.get("max", torch.inf)
    values = x.detach().decode(torch.float64)
    assert torch.equal(
        (x.grad.decode() if gradients == "components" else x.grad) != 0, (values >= low) & (values <= high)
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_sums_at_indices(kind, seed):
    rows, into = _draw((30, 3), *kind), _draw((4, 3), *kind)
    index = torch.randint(0, 4, (30,))
    bound = Fraction(2) ** -FORMATS[kind]
    with strict():
        found = into.index_add(0, index, rows)
        scattered = into.scatter_add(0, index.unsqueeze(1).expand(-1, 3), rows)
        put = into.index_put((index,), rows, accumulate=True)
    wanted = exact(into)
    for i, row in zip(index.tolist(), rows):
        for j, value in enumerate(exact(row)):
            wanted[3 * i + j] += value
    for result in (found, scattered, put):
        assert all(abs(a - b) <= bound * abs(b) for a, b in zip(exact(result), wanted))
    weight = _draw((4, 3), *kind)
    weight = MCTensor.encode(weight, kind[1], kind[0], gradients="components").requires_grad_()
    with strict():
        (F.embedding(index, weight, padding_idx=2) * rows).sum().backward()
    sums = [Fraction(0)] * 12
    for i, row in zip(index.tolist(), rows):
        for j, value in enumerate(exact(row)):
            sums[3 * i + j] += value if i != 2 else 0
    assert all(abs(a - b) <= bound * abs(b) for a, b in zip(exact(weight.grad), sums))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda x, w: F.group_norm(x, 2, w, w), ((2, 4, 5), (4,))),
        (lambda x, w: x.unfold(1, 3, 1) @ w, ((2, 6), (3,))),
    ],
)
@pytest.mark.parametrize("kind", FORMATS)
def test_layers_agree_with_more_components(layer, shape, kind, seed):
    """A layer and its gradients, beside the same with one component more."""
    found, finer = ([], [])
    for out, components in ((found, kind[1]), (finer, kind[1] + 1)):
        torch.manual_seed(seed)
        operands = [_draw(size, kind[0], 2 if kind[0] == torch.float64 else 3) for size in shape]
        operands = [MCTensor.encode(x, components, kind[0], gradients="components").requires_grad_() for x in operands]
        with strict(), engine("auto" if out is found else "reference"):
            result = layer(*operands)
            (result * result).sum().backward()
        out += [result.detach(), *(x.grad for x in operands)]
    for coarse, fine in zip(found, finer):
        bound = 2.0 ** -(FORMATS[kind] - 8) * fine.abs().max().item()
        assert (coarse - fine).abs().max().item() <= bound
