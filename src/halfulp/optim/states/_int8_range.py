"""The share of 8-bit states below the range of their codes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..parameters._parameter_plan import ParameterPlan
from ._int8_blocks import Int8Blocks


def share_below_range(plans: Iterable[ParameterPlan]) -> float | None:
    """Return the share of 8-bit state elements on this rank that have the smallest code for a value that is not 0.

    That is code 1 of a second moment, which a positive one gets at least, and code 0 of a first moment whose second
    moment is not 0. First moments that have no second one beside them are not counted: their zeros may be true.

    Returns:
        None where there are no such states.
    """
    below = elements = 0
    for plan in plans:
        specs = list(zip(plan.spec.rule.states, plan.spec.codecs, plan.states))
        seconds = [tensors[0] for state, _, tensors in specs if state.degree == 2]
        for state, codec, tensors in specs:
            if not isinstance(codec, Int8Blocks) or not seconds:
                continue
            codes = tensors[0]
            least = codes == 1 if state.degree == 2 else (codes == 0) & (seconds[0] != 0)
            below += int(torch.count_nonzero(least))
            elements += codes.numel()
    return below / elements if elements else None
