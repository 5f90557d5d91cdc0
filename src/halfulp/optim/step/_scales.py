"""Scales of a step, chosen before anything is written, so that nothing overflows and no digit is lost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels._device_function import record_words
from ...kernels._operations import add, bit_and, select, shl, shr, sub, to_real, word
from ...kernels._trace import Piece
from ..parameters._local_tensors import scale_of
from ..parameters._parameter_plan import ParameterPlan
from ..parameters._step_spec import StepSpec
from ..states._codec import Scaled, finite_amax

Constants = tuple[float, ...]
# Binades of a payload's largest magnitude: the first and the last in which a scale is kept; where a new one puts it.
WINDOWS = {
    torch.float16: (-4, 13, 3),
    torch.float8_e4m3fn: (-1, 7, 5),
    torch.float8_e5m2: (-4, 14, 4),
    torch.bfloat16: (-40, 40, 0),
    torch.float32: (-40, 40, 0),
}
# Of a payload under the new scale, before the update is added: float32 holds it, and some binades more.
LARGEST_BINADE = 120


def with_present_scales(spec: StepSpec, plan: ParameterPlan, constants: Constants, gradient_scale: float) -> Constants:
    """Return a rule's constants with a parameter's present scales behind them; placeholders for the new ones."""
    scale = plan.scale
    own = [number for k in spec.scaled_states for number in (plan.states[k][1].item(), 1.0)]
    return (*constants, scale, 1 / scale, gradient_scale, 1.0, scale, *own)


def with_new_scales(spec: StepSpec, plan: ParameterPlan, constants: Constants, amax: Sequence[float]) -> Constants:
    """Return constants with the scales under which a step's results will be stored; tensors are not changed yet.

    A step reads the payload under its present scale and rounds the sum once, under the new one. `amax` are the largest
    finite magnitudes of the weight and of each scaled state.
    """
    at = spec.constant_places
    numbers = list(constants)
    present = numbers[at["weight_scale"]]
    scale, ratio = weight_scale(spec.store.dtype, present, amax[0]), 1.0
    if scale != present:
        scale, ratio = reachable_scale(spec.store.dtype, present, scale, finite_amax(plan.payloads[0].float()))
    numbers[at["weight_inverse"]], numbers[at["new_scale"]] = 1 / scale, scale
    numbers[at["weight_ratio"]] = ratio
    for (k, codec), largest in zip(spec.scaled_states.items(), amax[1:], strict=True):
        numbers[at[f"inverse_{k}"]] = 1 / codec.fitting(largest)
    return tuple(numbers)


def keep_scales(spec: StepSpec, plan: ParameterPlan, constants: Constants) -> None:
    """Write the scales of the weight and the states that a step has stored."""
    at = spec.constant_places
    if constants[at["new_scale"]] != constants[at["weight_scale"]]:
        scale_of(plan.parameter).fill_(constants[at["new_scale"]])
    for k in spec.scaled_states:
        plan.states[k][1].fill_(1 / constants[at[f"inverse_{k}"]])


def weight_scale(dtype: torch.dtype, scale: float, largest: float) -> float:
    """Return the present scale if a magnitude lies well inside the payload's range, else one that puts it there.

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


def reachable_scale(dtype: torch.dtype, present: float, scale: float, stored: float) -> tuple[float, float]:
    """Return a scale that a step can bring a payload to, and the factor that does: both in float32's range.

    `scale` is the one that is wanted, and nearly always given; the factor must leave the payload's largest finite
    magnitude, `stored`, finite.

    >>> reachable_scale(torch.float16, 1.0, 2.0**-40, 1.5), reachable_scale(torch.float16, 2.0**-126, 1.0, 0.0)
    ((9.094947017729282e-13, 1099511627776.0), (1.0, 1.0))
    """
    if stored == 0:
        return scale, 1.0
    scale = max(scale, math.ldexp(present, max(math.frexp(stored)[1], 0) - LARGEST_BINADE))
    if holds_the_rest(dtype):
        scale = min(scale, math.ldexp(present, 126))
    scale = min(scale, 2.0**126)
    return scale, max(present / scale, 2.0**-126)


def holds_the_rest(dtype: torch.dtype) -> bool:
    """Return whether a payload's own range is wide enough for what a factor in float32's range leaves to do."""
    return torch.finfo(dtype).max > 2.0**LARGEST_BINADE


BIAS = 512
NONE, ONE, S23, MANTISSA, LEAST_NORMAL, HALF_OF_LEAST, WORD_OF_ONE = (
    np.uint32(n) for n in (0, 1, 23, 0x7FFFFF, 0x800000, 0x400000, 0x3F800000)
)
OF_NORMAL, OF_SUBNORMAL, OF_ONE = (np.uint32(BIAS + n) for n in (-127, -127 - 149, 0))
LOWEST, HIGHEST = np.uint32(BIAS - 126), np.uint32(BIAS + 126)


def normal(x: Any) -> Any:
    """Device function: the word of a positive number, or of it times 2^149 where it is subnormal."""
    return select(x < LEAST_NORMAL, word(to_real(x)), x)


def exponent(x: Any) -> Any:
    """Device function: floor(log2) of a positive number."""
    return add(shr(normal(x), S23), select(x < LEAST_NORMAL, OF_SUBNORMAL, OF_NORMAL))


def power(e: Any) -> Any:
    """Device function: the word of a power of two from 2^-127 to 2^127."""
    return select(e < LOWEST, HALF_OF_LEAST, shl(sub(e, OF_NORMAL), S23))


def inverse(scale: Any) -> Any:
    """Device function: the reciprocal of a scale."""
    return power(sub(np.uint32(2 * BIAS), exponent(scale)))


def lesser(a: Any, b: Any) -> Any:
    """Device function: the smaller of two words."""
    return select(a < b, a, b)


def larger(a: Any, b: Any) -> Any:
    """Device function: the larger of two words."""
    return select(a < b, b, a)


def ratio(present: Any, new: Any, stored: Any) -> Any:
    """Device function: the factor that brings a payload from one scale to another; 1 for a payload of zeros."""
    factor = larger(sub(add(exponent(present), OF_ONE), exponent(new)), LOWEST)
    return select(stored == NONE, WORD_OF_ONE, power(factor))


@functools.cache
def weight_scale_function(dtype: torch.dtype) -> Callable[[Any, Any, Any], Any]:
    """Return the device function (present scale, largest weight, largest payload) -> new scale of a payload's dtype."""
    lowest, highest, target = WINDOWS[dtype]
    first, last = np.uint32(BIAS + lowest), np.uint32(BIAS + highest)
    below, reach, wide = np.uint32(target), np.uint32(BIAS + LARGEST_BINADE), holds_the_rest(dtype)

    def new_scale(present: Any, largest: Any, stored: Any) -> Any:
        now, binade = exponent(present), exponent(largest)
        distance = sub(add(binade, OF_ONE), now)
        wanted = larger(lesser(sub(binade, below), HIGHEST), LOWEST)
        keeps = (largest == NONE) | ((distance >= first) & (distance <= last)) | (wanted == now)
        reached = larger(wanted, add(now, sub(larger(add(exponent(stored), ONE), OF_ONE), reach)))
        if wide:
            reached = lesser(reached, add(now, np.uint32(126)))
        reached = lesser(reached, HIGHEST)
        return select(keeps, present, power(select(stored == NONE, wanted, reached)))

    return new_scale


@functools.cache
def state_scale_function(codec: Scaled) -> Callable[[Any], Any]:
    """Return the device function from the largest magnitude of a state to its scale."""
    greatest = torch.finfo(codec.store.dtype).max
    fraction, above = math.frexp(greatest)
    digits, binade = np.float32(fraction).view(np.uint32) & MANTISSA, np.uint32(above - 1)

    def scale(largest: Any) -> Any:
        up = select(bit_and(normal(largest), MANTISSA) > digits, ONE, NONE)
        needed = sub(add(exponent(largest), up), binade)
        return select(largest == NONE, WORD_OF_ONE, power(larger(lesser(needed, HIGHEST), LOWEST)))

    return scale


def recorded(function: Callable[..., Any], words: int) -> Piece:
    """Return one of these device functions, recorded."""
    return record_words(function, *["w32"] * words)
