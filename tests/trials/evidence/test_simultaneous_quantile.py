"""The quantile for several recipes: Student's for one, and by simulation for more."""

import numpy as np
import pytest
from scipy import stats

from halfulp.trials.evidence._statistics import simultaneous_quantile


@pytest.mark.parametrize("seeds", [2, 3, 4, 7, 12, 41])
@pytest.mark.parametrize("level", [0.05, 0.001])
def test_students_quantile_for_one_recipe(seeds: int, level: float) -> None:
    assert simultaneous_quantile(seeds, 1, level) == pytest.approx(stats.t.isf(level / 2, seeds - 1), rel=1e-7)


def test_more_recipes_and_smaller_levels_ask_for_more() -> None:
    for seeds in (3, 5, 10, 40):
        limits = [simultaneous_quantile(seeds, recipes) for recipes in (1, 2, 5, 10, 20)]
        assert limits == sorted(limits)
        assert simultaneous_quantile(seeds, 5, 0.01) > simultaneous_quantile(seeds, 5)
        # No more than Bonferroni's correction of each recipe's own deviation.
        assert limits[2] < stats.t.isf(0.05 / 5 / 2, seeds - 1)


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
    limit, found = simultaneous_quantile(seeds, 5), []
    for scatter in SCATTERS:
        width = np.array([*scatter, *(1e-9,) * (5 - len(scatter))])
        squares = width**2 * draws.chisquare(seeds - 1, (40_000, 5)) / (seeds - 1)
        deviation = np.sqrt(np.maximum(squares, squares.mean(1, keepdims=True)))
        alarms = 1 - np.prod(1 - 2 * stats.norm.sf(limit * deviation / width), axis=1)
        found.append(alarms.mean())
    # The mean of 40,000 shares that differ by less than .15 strays by .004 once in a million times.
    assert max(found) < 0.054
    assert max(found) > 0.044
