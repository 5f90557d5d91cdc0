"""The distance from a steady mean at which a state rounded to nearest stops moving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..parameters._parameter_plan import ParameterPlan
from ._double_bfloat16 import DoubleBF16
from ._scaled import Scaled
from ._state import Codec, Plain


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


def _nearest_bits(codec: Codec) -> int | None:
    """Return the bits behind the leading one of a state rounded to nearest; None for one rounded stochastically."""
    if isinstance(codec, DoubleBF16):
        return 16
    if isinstance(codec, Plain | Scaled) and not codec.stochastic:
        # A second moment is stored as its root, whose rounding counts twice.
        return codec.store.mantissa_bits - (isinstance(codec, Scaled) and codec.squared)
    return None
