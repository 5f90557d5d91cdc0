"""Numbers in the words of findings, and how sure a count makes them."""

from collections.abc import Mapping
from typing import Any

import torch

# The words for what rounding takes of updates, the same in tables, pages and docs. In code and JSON they are the lost
# and the realised share of a `Realised`.
LOST = "share of updates lost"
KEPT = "movement kept"
LOST_AND_KEPT = (
    "Share of updates lost: wanted updates that rounding undid, so that the element stayed as it was. Movement kept: "
    "how much of the wanted movement took place all the same; the large updates are most of it, and stochastic "
    "rounding keeps it on average whatever single updates it undoes."
)


def percent(share: float) -> str:
    """Return a share as a percentage that is 0% or 100% only where it is exact.

    >>> percent(1.0), percent(0.99996), percent(0.5), percent(0.0002), percent(0.0)
    ('100%', '>99.9%', '50%', '<0.1%', '0%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.3g}%"


def times(share: float) -> str:
    """Return a share of something as words before it, from the whole on as a multiple.

    >>> f"{times(0.021)} the run's time", f"{times(5.216)} the run's time"
    ("2.1% of the run's time", "5.2 times the run's time")
    """
    return f"{percent(share)} of" if share < 1 else f"{share:.1f} times"


def plural(number: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "step"), plural(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def at_lr(options: Mapping[str, Any]) -> str:
    """Return " at lr ..." for the options of a param group, nothing where it has no learning rate.

    >>> at_lr({"lr": 3e-5}), at_lr({})
    (' at lr 3e-05', '')
    """
    lr = number(options, "lr")
    return "" if lr is None else f" at lr {lr:.3g}"


def number(options: Mapping[str, Any], name: str) -> float | None:
    """Return a number among the options of a param group, None where there is none.

    >>> number({"lr": torch.tensor(0.5)}, "lr"), number({"lr": None}, "lr")
    (0.5, None)
    """
    value = options.get(name)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, int | float) else None


def confidence_of(count: int, half: int = 64) -> float:
    """Return how sure a number of elements or steps makes a finding: 0 without any, 1/2 at `half`, towards 1.

    >>> confidence_of(0), confidence_of(64), confidence_of(10**6)
    (0.0, 0.5, 1.0)
    """
    return 1 - 0.5 ** (count / half)
