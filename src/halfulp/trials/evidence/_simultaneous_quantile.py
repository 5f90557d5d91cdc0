"""The quantile for the mean gaps of several recipes at once, whose deviations differ by any factor.

Each recipe's mean gap is measured in units of the larger of two deviations: its own, and the pooled one, which is the
root mean square over the recipes. Only recipes whose gaps scatter can be called worse or better by chance. Where a
single one does, its own deviation counts and Student's t holds; where all scatter alike, the pooled deviation keeps
small ones from happening. The worst is in between: j recipes scatter alike and the others not at all. With the squares
of their deviations T B and T (1 - B), where T and B are independent (chi square and beta), the chance of an alarm is

    j E[ P(|t| > k sqrt(j max(B, 1/m))) ],   t Student's of j (n - 1) degrees of freedom,

at most, for m recipes of n seeds, and k is the least number for which that is the level or less for every j.

All this is of gaps that are drawn apart. Where they are correlated, Bonferroni's sum over means still holds, but the
deviations are no longer independent: several small ones come together. What that adds is left to the level.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)

Array = NDArray[np.float64]


@functools.lru_cache(maxsize=256)
def simultaneous_quantile(seeds: int, recipes: int, level: float = 0.05) -> float:
    """Return k, which the largest of so many means exceeds by chance as often as the level says, in standard errors.

    For one recipe it is Student's two-sided quantile.

    >>> [round(simultaneous_quantile(seeds, recipes), 3) for seeds, recipes in ((3, 1), (3, 5), (5, 1), (5, 5))]
    [4.303, 4.303, 2.776, 3.152]
    """
    found = 1.0
    for scattering in range(1, recipes + 1):
        if _alarm(found, seeds, recipes, scattering) > level:
            found = _solve(found, seeds, recipes, scattering, level)
    return found


def _solve(low: float, seeds: int, recipes: int, scattering: int, level: float) -> float:
    """The number at which the chance of an alarm is the level, by bisection."""
    high = 2 * low
    while _alarm(high, seeds, recipes, scattering) > level:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _alarm(middle, seeds, recipes, scattering) > level else (low, middle)
    return high


def _alarm(k: float, seeds: int, recipes: int, scattering: int) -> float:
    """How often one of ``scattering`` recipes out of all exceeds k, at most (Bonferroni)."""
    degrees = seeds - 1
    if scattering == 1:
        return float(_beyond(np.array([k]), degrees)[0])
    shares, weights = _shares(degrees, recipes, scattering)
    beyond = _beyond(k * np.sqrt(scattering * np.maximum(shares, 1 / recipes)), scattering * degrees)
    return scattering * float(weights @ beyond)


@functools.lru_cache(maxsize=256)
def _shares(degrees: int, recipes: int, scattering: int) -> tuple[Array, Array]:
    """Values of B and their weights: Gauss-Legendre in the angle whose squared sine is B, on both sides of 1/m."""
    kink = math.asin(math.sqrt(1 / recipes))
    angles, weights = [], []
    for low, high in ((0.0, kink), (kink, math.pi / 2)):
        angles.append(low + (high - low) * (_NODES + 1) / 2)
        weights.append((high - low) / 2 * _WEIGHTS)
    angle, weight = np.concatenate(angles), np.concatenate(weights)
    weight = weight * np.sin(angle) ** (degrees - 1) * np.cos(angle) ** ((scattering - 1) * degrees - 1)
    return np.sin(angle) ** 2, weight / weight.sum()


def _beyond(t: Array, degrees: int) -> Array:
    """P(|t'| > t) of Student's distribution, a finite sum for whole degrees (Abramowitz, 26.7.3 and 26.7.4)."""
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
