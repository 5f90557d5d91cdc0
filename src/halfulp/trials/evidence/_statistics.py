"""The statistics of a few seeds: mean, spread, and when a difference is one."""

import math
import statistics
from collections.abc import Sequence

MARGIN = 1e-3

# Where the twin stays with float32 to the last digits, it is enough to know the loss to a hundredth.
_CLOSE = 10 * MARGIN

# A gap of up to three times what the start alone changes is still called no difference.
_TWINS = 3

# Two-sided 95% quantiles of Student's t by degrees of freedom.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds, n - 1 in the denominator; None for a single one.

    >>> spread([1.0, 3.0]), spread([1.0])
    (1.4142135623730951, None)
    """
    return statistics.stdev(values) if len(values) > 1 else None


def noise(gaps: Sequence[float], twin_gaps: Sequence[float], reference: float) -> float | None:
    """How large a mean gap must be to count as one: the largest of three.

    - half the 95% confidence interval of the mean of the gaps, paired by seed (Student's t);
    - the same for a mean of as many gaps that scatter about 0 as those between float32 and its twin do, whose start
      differs by 1e-7; it keeps three gaps that happen to lie close together from looking certain;
    - a thousandth of float32's loss: less than that matters to nobody.

    The first two fall with the square root of the seeds, so that more seeds tell smaller differences.
    None where there are fewer than three seeds: then there is no verdict.

    >>> noise([0.060, 0.062, 0.064], [1e-5], 2.0)
    0.0049...
    """
    count = len(gaps)
    if count < 3:
        return None
    interval = _quantile(count - 1) * statistics.stdev(gaps) / math.sqrt(count)
    twins = _quantile(len(twin_gaps)) * _scatter(twin_gaps) / math.sqrt(count) if twin_gaps else 0.0
    return max(interval, twins, MARGIN * abs(reference))


def tolerance(twin_gaps: Sequence[float], reference: float) -> float:
    """What a gap and its noise may come to together and still be called no difference: the larger of two.

    - a hundredth of float32's loss;
    - three times the root mean square of the gaps between float32 and its twin.

    Neither grows with the seeds, and a noise that falls below both always leads to a verdict.

    >>> tolerance([1e-5, 0.0, -1e-5], 2.0)
    0.02
    """
    return max(_CLOSE * abs(reference), _TWINS * _scatter(twin_gaps))


def _quantile(degrees: int) -> float:
    """Student's two-sided 95% quantile; beyond the table its expansion about the normal one (Abramowitz, 26.7.5)."""
    if degrees in _T:
        return _T[degrees]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _scatter(twin_gaps: Sequence[float]) -> float:
    """The root mean square of gaps whose true mean is 0."""
    return math.sqrt(statistics.fmean(gap * gap for gap in twin_gaps)) if twin_gaps else 0.0


def verdict(gap: float, noise: float | None, tolerance: float) -> str | None:
    """ "worse", "better", "no difference" or "unclear" for a gap in a loss (smaller is better); None without a noise.

    A gap within its noise is no difference only where ``abs(gap) + noise`` is within the tolerance.

    >>> verdict(0.06, 0.005, 0.02), verdict(-0.001, 0.005, 0.02), verdict(0.001, 0.5, 0.02), verdict(0.06, None, 0.02)
    ('worse', 'no difference', 'unclear', None)
    """
    if noise is None:
        return None
    if abs(gap) > noise:
        return "worse" if gap > 0 else "better"
    return "no difference" if abs(gap) + noise <= tolerance else "unclear"
