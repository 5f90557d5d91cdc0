"""Means, spreads and verdicts of a few seeds, against scipy's t distribution."""

import math
import random
import statistics

import pytest
from scipy import stats

from halfulp.trials._statistics import MARGIN, noise, spread, tolerance, verdict


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
    assert verdict(0.5, None, 1.0) is None


def test_verdicts() -> None:
    assert verdict(0.2, 0.1, 0.2) == "worse"
    assert verdict(-0.2, 0.1, 0.2) == "better"
    assert verdict(0.1, 0.1, 0.2) == verdict(-0.1, 0.1, 0.2) == "no difference"
    assert verdict(0.1, 0.1, 0.19) == verdict(-0.1, 0.1, 0.19) == verdict(0.0, 0.2, 0.19) == "unclear"


def test_tolerance_is_the_larger_of_a_hundredth_and_three_times_the_twins_noise() -> None:
    twins = [0.1, -0.05, 0.02]
    assert tolerance([], 2.0) == tolerance([0.1, 0.1], -2.0) == tolerance([1e-7, 0.0, 0.0], 2.0) == 0.02
    assert tolerance(twins, 2.0) == 3 * noise(twins, twins, 2.0) > 0.3


def judged(gaps: list[float], twins: list[float], reference: float) -> str | None:
    return verdict(statistics.fmean(gaps), noise(gaps, twins, reference), tolerance(twins, reference))


def test_a_wide_interval_is_no_comfort() -> None:
    twins = [0.1, -0.1, 0.0]
    assert judged([1.8, 2.1, 4.0], twins, 0.9) == "unclear"
    assert judged([-0.5, 0.01, 0.52], twins, 0.9) == "unclear"
    assert judged([-0.02, 0.0, 0.02], [0.0, 0.0, 0.0], 1.0) == "unclear"
    assert judged([-0.18, 0.15, -0.1], twins, 0.9) == "no difference"
    assert judged([-0.0003, 0.0012, 0.0008], [0.0, 0.0, 0.0], 1.975) == "no difference"


def test_what_strays_as_the_twin_does_mostly_passes_and_what_strays_tenfold_does_not(seed: int) -> None:
    draws = random.Random(seed)

    def passed(factor: float) -> float:
        runs = ([[draws.gauss(0.0, width) for _ in range(3)] for width in (factor, 1.0)] for _ in range(1000))
        return statistics.fmean(judged(gaps, twins, 0.0) == "no difference" for gaps, twins in runs)

    assert passed(1.0) > 0.8
    assert passed(10.0) < 0.06


def test_a_narrow_interval_leaves_nothing_unclear(seed: int) -> None:
    draws = random.Random(seed)
    for _ in range(200):
        twins = [draws.gauss(0.0, 0.1) for _ in range(draws.choice([0, 3, 5, 10]))]
        found = judged([draws.gauss(0.0, 0.3)] * 3, twins, draws.choice([0.01, 1.0]))
        assert found in ("worse", "better", "no difference")


def test_spread() -> None:
    assert spread([]) is spread([1.0]) is None
    assert spread([1.0, 2.0, 4.0]) == pytest.approx(statistics.stdev([1.0, 2.0, 4.0]))
