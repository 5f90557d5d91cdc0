"""Promotion: the larger dtype, the larger count, nothing dropped."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from halfulp.formats import get, round_exact
from halfulp.kernels import engine
from halfulp.mctensor import MCTensor
from halfulp.mctensor._result_type import ResultType

from .exact_values import exact

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def _mc(dtype, components, shape=(2,)):
    return MCTensor.encode(torch.full(shape, 0.7, dtype=torch.float64), components, dtype)


@pytest.mark.parametrize(
    ("other", "dtype", "components"),
    [
        # Made in the test: a kernel is for encoding, and none is compiled where tests are collected.
        ((SINGLE, 3), SINGLE, 3),
        ((DOUBLE, 1), DOUBLE, 2),
        ((BRAIN, 4), SINGLE, 4),
        ((HALF, 2), SINGLE, 2),
        (torch.ones(2), SINGLE, 2),
        (torch.ones(2, dtype=DOUBLE), DOUBLE, 2),
        (torch.tensor(1.0, dtype=DOUBLE), SINGLE, 2),
        (torch.ones(2, dtype=torch.int64), SINGLE, 2),
        (torch.tensor([True, False]), SINGLE, 2),
        (1, SINGLE, 2),
        (0.1, SINGLE, 2),
        (np.float64(0.1), SINGLE, 2),
    ],
)
def test_float32_x2_with_another_operand(other, dtype, components):
    x, other = _mc(SINGLE, 2), _mc(*other) if isinstance(other, tuple) else other
    for result in (
        x + other,
        other + x,
        x * other,
        torch.sub(other, x) if isinstance(other, torch.Tensor) else other - x,
    ):
        assert isinstance(result, MCTensor)
        assert (result.dtype, len(result.components)) == (dtype, components)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE])
@pytest.mark.parametrize("components", [1, 2, 3, 4])
def test_steps_inside_an_operator_leave_its_number_of_components(dtype, components):
    """What form a result has does not depend on the engine; the reference need not compile a kernel for each."""
    x, plain = _mc(dtype, components), torch.full((2,), 1.5, dtype=dtype)
    gaps = MCTensor.from_components([plain, *[plain * torch.finfo(dtype).smallest_normal] * (components - 1)])
    for a in (x, gaps):
        for function in (torch.remainder, torch.fmod, torch.floor_divide, torch.copysign, torch.hypot, torch.atan2):
            with engine("reference"):
                results = function(a, a), function(a, plain), function(plain, a)
            assert [(result.dtype, len(result.components)) for result in results] == [(dtype, components)] * 3


def test_half_and_brain_meet_in_float32():
    result = _mc(HALF, 2) + _mc(BRAIN, 3)
    assert (result.dtype, len(result.components), result.scale) == (SINGLE, 3, None)


def test_a_number_enters_with_all_its_digits():
    for value in (0.1, 1e-17, 2**53 + 1, -1e20):
        zero = MCTensor.encode([0.0], 4, DOUBLE)
        assert exact(zero + value) == [Fraction(value)]
        assert exact(zero - value) == [-Fraction(value)]
    x = MCTensor.encode([0.1], 2, SINGLE)
    assert abs(exact(x - 0.1)[0]) <= Fraction(2) ** -51


def test_integers_of_64_bits_enter_whole():
    large = torch.tensor([2**62 + 1, -(2**62) - 1, -(2**63)])
    assert exact(MCTensor.encode([0.0], 2, DOUBLE) + large) == [2**62 + 1, -(2**62) - 1, -(2**63)]


def test_float16_results_carry_a_scale():
    x = MCTensor.encode([1e-9, 2e-9], 2, HALF)
    for result in (x * x, x + x, x.exp(), torch.cat([x, x]), x.sum(), x.clone(), x * 2.0, torch.where(x > 0, x, 0.0)):
        assert result.dtype == HALF
        assert result.scale is not None
    assert torch.allclose((x * x).decode(), x.decode() ** 2, rtol=2.0**-20, atol=0)


def test_gradients_components_wins():
    a, b = _mc(SINGLE, 2), MCTensor.encode(torch.ones(2), gradients="components")
    assert (a + b).gradients == "components"
    assert (a + a).gradients == "first"
    assert a.with_gradients("components").gradients == "components"


@pytest.mark.parametrize("other", [torch.ones(2, dtype=torch.complex64), 1j])
def test_complex_is_refused(other):
    with pytest.raises(ValueError, match="complex"):
        _mc(SINGLE, 2) * other


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE])
def test_to_changes_the_components_and_keeps_their_number(dtype):
    x = _mc(DOUBLE, 3)
    y = x.to(dtype)
    assert (y.dtype, len(y.components)) == (dtype, 3)
    assert abs(float(y.decode()[0]) - 0.7) < 2.0**-22
    assert x.double() is x
    assert torch.equal(MCTensor.encode(["2.9", "-2.9"]).long(), torch.tensor([2, -2]))
    one_below = MCTensor.from_components([torch.ones(1).double(), torch.full((1,), -(2.0**-80)).double()])
    assert one_below.long().item() == 0
    assert x.bool().all()


def test_a_reduction_into_another_kind_of_number_is_refused():
    x = _mc(SINGLE, 2)
    assert torch.sum(x, dtype=DOUBLE).dtype == DOUBLE
    for function in (torch.sum, torch.mean, torch.prod, torch.nansum):
        for dtype in (torch.int64, torch.complex64):
            with pytest.raises(TypeError, match="decode"):
                function(x, dtype=dtype)


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("name", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE], ids=str)
def test_every_way_to_a_narrow_float_rounds_once(dtype, name, seed):
    """Ties, and what lies so near to one that float32, or the first component, would make it one."""
    ties = 1 + torch.randint(-31, 32, (200,)) / 16 + torch.randint(-8, 8, (200,)) / 512
    values = ties.double() * 2.0 ** torch.randint(-6, 5, (200,)) * (1 + torch.randint(-1, 2, (200,)) * 2.0**-30)
    x = MCTensor.encode(values, 4, dtype)
    for target in (*NARROW, HALF, BRAIN):
        with engine(name):
            ways = [x.decode(target), torch.zeros(200, dtype=target).copy_(x)]
            ways += [x.to(target)] if target in NARROW else []
        wanted = [round_exact(value, get(target)) for value in exact(x)]
        for found in ways:
            assert found.dtype == target
            assert found.double().tolist() == wanted


@pytest.mark.parametrize("target", [torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint32, torch.uint64])
def test_every_way_to_an_integer_truncates_the_sum(target):
    top = 2 ** (8 * target.itemsize - target.is_signed)
    near = [0, 1, 2, 100, top // 2 - 1, top // 2, top // 2 + 1, top - 3, top - 1]
    wanted = [*near, *([-value for value in near] if target.is_signed else [])]
    x = MCTensor.encode([Fraction(4 * value + (value > 0) - (value < 0), 4) for value in wanted], 3, DOUBLE)
    for found in (x.to(target), torch.zeros(len(wanted), dtype=target).copy_(x)):
        assert found.tolist() == wanted


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1), (torch.float32, 2), (torch.float16, 4), (torch.bfloat16, 4)], ids=str
)
def test_a_float64_holds_as_many_components_as_fit_into_53_bits(dtype, most):
    for components in range(1, 5):
        form = ResultType(dtype, components, "first", False, torch.device("cpu"))
        assert form.fits_float64 is (components <= most)
