"""Whether two ranks round different shards by the same random bits.

Of an element that is rounded away from zero with probability p, the error e = [away] - p has mean 0 and variance
p (1 - p); p is |e| or 1 - |e|, so that e tells both. Of two elements that are rounded by independent bits the
product of the errors has mean 0 and variance v w, at most 1 in magnitude; by the same bits its mean is
min(p, q) - p q. With V = sum v w, Bernstein's inequality bounds the sum of such products of independent bits by
L/3 + sqrt(L^2/9 + 2 L V) but for a chance of exp(-L) (Boucheron, Lugosi and Massart, Concentration Inequalities,
theorem 2.10). What a sum is above that, over sum sqrt(v w), is a correlation that chance does not explain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from ....rounding import mix64
from ...sampling._sample_places import MOST, name_key
from ._rank_summary import Array

# Few parameters and elements a step, other ones at the next: bits repeat in all of a rank's parameters, or in many.
MOST_PARAMETERS = 4
MOST_ELEMENTS = 1024
UNITS = 127
CHANCE = math.log(1e8)


def said_errors(
    step: int, errors: Mapping[str, torch.Tensor], shards: Mapping[str, tuple[int, int]]
) -> dict[int, tuple[int, Array]]:
    """Return what is said of rounding errors in a step, by the parameters' keys: a shard's number, and int8 in 1/127.

    Args:
        step: its number.
        errors: of the sampled elements, by the parameter's name; NaN where nothing was rounded.
        shards: by names, the number of the shard on this rank and its elements.
    """
    keys = {key_of(name, shards[name][1]): name for name in errors if name in shards}
    chosen = sorted(keys, key=lambda key: mix64(step, key))[:MOST_PARAMETERS]
    return {key: (shards[keys[key]][0], _in_units(errors[keys[key]][:MOST_ELEMENTS])) for key in chosen}


def key_of(name: str, elements: int) -> int:
    """Return the key under which ranks compare a parameter; large shards of other sizes are sampled at other places."""
    return name_key(f"{name} {max(elements, MOST)}")


def _in_units(errors: torch.Tensor) -> Array:
    found: Array = (errors.nan_to_num(0.0) * UNITS).round().to(torch.int8).numpy()
    return found


class SharedRandomBits:
    """Sums over the elements that this rank and others rounded."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[int, Array]] = {}

    def add(self, rank: int, key: int, mine: tuple[int, Array], theirs: tuple[int, Array]) -> None:
        """Add one step of a parameter; of the same shard the same bits are right."""
        if mine[0] == theirs[0]:
            return
        count = min(len(mine[1]), len(theirs[1]))
        e, f = (one[1][:count].astype(np.float64) / UNITS for one in (mine, theirs))
        v, w = (np.abs(one) * (1 - np.abs(one)) for one in (e, f))
        open_ = (v > 0) & (w > 0)
        vw = (v * w)[open_]
        sums = self._sums.setdefault(key, {}).setdefault(rank, np.zeros(3))
        sums += [(e * f)[open_].sum(), vw.sum(), np.sqrt(vw).sum()]

    def correlation(self, key: int) -> float | None:
        """Return the largest correlation with another rank that chance does not explain; None without another one."""
        return max((_unexplained(*sums.tolist()) for sums in self._sums.get(key, {}).values()), default=None)


def _unexplained(products: float, variance: float, deviations: float) -> float:
    """The correlation beyond chance, at least 0.

    >>> _unexplained(100.0, 40.0, 200.0) > 0.1, _unexplained(10.0, 40.0, 200.0), _unexplained(0.0, 0.0, 0.0)
    (True, 0.0, 0.0)
    """
    chance = CHANCE / 3 + math.sqrt(CHANCE * CHANCE / 9 + 2 * CHANCE * variance)
    return max(0.0, products - chance) / deviations if deviations else 0.0
