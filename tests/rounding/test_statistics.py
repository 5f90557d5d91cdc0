"""fit against counts made by hand."""

import math

import pytest
import torch

from halfulp import formats
from halfulp.formats import get
from halfulp.rounding import fit, quantize


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3fn", "e2m1fn"])
def test_counts(name, seed):
    format = get(name)
    x = torch.randn(10_000) * torch.exp2(torch.randint(-30, 20, (10_000,)).float())
    x[:100], x[100:110], x[110] = 0, torch.inf, torch.nan
    found = fit(x, format)
    q = quantize(x.double(), format, overflow="saturate")
    finite = x.isfinite()
    over = finite & (x.abs().double() > format.max) & (quantize(x.double(), format, overflow="nan").isnan())
    kept = finite & ~over
    assert found.elements == 10_000
    assert found.amax == float(x[finite].abs().max())
    assert found.zero == int((x == 0).sum()) / 10_000  # randn itself draws a zero once in some millions
    assert found.not_finite == 11 / 10_000
    assert found.overflow == int(over.sum()) / 10_000
    assert found.underflow == int(((q == 0) & (x != 0) & finite).sum()) / 10_000
    small = (q != 0) & (q.abs() < format.smallest_normal) & finite
    assert found.subnormal == int(small.sum()) / 10_000
    error = (q - x.double())[kept].square()
    assert found.mean_squared_error == pytest.approx(float(error.mean()), rel=1e-12)
    ratio = float(x.double()[kept].square().sum() / error.sum())
    assert found.signal_to_noise == pytest.approx(10 * math.log10(ratio), rel=1e-9)


def test_edges():
    assert fit(torch.empty(0), "bf16").elements == 0
    exact = fit(torch.tensor([1.0, 2.0]), "bf16")
    assert exact.signal_to_noise == math.inf
    assert str(exact) == "amax 2, inf dB"
    lost = fit(torch.tensor([1e-30]), "fp16")
    assert lost.underflow == 1
    assert lost.signal_to_noise == 0
    assert fit(torch.tensor([1e9]), "fp16", "toward_zero").overflow == 1
    with pytest.raises(TypeError, match="float32"):
        fit(torch.ones(3, dtype=torch.int32), "bf16")
    x = torch.randn(5, requires_grad=True)
    fit(x, "bf16")


SIGNED = [name for name in formats.names() if isinstance(get(name), formats.Format) and get(name).smallest_subnormal]


@pytest.mark.parametrize("name", [name for name in SIGNED if name not in ("fp64", "fp32", "e8m0")])
def test_the_smallest_normal_is_no_subnormal(name):
    format = get(name)
    if format.smallest_subnormal == format.smallest_normal:
        pytest.skip("the format has no subnormals")
    at, below = format.smallest_normal, format.smallest_subnormal
    assert fit(torch.tensor([at, -at], dtype=torch.float64), format).subnormal == 0
    assert fit(torch.tensor([below, -below, at], dtype=torch.float64), format).subnormal == pytest.approx(2 / 3)


@pytest.mark.parametrize("power", [-1000, -560, -200, 200, 560, 1000])
def test_squares_beyond_float64_leave_the_ratio(power, seed):
    """It said "inf dB", which stands for exact, where both squares overflowed, or became 0."""
    x = torch.rand(100, dtype=torch.float64) + 1
    near, far = fit(x, "e11m3"), fit(x * 2.0**power, "e11m3")
    assert 20 < near.signal_to_noise < 40
    assert far.signal_to_noise == near.signal_to_noise
    if abs(power) <= 200:
        assert far.mean_squared_error == near.mean_squared_error * 4.0**power


def test_subnormals_are_seen_in_a_process_that_flushes():
    x = torch.tensor([1e-40, 1.0])
    plain = fit(x, "bf16")
    torch.set_flush_denormal(True)
    try:
        assert fit(x, "bf16") == plain
    finally:
        torch.set_flush_denormal(False)
    assert plain.subnormal == 0.5
