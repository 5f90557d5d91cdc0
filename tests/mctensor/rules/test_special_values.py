"""Infinities, NaN, signed zeros and empty tensors, as torch has them."""

import math

import pytest
import torch

from halfulp.mctensor import MCTensor

FORMATS = [(torch.float32, 2), (torch.float64, 2), (torch.bfloat16, 3), (torch.float16, 2), (torch.float32, 4)]
VALUES = [0.0, -0.0, 1.0, -2.0, math.inf, -math.inf, math.nan]
BINARY = [torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.atan2]
BINARY += [torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.copysign]
UNARY = [
    torch.sqrt,
    torch.exp,
    torch.log,
    torch.reciprocal,
    torch.rsqrt,
    torch.tanh,
    torch.sigmoid,
    torch.abs,
    torch.sign,
]
UNARY += [torch.floor, torch.ceil, torch.round, torch.trunc, torch.isnan, torch.isinf, torch.isfinite, torch.signbit]
UNARY += [
    torch.relu,
    torch.nan_to_num,
    torch.neg,
    torch.log1p,
    torch.expm1,
    torch.atan,
    torch.sin,
    torch.erf,
    torch.square,
]


def _same(found, wanted, signs=True):
    found = found.decode() if isinstance(found, MCTensor) else found
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    near = torch.isclose(found, wanted, rtol=1e-3, atol=0, equal_nan=True)
    return bool((near & ((found.signbit() == wanted.signbit()) | wanted.isnan() | (not signs))).all())


@pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "components"), FORMATS)
@pytest.mark.parametrize("function", BINARY)
def test_two_operands(function, dtype, components):
    values = torch.tensor(VALUES, dtype=torch.float64)
    a, b = values.repeat_interleave(len(VALUES)), values.repeat(len(VALUES))
    found = function(MCTensor.encode(a, components, dtype), MCTensor.encode(b, components, dtype))
    # Which of 0.0 and -0.0 is larger depends on the position in torch's own vectors.
    assert _same(found, function(a, b), signs=function not in (torch.maximum, torch.minimum, torch.fmax, torch.fmin))


@pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "components"), FORMATS)
@pytest.mark.parametrize("function", UNARY)
def test_one_operand(function, dtype, components):
    if function is torch.nan_to_num:
        values = torch.tensor([0.5, math.nan], dtype=torch.float64)
    else:
        values = torch.tensor(VALUES, dtype=torch.float64)
    assert _same(function(MCTensor.encode(values, components, dtype)), function(values))


@pytest.mark.parametrize(("dtype", "components"), FORMATS)
def test_masked_softmax_and_order(dtype, components):
    values = torch.tensor([[0.5, -math.inf, 1.0], [math.inf, 2.0, math.nan]], dtype=torch.float64)
    x = MCTensor.encode(values, components, dtype)
    assert _same(x[0].softmax(0), values[0].softmax(0))
    assert _same(x.sort(1).values, values.sort(1).values)
    assert _same(x.amax(1), values.amax(1))
    assert torch.equal(x.argmin(1), values.argmin(1))
    assert _same(x.sum(1), values.sum(1))
    assert _same(x.mean(), values.mean())


@pytest.mark.parametrize(("dtype", "components"), FORMATS)
def test_nothing_at_all(dtype, components):
    x = MCTensor.encode(torch.zeros(0, 3, dtype=torch.float64), components, dtype)
    assert (x + 1).shape == (0, 3)
    assert (x @ torch.ones(3, 2, dtype=dtype)).shape == (0, 2)
    assert x.sum().item() == 0
    assert x.sum(0).tolist() == [0.0] * 3
    assert x.prod().item() == 1
    assert (x.T @ x).tolist() == [[0.0] * 3] * 3
    assert torch.cat([x, x]).shape == (0, 3)
    assert x.sort(0).values.shape == (0, 3)
    assert x.exp().softmax(1).shape == (0, 3)
    assert x.cumsum(0).shape == (0, 3)
    with pytest.raises((RuntimeError, IndexError)):
        x.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.float64, torch.float32])
def test_a_conversion_overflows_to_infinity_as_torchs(source, dtype, seed):
    """Attention masks hold the least number of their dtype."""
    least = torch.finfo(torch.float64).min if source == torch.float64 else -math.inf
    x = torch.tensor([least, -least, 0.5, -0.0, math.inf, math.nan, *torch.randn(20)], dtype=source)
    found = MCTensor.encode(x, 2).to(dtype)
    wanted = x.to(dtype).double()
    assert found.dtype == dtype
    assert torch.equal(found.isinf(), wanted.isinf())
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.signbit()[~wanted.isnan()], wanted.signbit()[~wanted.isnan()])
    finite = wanted.isfinite()
    assert bool(((found.decode() - x)[finite].abs() <= 2.0**-15 * x[finite].abs() + 2.0**-30).all())
