"""Scales of a step: found before anything is written, so that nothing overflows and no digit is given away."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ._program import Kind
from ._scaled_states import peak
from ._slots import Slot

# Binades of a payload's largest magnitude: the first and the last in which a scale is kept; where a new one puts it.
WINDOWS = {
    torch.float16: (-4, 13, 3),
    torch.float8_e4m3fn: (-1, 7, 5),
    torch.float8_e5m2: (-4, 14, 4),
    torch.bfloat16: (-40, 40, 0),
    torch.float32: (-40, 40, 0),
}


def with_present_scales(kind: Kind, slot: Slot) -> tuple[float, ...]:
    """A slot's constants with the scales of what is stored now; the inverses of those to be are not known yet."""
    scale = slot.parameter.scale.item()
    own = [number for k in kind.scaled_states for number in (slot.states[k][1].item(), 1.0)]
    return (*slot.constants, scale, 1 / scale, slot.gradient_scale, *own)


def choose_scales(kind: Kind, slot: Slot, peaks: Sequence[float]) -> None:
    """Give a slot the scales under which its results will be stored; a payload whose scale changes is rescaled.

    Args:
        kind: of step.
        slot: whose constants hold the present scales.
        peaks: the largest finite magnitudes of the weight and of each scaled state.
    """
    first = len(kind.rule.constants)
    numbers = list(slot.constants)
    scale = weight_scale(kind.store.dtype, numbers[first], peaks[0])
    if scale < numbers[first]:  # the step reads what is stored now under the scale to be
        present = numbers[first]
        scale = min(max(scale, least_scale(kind.store.dtype, present, peak(slot.payloads[0].float()))), present)
    if scale != numbers[first]:
        rescale(kind, slot, numbers[first] / scale)
        slot.parameter.scale.fill_(scale)
    numbers[first : first + 2] = scale, 1 / scale
    for place, (k, largest) in enumerate(zip(kind.scaled_states, peaks[1:], strict=True)):
        numbers[first + 4 + 2 * place] = 1 / kind.codecs[k].fitting(largest)
    slot.constants = tuple(numbers)


def keep_scales(kind: Kind, slot: Slot) -> None:
    """Write the scales of the states that a step has stored."""
    first = len(kind.rule.constants)
    for place, k in enumerate(kind.scaled_states):
        slot.states[k][1].fill_(1 / slot.constants[first + 4 + 2 * place])


def weight_scale(dtype: torch.dtype, scale: float, largest: float) -> float:
    """The present scale while a magnitude lies well inside the payload's range, else one that puts it there.

    >>> weight_scale(torch.float16, 1.0, 100.0), weight_scale(torch.float16, 1.0, 40000.0)
    (1.0, 4096.0)
    """
    if largest == 0:
        return scale
    lowest, highest, target = WINDOWS[dtype]
    binade = math.frexp(largest)[1] - 1
    if lowest <= binade - (math.frexp(scale)[1] - 1) <= highest:
        return scale
    return math.ldexp(1.0, min(max(binade - target, -126), 126))


def rescale(kind: Kind, slot: Slot, ratio: float) -> None:
    """Multiply what a payload and its companions stand for by a power of two."""
    own = slot.parts if slot.copied is None else [*slot.copied, *slot.companions]
    parts = [part.contiguous() for part in own]
    kind.update.multiply(kind.store, parts, ratio)
    for part, filled in zip(own, parts):
        if filled is not part:
            part.copy_(filled)


def least_scale(dtype: torch.dtype, scale: float, stored: float) -> float:
    """The smallest scale under which a payload of some largest magnitude, now under `scale`, does not overflow."""
    return math.ldexp(scale, math.frexp(stored)[1] - 1 - WINDOWS[dtype][1]) if stored else 0.0
