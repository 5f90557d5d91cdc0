"""The statistics of a few seeds: mean, spread, and when a difference is one."""

import math
import statistics
from collections.abc import Sequence

MARGIN = 1e-3

# Where the twin stays with float32 to the last digits, it is enough to know the loss to a hundredth.
_CLOSE = 10 * MARGIN

# With three seeds, the intervals of two equal things often differ by that much.
_TWINS = 3

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


def tolerance(twin_gaps: Sequence[float], reference: float) -> float:
    """What a gap and its noise may come to together and still be called no difference: the larger of two.

    - a hundredth of float32's loss;
    - three times the ``noise`` of float32's twin itself, where there are three seeds of it.

    It is at least twice what the twin and the margin add to a noise, so that enough seeds always lead to a verdict.

    >>> tolerance([1e-5, 0.0, -1e-5], 2.0)
    0.02
    """
    return max(_CLOSE * abs(reference), _TWINS * (noise(twin_gaps, twin_gaps, reference) or 0.0))


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
