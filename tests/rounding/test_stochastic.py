"""Stochastic rounding: unbiased, independent, replayed. All bounds together: a false alarm of one in a million."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from halfulp.formats import get
from halfulp.kernels import engine, same_bits
from halfulp.rounding import Stochastic, quantize

ALARM = 1e-8
# A format, the dtype that holds it, and the lower of two neighbours: normal, subnormal and zero, on every path.
PLACES = [
    ("bf16", torch.float32, 1.5),
    ("bf16", torch.float32, 3 * 2.0**-133),
    ("bf16", torch.float32, 0.0),
    ("bf16", torch.float64, 0.0),
    ("fp16", torch.float32, 1.25),
    ("fp16", torch.float32, 5 * 2.0**-24),
    ("fp16", torch.float32, 0.0),
    ("e5m2", torch.float32, 1.25),
    ("e5m2", torch.float32, 2.0**-16),
    ("e5m2", torch.float32, 0.0),
    ("e5m2", torch.float16, 0.0),
    ("e4m3fn", torch.bfloat16, 0.0),
    ("e4m3fnuz", torch.float64, 2.0**-10),
    ("e2m1fn", torch.float32, 2.0),
]


def spacing(format, low: float) -> float:
    if low < format.smallest_normal:
        return format.smallest_subnormal
    return 2.0 ** (math.frexp(low)[1] - 1 - format.mantissa_bits)


@pytest.mark.parametrize(("name", "dtype", "low"), PLACES)
@pytest.mark.parametrize("sign", [1, -1])
def test_chi_square_over_fraction_bins(name, dtype, low, sign, tail, seed):
    format = get(name)
    step = spacing(format, low)
    count, bins = 2**14, 32
    fractions = (torch.arange(bins, dtype=torch.float64) + 0.5) / bins
    x = (low + fractions * step)[:, None].expand(bins, count).to(dtype)
    fractions = (x.double()[:, 0] - low) / step
    keep = (fractions > 0) & (fractions < 1)
    q = quantize(x * sign, format, Stochastic()).double() * sign
    assert bool(((q == low) | (q == low + step)).all())
    went_up = (q > low).double().sum(1)
    z2 = (went_up - count * fractions).square() / (count * fractions * (1 - fractions))
    assert tail(float(z2[keep].sum()), int(keep.sum())) > ALARM


@pytest.mark.parametrize(("name", "low"), [("bf16", 1.5), ("fp16", 0.0), ("e5m2", 2.0**-16)])
@pytest.mark.parametrize("vary", ["counter", "seed"])
def test_dispersion_over_consecutive_calls(name, low, vary, tail, seed):
    """Per element, the number of times it went up in consecutive calls is binomial: no streams that repeat."""
    format, calls, elements, fraction = get(name), 128, 4096, 0.25
    x = torch.full((elements,), low + fraction * spacing(format, low))
    went_up = torch.zeros(elements)
    for k in range(calls):
        rounding = Stochastic(seed if vary == "counter" else seed + k)
        went_up += quantize(x, format, rounding, counter=k if vary == "counter" else 0) > low
    statistic = (went_up - calls * fraction).square().sum() / (calls * fraction * (1 - fraction))
    assert tail(float(statistic), elements) > ALARM


def test_neighbours_are_uncorrelated(seed):
    x = torch.full((2**20,), 1.0 + 2.0**-8)
    up = (quantize(x, "bf16", Stochastic(seed)) > 1).double() - 0.5
    for lag in (1, 2, 16, 32, 1024, 16_384):
        correlation = float((up[lag:] * up[:-lag]).mean() * 4) * math.sqrt(2**20 - lag)
        assert abs(correlation) < 5.6


@pytest.mark.parametrize("fraction", [2.0**-22, 2.0**-12, 1 - 2.0**-20])
def test_small_probabilities_are_exact(fraction, seed):
    """Below the smallest subnormal, a probability of 2^-22 is one of 2^-22."""
    count = 2**24
    x, ups = torch.full((count,), get("e5m2").smallest_subnormal).mul_(fraction), 0
    for k in range(4):
        ups += int(quantize(x, "e5m2", Stochastic(seed), counter=k).count_nonzero())
    mean = 4 * count * fraction
    deviation = math.sqrt(mean * (1 - fraction))
    assert abs(ups - mean) < 5 * deviation + 8


def test_specials_are_intact():
    words = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    x = words.view(torch.float32).repeat(1000)
    for name in ("bf16", "tf32", "fp16", "e5m2", "e4m3fn", "e8m3"):
        q = quantize(x, name, Stochastic(), overflow="nan" if name == "e4m3fn" else None).view(-1, 6)
        assert bool(q[:, :4].isnan().all())
        if name != "e4m3fn":
            assert bool((q[:, 4] == math.inf).all())
            assert bool((q[:, 5] == -math.inf).all())


def test_two_calls_differ_and_a_recompute_does_not(seed):
    x = torch.randn(4096)
    first = quantize(x, "bf16", Stochastic())
    assert not torch.equal(first, quantize(x, "bf16", Stochastic()))
    torch.manual_seed(seed)
    first = quantize(x, "bf16", "stochastic")
    torch.manual_seed(seed)
    with engine("reference"):
        assert same_bits(quantize(x, "bf16", "stochastic"), first)
    fixed = quantize(x, "bf16", Stochastic(1), counter=3)
    assert same_bits(quantize(x, "bf16", Stochastic(1), counter=3), fixed)
    assert not torch.equal(quantize(x, "bf16", Stochastic(1), counter=4), fixed)
    assert not torch.equal(quantize(x, "bf16", Stochastic(2), counter=3), fixed)


def test_checkpoint_replays():
    """The second forward pass of activation checkpointing sees the same rounded values as the first."""
    seen = []

    def layer(x):
        seen.append(quantize(x, "bf16", Stochastic()))
        return (x * seen[-1]).sum()

    x = torch.randn(1000, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).backward()
    assert len(seen) == 2
    assert same_bits(seen[0], seen[1])


def test_large_seeds_and_counters():
    x = torch.randn(100)
    results = [quantize(x, "bf16", Stochastic(s), counter=c) for s in (0, 2**63, 2**64 - 1) for c in (0, 2**40, -1)]
    for i, a in enumerate(results):
        assert not any(torch.equal(a, b) for b in results[:i])
