"""How bad it is that rounding takes updates away: one set of thresholds for what runs and checkpoints show."""

from __future__ import annotations

import torch

from ._finding import Severity
from ._record import ParameterRecord, Realised
from ._text import is_narrow, is_wide

# Fewer elements say nothing of a share of 10%.
FEWEST = 32
# A tenth of the movement missing is a learning rate a tenth smaller, which no training shows; half is a different run.
LITTLE_LOST = 0.9
HALF_LOST = 0.5
# Large updates are most of the movement and survive, so that nearly all of it may take place while most elements stand
# still: a character GPT in bfloat16 that loses 51% of its updates and realises 99% ends with a validation loss of 2.16
# instead of float32's 2.12 (docs/compare.md).
MOST_CANCELLED = 0.5


def severity_of_loss(dtype: torch.dtype, realised: float | None, cancelled: float) -> Severity | None:
    """Return how bad it is, where updates of weights of a dtype are rounded to nearest; None where few are lost.

    Args:
        dtype: of the stored weights, beside which nothing keeps what rounding takes away.
        realised: share of the wanted movement that took place; None or NaN where it is not known.
        cancelled: share of the updates that are not zero and left their element as it was.
    """
    if realised is None or realised != realised:
        return None
    if realised < LITTLE_LOST:
        if is_wide(dtype):
            return "note"
        return "error" if realised < HALF_LOST else "warning"
    return "warning" if is_narrow(dtype) and cancelled >= MOST_CANCELLED else None


def may_be_chance(change: Realised, realised: float, spread: float = 1.0) -> bool:
    """Return whether stochastic rounding, which is right on average, may have made a share of movement by chance.

    The mean of n changes that are each kept with probability p is off by about sqrt((1/p - 1) / n) of itself: within
    four times that it may be chance.

    Args:
        change: that was counted.
        realised: the share of movement.
        spread: the mean of 1/p over 1 over the mean of p. Of weights it is up to 3: a layer's lie in several binades,
            and p halves from one to the next.

    >>> few, many = Realised(seen=250, cancelled=225), Realised(seen=25000, cancelled=22500)
    >>> may_be_chance(few, 0.3), may_be_chance(many, 0.3)
    (True, False)
    """
    kept = 1 - change.lost_share
    return kept > 0 and (1 - realised) ** 2 < 16 * (spread / kept - 1) / change.seen


def keeps_the_rest(parameter: ParameterRecord) -> bool:
    """Return whether a weight update of halfulp's keeps what rounding drops, beside the weight or on average."""
    return parameter.weight_update not in ("nearest", "none")
