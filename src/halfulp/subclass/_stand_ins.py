"""Which elements of a plain tensor stand for infinity, as masks, penalties and last distances write it."""

from __future__ import annotations

import torch
from torch import Tensor

# So many times the largest of the others the least stand-in is: data of a wide range have no such gap.
_GAP = 2.0**10


def stand_ins(x: Tensor, size: float, among_zeros: bool = True) -> Tensor:
    """Return where the large elements of a tensor stand for infinity; nowhere if they are data.

    Stand-ins lie far beyond all other elements, and are one number or no more than the others: a column of time stamps
    beside a padded zero is neither. A tensor of one large number is all stand-ins.

    Args:
        x: floating values.
        size: the magnitude from which on an element is large.
        among_zeros: whether they may stand among zeros alone: a product's zeros are exact beside any number.
    """
    magnitudes = torch.nan_to_num(x.detach().abs(), 0.0, 0.0, 0.0)
    large = magnitudes >= size
    if not x.numel():
        return large
    others = torch.where(large, 0.0, magnitudes).amax()
    least, largest = torch.where(large, magnitudes, torch.inf).amin(), magnitudes.amax()
    are_few = 2 * large.count_nonzero() <= x.numel()
    decided = (least >= others * _GAP) & ((least == largest) | are_few)
    return large & (decided if among_zeros else decided & (others > 0))
