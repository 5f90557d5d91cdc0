"""Means, spreads and verdicts of a few seeds, against scipy's t distribution."""

import math
import statistics

import pytest
from scipy import stats

from halfulp.trials._statistics import MARGIN, noise, spread, verdict


@pytest.mark.parametrize("count", [3, 4, 7, 11])
def test_noise_is_students_interval(count: int, seed: int) -> None:
    gaps = [math.sin(seed + 7 * index) for index in range(count)]
    low, high = stats.t.interval(0.95, count - 1, statistics.fmean(gaps), stats.sem(gaps))
    assert noise(gaps, [], 0.0) == pytest.approx((high - low) / 2, rel=1e-3)


def test_noise_is_at_least_the_twin_and_the_margin() -> None:
    assert noise([0.1, 0.1, 0.1], [0.02, -0.03], 2.0) == 0.03
    assert noise([0.1, 0.1, 0.1], [], 2.0) == 2.0 * MARGIN


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_seeds_for_a_verdict(count: int) -> None:
    assert noise([0.5] * count, [0.0], 1.0) is None
    assert verdict(0.5, None) is None


def test_verdicts() -> None:
    assert verdict(0.2, 0.1) == "worse"
    assert verdict(-0.2, 0.1) == "better"
    assert verdict(0.1, 0.1) == verdict(-0.1, 0.1) == "no difference"


def test_spread() -> None:
    assert spread([]) is spread([1.0]) is None
    assert spread([1.0, 2.0, 4.0]) == pytest.approx(statistics.stdev([1.0, 2.0, 4.0]))
