"""Thresholds of the findings: records that stand on each, and one element or the last bit beside it."""

import dataclasses
import math

import pytest
import torch

from halfulp.observation._record import AverageRecord, Record, ResidualStreamRecord, RoundingDirectionRecord, StepRecord

from .records import BRAIN, HALF, parameter, realised, severity, tensor, with_scale


def below(x: float) -> float:
    return math.nextafter(x, -math.inf)


def above(x: float) -> float:
    return math.nextafter(x, math.inf)


def average(share: float, seen: int = 4096) -> Record:
    return Record(averages={"ema.weight": AverageRecord("ema.weight", BRAIN, realised(share, seen=seen))})


def residual(share: float, seen: int = 4096) -> Record:
    return Record(residuals={"add": ResidualStreamRecord("add", BRAIN, 8.0, 0.01, realised(share, seen=seen))})


def rounding(**fields: float) -> Record:
    return parameter(rounding=RoundingDirectionRecord(**fields), weight_update="stochastic")


def activation(noise: float) -> Record:
    """A tensor whose rounding errs by a share of its size: 2^-24 / sqrt(12) over its root mean square."""
    return tensor(amax=2.0**-14, rms=2.0**-24 / (math.sqrt(12) * noise), histogram={-15: 4096})


def gradient(histogram: dict[int, int]) -> Record:
    return tensor("weight gradient", amax=2.0**-13, histogram=histogram)


def frozen(**fields) -> Record:
    return parameter(**{"moved": 0.0, "update": realised(0.0), **fields})


CASES = {
    "updates-lost": [
        (parameter(update=realised(0.9)), None),
        (parameter(update=realised(below(0.9), lost=0.25)), "warning"),
        (parameter(update=realised(0.5, lost=0.25)), "warning"),
        (parameter(update=realised(below(0.5), lost=0.25)), "error"),
        (parameter(update=dataclasses.replace(realised(1.0, lost=0.5), cancelled=2047)), None),
        (parameter(update=realised(0.0, seen=32)), "error"),
        (parameter(update=realised(0.0, lost=0.5, known=False)), "warning"),
        (parameter(update=dataclasses.replace(realised(0.0, lost=0.5, known=False), cancelled=2047)), None),
        (parameter(update=realised(0.0, lost=0.0)), None),
    ],
    "weight-decay-lost": [
        (parameter(decay=realised(0.5)), None),
        (parameter(decay=realised(below(0.5))), "warning"),
        (parameter(decay=realised(0.0, seen=32)), "warning"),
    ],
    "weight-frozen": [
        (frozen(update=realised(0.0, seen=8)), "error"),
        (frozen(update=realised(0.1, lost=0.9, seen=1000)), "error"),
        (frozen(update=realised(0.1, lost=0.899, seen=1000)), None),
        (frozen(nonzero_gradients=1), "error"),
    ],
    "random-bits-repeat": [
        (rounding(seen=255, excess=200.0, variance=64.0), None),
        (rounding(seen=256, excess=200.0, variance=64.0), "error"),
        (rounding(seen=1000, excess=60.0, variance=100.0), None),
        (rounding(seen=1000, excess=above(60.0), variance=100.0), "error"),
        (rounding(seen=1000, excess=-above(60.0), variance=100.0), "error"),
        (rounding(seen=1000, excess=10.0, variance=1.0), None),
        (rounding(seen=1000, excess=10.5, variance=1.0), "error"),
        (rounding(seen=2**20, variance=2.0**17, repeated=0.1), None),
        (rounding(seen=2**20, variance=2.0**17, repeated=above(0.1)), "error"),
        # Six coincidences among the 12 decisions of each of 8 steps would be a half, and three deviations are more.
        (rounding(seen=4096, variance=8 * 12.0, repeated=3 / 12**0.5), None),
        (rounding(seen=4096, variance=8 * 12.0, repeated=above(3 / 12**0.5)), "error"),
        (rounding(seen=4096, variance=8 * 6.5, repeated=above(3 / 6.5**0.5)), "error"),
    ],
    "accumulation-swamped": [
        (parameter(accumulation=realised(0.9)), None),
        (parameter(accumulation=realised(below(0.9))), "warning"),
        (parameter(accumulation=realised(0.5)), "warning"),
        (parameter(accumulation=realised(below(0.5))), "error"),
        (parameter(accumulation=realised(0.0, seen=32)), "error"),
    ],
    "average-stuck": [
        (average(0.5), None),
        (average(below(0.5)), "warning"),
        (average(0.1), "warning"),
        (average(below(0.1)), "error"),
        (average(0.0, seen=15), None),
        (average(0.0, seen=16), "error"),
    ],
    "residual-swamped": [
        (residual(0.5), None),
        (residual(below(0.5)), "warning"),
        (residual(0.1), "warning"),
        (residual(below(0.1)), "error"),
        (residual(0.0, seen=255), None),
        (residual(0.0, seen=256), "error"),
    ],
    "second-moment-stuck": [
        (parameter(states={"exp_avg_sq": realised(0.5, seen=32)}), "warning"),
        (parameter(states={"exp_avg_sq": realised(0.5, lost=15 / 32, seen=32)}), None),
    ],
    "activation-underflow": [
        (activation(0.0361), "warning"),
        (activation(0.0359), None),
        (activation(0.501), "error"),
        (activation(0.499), "warning"),
        (tensor(amax=below(2.0**-13), rms=2.0**-24, histogram={-15: 32}), "warning"),
        (tensor(amax=2.0**-13, rms=2.0**-24, histogram={-15: 32}), None),
        (tensor(amax=2.0**-14, rms=2.0**-24, histogram={-15: 31}), None),
    ],
    "gradient-underflow": [
        (gradient({-15: 16, 0: 16}), "warning"),
        (gradient({-15: 16, 0: 15}), None),
        (gradient({-15: 15, 0: 17}), None),
        # Half as many as are next to the smallest number, 2^-24, became zero: a twentieth, and a fifth of all.
        (gradient({-24: 4, 0: 34}), "warning"),
        (gradient({-24: 4, 0: 35}), None),
        (gradient({-24: 8, 0: 8 + 4}), None),
        (gradient({-24: 16, 0: 16}), "error"),
        (gradient({-24: 16, 0: 17}), "warning"),
    ],
    "overflow-near": [
        (tensor(amax=65504.0 / 4), None),
        (tensor(amax=above(65504.0 / 4)), "warning"),
        (tensor("weight", amax=65504.0), "warning"),
        (tensor(amax=65504.0, scale=2.0), None),
        (tensor("weight gradient", amax=65504.0), "warning"),
        (with_scale(tensor("weight gradient", amax=65504.0)), None),
        (tensor(amax=torch.finfo(BRAIN).max, dtype=BRAIN), None),
        (tensor(amax=torch.finfo(BRAIN).max / 2, dtype=BRAIN), "warning"),
    ],
    "block-hidden": [
        (tensor(asked_format="mxfp4", block_hidden=15, histogram={0: 64}), None),
        (tensor(asked_format="mxfp4", block_hidden=16, histogram={0: 64}), "warning"),
        (tensor(asked_format="mxfp4", block_hidden=31, histogram={0: 64}), "warning"),
        (tensor(asked_format="mxfp4", block_hidden=32, histogram={0: 64}), "error"),
        (tensor(asked_format="mxfp4", block_hidden=63, histogram={0: 63}), None),
    ],
    "eps-zero": [
        (parameter(dtype=HALF, options={"eps": 2.0**-25}), "error"),
        (parameter(dtype=HALF, options={"eps": above(2.0**-25)}), "error"),
        (parameter(dtype=HALF, options={"eps": 1.01 * 2.0**-25}), None),
        (parameter(dtype=HALF, options={"eps": 0.0}), None),
    ],
    "first-nonfinite": [
        (with_scale(tensor("weight gradient", first_nonfinite=(1, 0), nonfinite_steps=3, steps=3)), "error"),
        (with_scale(tensor("weight gradient", first_nonfinite=(1, 0), nonfinite_steps=2, steps=3)), None),
        (with_scale(tensor("weight gradient", first_nonfinite=(1, 0), nonfinite_steps=2, steps=2)), None),
    ],
}


@pytest.mark.parametrize(
    ("code", "record", "expected"), [(code, *case) for code, cases in CASES.items() for case in cases]
)
def test_a_threshold(code: str, record: Record, expected: str | None) -> None:
    assert severity(code, record) == expected


@pytest.mark.parametrize(("step", "expected"), [(126, None), (127, None), (128, "error")])
def test_what_is_kept_beside_a_weight_is_overdue_above_the_largest_weights_spacing(step, expected) -> None:
    """128 updates of 2^-14 are the 2^-7 between a bfloat16 1 and the next number."""
    record = parameter("layer", moved=0.0, update=realised(1.0), weight_update="kahan")
    record.tensors |= tensor("weight gradient").tensors
    record.tensors |= tensor("weight", amax=1.0).tensors | tensor("update", amax=2.0**-14).tensors
    record.history = [StepRecord(step, True, 1e-5)]
    assert severity("weight-frozen", record) == expected
