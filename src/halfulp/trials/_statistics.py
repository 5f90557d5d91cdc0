"""The statistics of a few seeds: mean, spread, and when a difference is one."""

import math
import statistics
from collections.abc import Sequence

MARGIN = 1e-3

# Two-sided 95% quantiles of Student's t by degrees of freedom; beyond the table the normal one is close enough.
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
    - the largest gap between float32 and its twin, whose start differs by 1e-7;
    - a thousandth of float32's loss: less than that matters to nobody.

    None where there are fewer than three seeds: then there is no verdict.

    >>> noise([0.060, 0.062, 0.064], [1e-5], 2.0)
    0.0049...
    """
    count = len(gaps)
    if count < 3:
        return None
    quantile = _T.get(count - 1, 2.228 if count < 31 else 1.96)
    interval = quantile * statistics.stdev(gaps) / math.sqrt(count)
    return max(interval, MARGIN * abs(reference), *(abs(gap) for gap in twin_gaps), 0.0)


def verdict(gap: float, noise: float | None) -> str | None:
    """ "worse", "better" or "no difference" for a gap in a loss (smaller is better); None without a noise.

    >>> verdict(0.06, 0.005), verdict(-0.001, 0.005), verdict(0.06, None)
    ('worse', 'no difference', None)
    """
    if noise is None:
        return None
    if abs(gap) <= noise:
        return "no difference"
    return "worse" if gap > 0 else "better"
