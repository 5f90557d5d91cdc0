"""Means, spreads and verdicts of a few seeds, against scipy's t distribution."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
import scipy  # whose stats is imported where it is used first: seconds, in each process that collects tests

from halfulp.trials.evidence._row import (
    LEAST_NOTABLE_RELATIVE_GAP,
    bound_mean_gap_error,
    choose_verdict,
    compute_gap_tolerance,
    compute_noise_threshold,
    find_gap_quantile,
    get_false_alarm_rate,
    pool_standard_deviations,
)


@pytest.mark.parametrize("count", [3, 4, 7, 11, 12, 20, 40])
def test_noise_is_students_interval(count: int, seed: int) -> None:
    gaps = [math.sin(seed + 7 * index) for index in range(count)]
    low, high = scipy.stats.t.interval(0.95, count - 1, statistics.fmean(gaps), scipy.stats.sem(gaps))
    assert compute_noise_threshold(gaps, [], 0.0) == pytest.approx((high - low) / 2, rel=1e-3)


def test_noise_is_at_least_what_the_twin_scatters_and_the_margin() -> None:
    width = scipy.stats.t.ppf(0.975, 2) * math.sqrt((0.02**2 + 0.03**2) / 2) / math.sqrt(3)
    assert compute_noise_threshold([0.1, 0.1, 0.1], [0.02, -0.03], 2.0) == pytest.approx(width, rel=1e-3)
    assert compute_noise_threshold([0.1, 0.1, 0.1], [], 2.0) == 2.0 * LEAST_NOTABLE_RELATIVE_GAP


def test_several_recipes_scatter_at_least_as_all_do() -> None:
    close, wide = [0.30, 0.31, 0.32], [0.1, 0.4, 0.7]
    compared = [close, wide]
    assert (
        compute_noise_threshold(close, [], 0.0, [close])
        == compute_noise_threshold(close, [], 0.0)
        == bound_mean_gap_error(close, [], 0.0)
    )
    assert pool_standard_deviations(compared) == pytest.approx(math.sqrt((0.01**2 + 0.3**2) / 2))
    assert pool_standard_deviations([[0.0, 2.0], [0.0] * 5]) == pytest.approx(math.sqrt(2 / 5))
    limit = scipy.stats.t.isf(0.037 / 2, 2)  # two recipes of three seeds need no more than one does
    assert compute_noise_threshold(wide, [], 0.0, compared) == pytest.approx(limit * 0.3 / math.sqrt(3))
    # The wide one does not hide what is certain of the close one by Bonferroni's correction.
    bonferroni = scipy.stats.t.isf(0.005 / 2 / 2, 2) * 0.01 / math.sqrt(3)
    assert bonferroni < limit * pool_standard_deviations(compared) / math.sqrt(3)
    assert compute_noise_threshold(close, [], 0.0, compared) == pytest.approx(bonferroni)
    assert compute_noise_threshold(close, [], 0.0, [close, [0.1, 0.12, 0.14]]) == pytest.approx(
        limit * math.sqrt((0.01**2 + 0.02**2) / 2) / math.sqrt(3)
    )
    assert compute_noise_threshold([0.3, 0.3, 0.3], [], 1.0, [[0.3, 0.3, 0.3], wide]) == LEAST_NOTABLE_RELATIVE_GAP
    assert compute_noise_threshold(close, [], 0.0, [close, [9.0, -9.0], []]) == bound_mean_gap_error(close, [], 0.0)


def test_no_difference_is_said_of_one_recipe_alone() -> None:
    assert choose_verdict(0.01, 0.5, 0.03, interval=0.02) == "no difference"
    assert choose_verdict(0.02, 0.5, 0.03, interval=0.001) == "no difference"
    assert choose_verdict(0.02, 0.5, 0.03, interval=0.02) == "unclear"
    assert choose_verdict(0.6, 0.5, 0.03, interval=0.02) == "worse"


@pytest.mark.parametrize(
    "widths", [(0.01,) * 5, (0.02, 0.004, 0.004, 0.004, 0.004), (0.02, 0.013, 0.009, 0.006, 0.004)]
)
def test_chance_calls_any_of_five_recipes_worse_or_better_in_a_twentieth_of_comparisons(widths, seed: int) -> None:
    draws = random.Random(seed)
    alone = together = 0
    for _ in range(1000):
        compared = [[draws.gauss(0.0, width) for _ in range(3)] for width in widths]
        means = [abs(statistics.fmean(gaps)) for gaps in compared]
        alone += any(mean > bound_mean_gap_error(gaps, [0.0] * 3, 1.0) for mean, gaps in zip(means, compared))
        together += any(
            mean > compute_noise_threshold(gaps, [0.0] * 3, 1.0, compared) for mean, gaps in zip(means, compared)
        )
    # A share of 1,000 draws exceeds 5% by .033 once in a million times.
    assert together < 83
    assert alone > 110


def limits_of(gaps: np.ndarray) -> np.ndarray:
    """`compute_noise_threshold` for gaps of shape (comparisons, recipes, seeds) without a twin or a loss, by scipy."""
    recipes, seeds = gaps.shape[1:]
    own = gaps.std(2, ddof=1)
    # The quantile comes from one call of noise, for gaps that all have a deviation of 1.
    unit = [float(x) for x in (np.arange(seeds) - (seeds - 1) / 2) / np.arange(seeds).std(ddof=1)]
    quantile = compute_noise_threshold(unit, [], 0.0, [unit] * recipes)
    pooled = quantile * np.maximum(own, np.sqrt((own**2).mean(1, keepdims=True)))
    bonferroni = scipy.stats.t.isf(0.005 / recipes / 2, seeds - 1) * own / math.sqrt(seeds)
    return np.maximum(np.minimum(pooled, bonferroni), scipy.stats.t.isf(0.025, seeds - 1) * own / math.sqrt(seeds))


# Of so many recipes so many scatter, the others not at all: the worst of all correlations, found by search.
@pytest.mark.parametrize(
    ("seeds", "recipes", "scattering", "correlations"),
    [(3, 5, 2, (0.9, 0.95, 0.99)), (3, 5, 3, (0.9, 0.98)), (4, 5, 2, (0.9,)), (5, 5, 3, (0.9,)), (3, 10, 3, (0.95,))],
)
def test_gaps_that_move_together_alarm_no_more_often(
    seeds: int, recipes: int, scattering: int, correlations: tuple[float, ...], seed: int
) -> None:
    draws = np.random.default_rng(seed)
    found = []
    for correlation in correlations:
        gaps = np.zeros((200_000, recipes, seeds))
        together, apart = (
            draws.standard_normal((len(gaps), 1, seeds)),
            draws.standard_normal((*gaps.shape[:1], scattering, seeds)),
        )
        gaps[:, :scattering] = math.sqrt(correlation) * together + math.sqrt(1 - correlation) * apart
        means, limits = np.abs(gaps.mean(2)), limits_of(gaps)
        found.append((means > limits).any(1).mean())
        for one, mine in zip(gaps[:20].tolist(), limits[:20]):
            assert [compute_noise_threshold(each, [], 0.0, one) for each in one] == pytest.approx(
                mine.tolist(), rel=1e-6
            )
    # A share of 200,000 draws strays by .0025 once in a million times.
    assert max(found) < 0.0525
    assert max(found) > 0.035


def test_the_level_falls_with_more_than_five_recipes() -> None:
    levels = [get_false_alarm_rate(recipes) for recipes in (2, 5, 6, 10, 20, 40)]
    assert levels[0] == levels[1] == 0.037
    assert levels[1:] == sorted(levels[1:], reverse=True)
    assert levels[-1] == pytest.approx(0.037 / 2)
    compared = [[-1.0, 0.0, 1.0]] * 40
    assert compute_noise_threshold(compared[0], [], 0.0, compared) > compute_noise_threshold(
        compared[0], [], 0.0, compared[:20]
    )


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_seeds_for_a_verdict(count: int) -> None:
    assert compute_noise_threshold([0.5] * count, [0.0], 1.0) is None
    assert choose_verdict(0.5, None, 1.0) is None


def test_verdicts() -> None:
    assert choose_verdict(0.2, 0.1, 0.2) == "worse"
    assert choose_verdict(-0.2, 0.1, 0.2) == "better"
    assert choose_verdict(0.1, 0.1, 0.2) == choose_verdict(-0.1, 0.1, 0.2) == "no difference"
    assert (
        choose_verdict(0.1, 0.1, 0.19) == choose_verdict(-0.1, 0.1, 0.19) == choose_verdict(0.0, 0.2, 0.19) == "unclear"
    )


def test_tolerance_is_the_larger_of_a_hundredth_and_three_times_the_twins_scatter() -> None:
    twins = [0.1, -0.05, 0.02]
    assert (
        compute_gap_tolerance([], 2.0)
        == compute_gap_tolerance([1e-3, 1e-3], -2.0)
        == compute_gap_tolerance([1e-7, 0.0, 0.0], 2.0)
        == 0.02
    )
    assert compute_gap_tolerance(twins, 2.0) == pytest.approx(3 * math.sqrt((0.1**2 + 0.05**2 + 0.02**2) / 3))


def judged(gaps: list[float], twins: list[float], reference: float) -> str | None:
    return choose_verdict(
        statistics.fmean(gaps), compute_noise_threshold(gaps, twins, reference), compute_gap_tolerance(twins, reference)
    )


def test_a_wide_interval_is_no_comfort() -> None:
    twins = [0.1, -0.1, 0.0]
    assert judged([1.8, 2.1, 4.0], twins, 0.9) == "unclear"
    assert judged([-0.5, 0.01, 0.52], twins, 0.9) == "unclear"
    assert judged([-0.02, 0.0, 0.02], [0.0, 0.0, 0.0], 1.0) == "unclear"
    assert judged([-0.05, 0.05, -0.02], twins, 0.9) == "no difference"
    assert judged([-0.0003, 0.0012, 0.0008], [0.0, 0.0, 0.0], 1.975) == "no difference"


def shares(gap: float, noise: float, seeds: int, draws: random.Random, twin: float = 1.0) -> dict[str | None, float]:
    """How often verdicts are given if gaps scatter by `compute_noise_threshold`, the twin's by ``twin`` times that."""
    found: list[str | None] = []
    for _ in range(1000):
        reference = [draws.gauss(0.0, noise / math.sqrt(2)) for _ in range(seeds)]
        twins = [draws.gauss(0.0, twin * noise / math.sqrt(2)) - twin * start for start in reference]
        found.append(judged([gap + draws.gauss(0.0, noise / math.sqrt(2)) - start for start in reference], twins, 1.0))
    return {said: found.count(said) / len(found) for said in {*found, "worse", "better", "no difference", "unclear"}}


SEEDS = (3, 5, 10, 20, 40)


@pytest.mark.parametrize("gap", [0.02, 0.05])
def test_power_does_not_fall_with_seeds(gap: float, seed: int) -> None:
    said = [shares(gap, 0.02, seeds, random.Random(seed)) for seeds in SEEDS]
    powers = [share["worse"] for share in said]
    # Two shares of 1,000 draws differ by .09 once in a hundred thousand times.
    assert all(later > earlier - 0.09 for earlier, later in itertools.pairwise(powers))
    assert powers[-1] > 0.98
    assert max(share["better"] for share in said) < 0.01
    if gap == 0.05:
        assert max(share["no difference"] for share in said) < 0.06


@pytest.mark.parametrize("twin", [0.1, 1.0])
def test_false_alarms_stay_within_the_interval(twin: float, seed: int) -> None:
    for seeds in SEEDS:
        said = shares(0.0, 0.02, seeds, random.Random(seed), twin)
        # Student's t gives 5%; a share of 1,000 draws exceeds it by .033 once in a million times.
        assert said["worse"] + said["better"] < 0.083


def test_what_strays_as_the_twin_does_mostly_passes_and_what_strays_tenfold_does_not(seed: int) -> None:
    draws = random.Random(seed)
    passed = [shares(0.0, 0.02, seeds, draws)["no difference"] for seeds in SEEDS]
    assert passed[0] > 0.42
    assert min(passed[1:]) > 0.85
    assert shares(0.0, 0.2, 3, draws, 0.1)["no difference"] < 0.06


def test_a_narrow_interval_leaves_nothing_unclear(seed: int) -> None:
    draws = random.Random(seed)
    for _ in range(200):
        twins = [draws.gauss(0.0, 0.1) for _ in range(draws.choice([0, 3, 5, 10]))]
        found = judged([draws.gauss(0.0, 0.3)] * 30, twins, draws.choice([0.01, 1.0]))
        assert found in ("worse", "better", "no difference")


@pytest.mark.parametrize("seeds", [2, 3, 4, 7, 12, 41])
@pytest.mark.parametrize("level", [0.05, 0.001])
def test_students_quantile_for_one_recipe(seeds: int, level: float) -> None:
    assert find_gap_quantile(seeds, 1, level) == pytest.approx(scipy.stats.t.isf(level / 2, seeds - 1), rel=1e-7)


def test_more_recipes_and_smaller_levels_ask_for_more() -> None:
    for seeds in (3, 5, 10, 40):
        limits = [find_gap_quantile(seeds, recipes) for recipes in (1, 2, 5, 10, 20)]
        assert limits == sorted(limits)
        assert find_gap_quantile(seeds, 5, 0.01) > find_gap_quantile(seeds, 5)
        # No more than Bonferroni's correction of each recipe's own deviation.
        assert limits[2] < scipy.stats.t.isf(0.05 / 5 / 2, seeds - 1)


# Deviations of the recipes; the last ones scatter by nothing.
SCATTERS = [
    (1,),
    (1, 1),
    (1, 1, 1),
    (1, 1, 1, 1, 1),
    (1, 0.2, 0.2, 0.2, 0.2),
    (1, 0.7, 0.5, 0.3, 0.2),
    (1, 1, 0.2, 0.2, 0.2),
]


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_chance_exceeds_it_as_often_as_the_level_says(seeds: int, seed: int) -> None:
    """For means and deviations drawn apart; the chance of each mean is known, so that only deviations are drawn."""
    draws = np.random.default_rng(seed)
    limit, found = find_gap_quantile(seeds, 5), []
    for scatter in SCATTERS:
        width = np.array([*scatter, *(1e-9,) * (5 - len(scatter))])
        squares = width**2 * draws.chisquare(seeds - 1, (40_000, 5)) / (seeds - 1)
        deviation = np.sqrt(np.maximum(squares, squares.mean(1, keepdims=True)))
        alarms = 1 - np.prod(1 - 2 * scipy.stats.norm.sf(limit * deviation / width), axis=1)
        found.append(alarms.mean())
    # The mean of 40,000 shares that differ by less than .15 strays by .004 once in a million times.
    assert max(found) < 0.054
    assert max(found) > 0.044
