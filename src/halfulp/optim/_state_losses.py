"""What storage loses of states: means rounded to nearest that stop moving, values below the range of 8-bit codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .parameters._parameter_plan import ParameterPlan
from .states._codec import DoubleBF16
from .states._int8_blocks import Int8Blocks
from .states._scaled import Scaled
from .states._state import Codec, Plain


def stall_widths(plan: ParameterPlan, group: Mapping[str, Any]) -> dict[str, float]:
    """Return, for each decaying mean rounded to nearest, within about which share of a steady value it stops moving.

    A step moves it by (1 - retention) of its distance, which rounding cancels below half a unit in the last place. A
    share near 1 or above it is a state that never moves but by larger values.
    """
    found = {}
    for codec, slot in zip(plan.spec.codecs, plan.spec.rule.states):
        kept, bits = slot.retained(group), _nearest_bits(codec)
        if kept is not None and bits is not None and 0 < kept < 1:
            found[slot.name] = 2.0 ** -(bits + 1) / (1 - kept)
    return found


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


def _nearest_bits(codec: Codec) -> int | None:
    """Return the bits behind the leading one of a state rounded to nearest; None for one rounded stochastically."""
    if isinstance(codec, DoubleBF16):
        return 16
    if isinstance(codec, Plain | Scaled) and not codec.stochastic:
        # A second moment is stored as its root, whose rounding counts twice.
        return codec.store.mantissa_bits - (isinstance(codec, Scaled) and codec.squared)
    return None
