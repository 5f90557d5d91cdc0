"""Statistics of a few seeds: spread, confidence intervals, and the verdict on a difference."""

import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)

Array = NDArray[np.float64]


@functools.lru_cache(maxsize=256)
def simultaneous_quantile(seeds: int, recipes: int, level: float = 0.05) -> float:
    """Return the quantile, in standard errors, for the largest of several recipes' mean gaps.

    It is k, which the largest exceeds by chance as often as the level says. For one recipe it is Student's two-sided
    quantile. Several recipes' deviations may differ by any factor: each mean gap is measured in units of the larger of
    two deviations, its own and the pooled one, which is the root mean square over the recipes. Only recipes whose gaps
    scatter can be called worse or better by chance. Where a single one does, its own deviation counts and Student's t
    holds; where all scatter alike, the pooled deviation keeps small ones from happening. The worst is in between: j
    recipes scatter alike and the others not at all. With the squares of their deviations T B and T (1 - B), where T and
    B are independent (chi square and beta), the chance of an alarm is

        j E[ P(|t| > k sqrt(j max(B, 1/m))) ],   t Student's of j (n - 1) degrees of freedom,

    at most, for m recipes of n seeds, and k is the least number for which that is the level or less for every j.

    All this is of gaps that are drawn apart. Where they are correlated, Bonferroni's sum over means still holds, but
    several small deviations come together. What that adds is left to the level.

    >>> [round(simultaneous_quantile(seeds, recipes), 3) for seeds, recipes in ((3, 1), (3, 5), (5, 1), (5, 5))]
    [4.303, 4.303, 2.776, 3.152]
    """
    found = 1.0
    for scattering in range(1, recipes + 1):
        if _bound_alarms(found, seeds, recipes, scattering) > level:
            found = _find_quantile(found, seeds, recipes, scattering, level)
    return found


def _find_quantile(low: float, seeds: int, recipes: int, scattering: int, level: float) -> float:
    """Return the number at which the chance of an alarm is the level, by bisection."""
    high = 2 * low
    while _bound_alarms(high, seeds, recipes, scattering) > level:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _bound_alarms(middle, seeds, recipes, scattering) > level else (low, middle)
    return high


def _bound_alarms(k: float, seeds: int, recipes: int, scattering: int) -> float:
    """Bound the chance that any of ``scattering`` recipes exceeds k standard errors (Bonferroni)."""
    degrees = seeds - 1
    if scattering == 1:
        return float(_compute_tail(np.array([k]), degrees)[0])
    shares, weights = _weigh_shares(degrees, recipes, scattering)
    beyond = _compute_tail(k * np.sqrt(scattering * np.maximum(shares, 1 / recipes)), scattering * degrees)
    return scattering * float(weights @ beyond)


@functools.lru_cache(maxsize=256)
def _weigh_shares(degrees: int, recipes: int, scattering: int) -> tuple[Array, Array]:
    """Return the nodes and weights to integrate over B: Gauss-Legendre in the angle with sine^2 = B, split at 1/m."""
    kink = math.asin(math.sqrt(1 / recipes))
    angles, weights = [], []
    for low, high in ((0.0, kink), (kink, math.pi / 2)):
        angles.append(low + (high - low) * (_NODES + 1) / 2)
        weights.append((high - low) / 2 * _WEIGHTS)
    angle, weight = np.concatenate(angles), np.concatenate(weights)
    weight = weight * np.sin(angle) ** (degrees - 1) * np.cos(angle) ** ((scattering - 1) * degrees - 1)
    return np.sin(angle) ** 2, weight / weight.sum()


def _compute_tail(t: Array, degrees: int) -> Array:
    """Return the tail P(|t'| > t) of Student's distribution, a finite sum (Abramowitz, 26.7.3 and 26.7.4)."""
    angle = np.arctan(t / math.sqrt(degrees))
    square = np.cos(angle) ** 2
    odd = degrees % 2
    term = np.cos(angle) if odd else np.ones_like(angle)
    total = term if degrees > 1 else np.zeros_like(angle)
    for power in range(2 + odd, degrees - 1, 2):
        term = term * square * (power - 1) / power
        total = total + term
    inside = np.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


MARGIN = 1e-3

# Where the twin stays with float32 to the last digits, it is enough to know the loss to a hundredth.
_CLOSE = 10 * MARGIN

# A gap of up to three times what the start alone changes is still called no difference.
_TWINS = 3

# How often chance may call one of several recipes worse or better by each of two limits, of which the lower counts.
_POOLED, _BONFERRONI = 0.037, 0.005
# Up to so many recipes the first share holds; it falls with the cube root of more.
_FEW = 5


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds, n - 1 in the denominator; None for a single one.

    >>> spread([1.0, 3.0]), spread([1.0])
    (1.4142135623730951, None)
    """
    return statistics.stdev(values) if len(values) > 1 else None


def interval(gaps: Sequence[float], twin_gaps: Sequence[float], reference: float) -> float | None:
    """Return how far a recipe's true gap may be from its mean gap: the largest of three bounds.

    - half the 95% confidence interval of the mean of the gaps, paired by seed (Student's t);
    - the same for a mean of as many gaps that scatter about 0 as those between float32 and its twin do, whose start
      differs by 1e-7; it keeps three gaps that happen to lie close together from looking certain;
    - a thousandth of float32's loss: less than that matters to nobody.

    The first two fall with the square root of the seeds, so that more seeds tell smaller differences.
    None where there are fewer than three seeds: then there is no verdict.

    >>> interval([0.060, 0.062, 0.064], [1e-5], 2.0)
    0.0049...
    """
    count = len(gaps)
    if count < 3:
        return None
    own = half_interval(gaps) or 0.0
    twins = simultaneous_quantile(len(twin_gaps) + 1, 1) * _scatter(twin_gaps) / math.sqrt(count) if twin_gaps else 0.0
    return max(own, twins, MARGIN * abs(reference))


def half_interval(values: Sequence[float]) -> float | None:
    """Return half of Student's 95% confidence interval of a mean; None for fewer than three values.

    >>> half_interval([0.060, 0.062, 0.064])
    0.0049...
    """
    if len(values) < 3:
        return None
    return simultaneous_quantile(len(values), 1) * math.sqrt(_variance(values) / len(values))


def noise(
    gaps: Sequence[float], twin_gaps: Sequence[float], reference: float, compared: Sequence[Sequence[float]] = ()
) -> float | None:
    """Return how large a mean gap must be to count as one among those of all recipes compared.

    At least the `interval`. Where several recipes are compared it also exceeds one of two, in standard errors of the
    mean, so that chance calls any of them worse or better in about 5% of comparisons at most, even where some recipes
    scatter much more than others and their gaps rise and fall together:

    - the `simultaneous_quantile` of so many recipes, where the deviation of a recipe's gaps is taken to be at least
      the pooled one, the root mean square over the recipes: at three seeds a small deviation is mostly chance; at the
      `pooled_level`;
    - Student's quantile with Bonferroni's correction, for the recipe's own deviation: one recipe that scatters wildly
      does not hide what is certain of the others.

    Args:
        gaps: of this recipe, one per seed.
        twin_gaps: between float32 and its twin.
        reference: float32's loss.
        compared: the gaps of every recipe compared, of this one too; those of fewer than three seeds do not count.

    >>> noise([0.060, 0.062, 0.064], [], 2.0, [[0.060, 0.062, 0.064], [0.02, 0.01, 0.03]])
    0.0210...
    """
    alone = interval(gaps, twin_gaps, reference)
    family = [one for one in compared if len(one) > 2]
    if alone is None or len(family) < 2:
        return alone
    count, own = len(gaps), math.sqrt(_variance(gaps))
    pooled = simultaneous_quantile(count, len(family), pooled_level(len(family))) * max(own, pooled_spread(family))
    bonferroni = simultaneous_quantile(count, 1, _BONFERRONI / len(family)) * own
    return max(alone, min(pooled, bonferroni) / math.sqrt(count))


def pooled_level(recipes: int) -> float:
    """Return the level of the quantile for so many recipes: 3.7%, and less for more than five.

    The quantile holds for gaps that are drawn apart. Gaps to the same float32 run are not, on the same batches still
    less, and of two or three that scatter by far the most but not quite as one (correlations of 0.9 to 0.99), any
    exceeds it up to 1.3 times as often as the level says among five recipes, up to 1.4 times among ten. This level
    keeps all of that within 5%, the other limit's share included, by simulation (benchmarks/bench_verdicts.py).

    >>> [round(pooled_level(recipes), 4) for recipes in (2, 5, 10)]
    [0.037, 0.037, 0.0294]
    """
    return _POOLED * min(1.0, _FEW / recipes) ** (1 / 3)


def pooled_spread(compared: Sequence[Sequence[float]]) -> float:
    """Return the root mean square of the standard deviations of several recipes' gaps, weighted by degrees of freedom.

    >>> pooled_spread([[1.0, 3.0], [0.0, 0.0]])
    1.0
    """
    degrees = sum(len(gaps) - 1 for gaps in compared)
    return math.sqrt(sum((len(gaps) - 1) * _variance(gaps) for gaps in compared) / degrees)


def tolerance(twin_gaps: Sequence[float], reference: float) -> float:
    """Return the sum of gap and interval that is still called no difference: the larger of two.

    - a hundredth of float32's loss;
    - three times the root mean square of the gaps between float32 and its twin.

    Neither grows with the seeds, and an interval that falls below both always leads to a verdict.

    >>> tolerance([1e-5, 0.0, -1e-5], 2.0)
    0.02
    """
    return max(_CLOSE * abs(reference), _TWINS * _scatter(twin_gaps))


def _variance(gaps: Sequence[float]) -> float:
    """Return the variance in floats, as `statistics.variance` is too slow for simulations."""
    mean = math.fsum(gaps) / len(gaps)
    return math.fsum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)


def _scatter(twin_gaps: Sequence[float]) -> float:
    """Return the root mean square of gaps whose true mean is 0."""
    return math.sqrt(math.fsum(gap * gap for gap in twin_gaps) / len(twin_gaps)) if twin_gaps else 0.0


def verdict(gap: float, noise: float | None, tolerance: float, interval: float | None = None) -> str | None:
    """Return "worse", "better", "no difference" or "unclear" for a gap in a loss; None without a noise.

    A gap within its noise is no difference only where ``abs(gap) + interval`` is within the tolerance. That is said of
    one recipe, and needs no correction for the others; without an interval, the noise takes its place.

    >>> verdict(0.06, 0.005, 0.02), verdict(-0.001, 0.005, 0.02), verdict(0.001, 0.5, 0.02), verdict(0.06, None, 0.02)
    ('worse', 'no difference', 'unclear', None)
    >>> verdict(0.001, 0.5, 0.02, interval=0.005)
    'no difference'
    """
    if noise is None:
        return None
    if abs(gap) > noise:
        return "worse" if gap > 0 else "better"
    return "no difference" if abs(gap) + (noise if interval is None else interval) <= tolerance else "unclear"
