"""Powers of two: rounding to them, and products, maxima and ratios of scales within float32's range."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..kernels import select_engine

PowerRounding = Literal["down", "up", "nearest"]
POWER_ROUNDINGS = get_args(PowerRounding)

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127
FLOAT32_MAX = torch.finfo(torch.float32).max
# Scales from here on may belong to numbers that stand for infinity, such as a mask's 1e38.
HUGE_SCALE = 2.0**100
# From here on they do where numbers cannot be looked at: they lie next to float32's largest.
MASK_SCALE_THRESHOLD = 2.0**126
# The scale of a tensor that holds nothing but zeros: below every other, so that it never decides.
SCALE_OF_ZEROS = SMALLEST_SCALE
# The least magnitude to which an outlier may saturate: exp(-128) is 0 in float32.
LEAST_OUTLIER_CLAMP_LIMIT = 128.0

_EXPONENT_MASK = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF
SQRT2_MANTISSA_BITS = 0x003504F3  # mantissa of the square root of 2: from here on the next power is nearer in log2


def round_to_power(value: Tensor, rounding: PowerRounding = "down") -> Tensor:
    """Round positive numbers to powers of two in [2^-126, 2^127], float32, by their bits: without a logarithm's error.

    Args:
        value: positive floats of any shape; zeros and subnormals become 2^-126, what lies above 2^127 that.
        rounding: "down", "up" (powers of two stay), or "nearest" in log2, ties up.

    >>> round_to_power(torch.tensor([4.0, 5.0, 6.0]), "nearest").tolist(), round_to_power(torch.tensor(4.5), "up")
    ([4.0, 4.0, 8.0], tensor(8.))
    """
    if rounding not in POWER_ROUNDINGS:
        raise ValueError(f"rounding={rounding!r}: allowed for powers of two are {', '.join(POWER_ROUNDINGS)}")
    bits = value.to(torch.float32).clamp(SMALLEST_SCALE, LARGEST_SCALE).view(torch.int32)
    if rounding == "up":
        bits = bits + _MANTISSA_MASK
    elif rounding == "nearest":
        bits = bits + (_MANTISSA_MASK + 1 - SQRT2_MANTISSA_BITS)
    return (bits & _EXPONENT_MASK).view(torch.float32)


def round_number_to_power(value: float, rounding: PowerRounding = "nearest") -> float:
    """Round a Python number to a power of two in [2^-126, 2^127].

    >>> round_number_to_power(0.95), round_number_to_power(0.95, "down")
    (1.0, 0.5)
    """
    if not value > SMALLEST_SCALE:
        return SMALLEST_SCALE
    mantissa, exponent = math.frexp(min(value, LARGEST_SCALE))
    if rounding == "down" or mantissa == 0.5:
        return math.ldexp(0.5, exponent)
    return math.ldexp(1.0 if rounding == "up" or mantissa >= math.sqrt(0.5) else 0.5, min(exponent, 127))


def make_scale(scale: Tensor | float, device: torch.device | str | None = None) -> Tensor:
    """Return a scale as a float32 tensor without dimensions, checked to be one power of two from 2^-126 to 2^127."""
    if isinstance(scale, Tensor):
        if scale.dim():
            raise ValueError(f"a scale of shape {list(scale.shape)}: allowed is one power of two without dimensions")
        if read_scale(scale) is None:  # on an accelerator or being traced: its value is not looked at
            return scale.to(torch.float32)
    value = float(scale)
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE or math.frexp(value)[0] != 0.5:
        raise ValueError(f"scale={value!r}: allowed are powers of two from 2**-126 to 2**127, and None")
    return torch.full((), value, dtype=torch.float32, device=device)  # torch.tensor would copy it to the device


def read_scale(scale: Tensor) -> float | None:
    """Return a scale's value if it can be read for free, eagerly on the CPU; else None."""
    return scale.item() if has_readable_values(scale) else None


def has_readable_values(x: Tensor) -> bool:
    """Return whether values can be read for free: eagerly on the CPU."""
    return type(x) is Tensor and x.is_cpu and not torch.compiler.is_dynamo_compiling()


def is_untraced(x: Tensor) -> bool:
    """Return whether x is computed now: it is no stand-in of a tracer for a tensor of later calls."""
    return type(x) is Tensor and not torch.compiler.is_dynamo_compiling()


def has_fused_kernels(x: Any) -> bool:
    """Return whether what is computed of x now runs as Triton kernels: eagerly on CUDA, or interpreted if asked for."""
    if type(x) is not Tensor or has_readable_values(x) or torch.compiler.is_dynamo_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # whose tensors have no memory of their own
        return False
    device = x.device.type
    return device in ("cuda", "cpu") and select_engine(device) == "triton"


def multiply_scales(*factors: Tensor | float) -> tuple[Tensor, Tensor | float]:
    """Return the product of scales and powers of two as a scale, and the factor beyond its range, mostly 1."""
    scales = [factor for factor in factors if isinstance(factor, Tensor)]
    values: list[Any] = [read_scale(factor) if isinstance(factor, Tensor) else factor for factor in factors]
    if None not in values:
        value = math.prod(values)
        within = min(max(value, SMALLEST_SCALE), LARGEST_SCALE)
        return torch.tensor(within, dtype=torch.float32, device="cpu"), value / within
    total = functools.reduce(operator.mul, scales[1:], scales[0].double())
    number = math.prod(factor for factor in factors if not isinstance(factor, Tensor))
    total = total if number == 1.0 else total * number
    held = materialize_traced_scale(total.clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float32))
    return held, (total / held).to(torch.float32)


def materialize_traced_scale(scale: Tensor) -> Tensor:
    """Return a traced scale that compilers materialize, so that its inputs are not computed again at every use."""
    return scale if is_untraced(scale) else torch.as_strided_copy(scale, (), ())


def take_largest_scale(*scales: Tensor) -> Tensor:
    """Return the largest of several scales, as a tensor of its own."""
    values: list[Any] = [read_scale(scale) for scale in scales]
    if None not in values:
        return torch.tensor(max(values), dtype=torch.float32, device="cpu")
    result = functools.reduce(torch.maximum, scales)
    return result.clone() if len(scales) == 1 else materialize_traced_scale(result)


@functools.cache
def find_least_scale_beside_mask(storage: torch.dtype) -> float:
    """Return the least scale under which a storage holds what a mask's numbers may saturate to."""
    # Where numbers cannot be looked at, payloads are multiplied by 2^100 at most.
    largest = min(torch.finfo(storage).max, HUGE_SCALE)
    return round_number_to_power(LEAST_OUTLIER_CLAMP_LIMIT / largest, "up")


def choose_common_scale_value(values: Sequence[float], are_masks: Sequence[bool], least: float) -> float:
    """Return the largest of scales' values, but not masks' if there are others: beside one at least a `least` one."""
    others = [value for value, is_mask in zip(values, are_masks) if value > SCALE_OF_ZEROS and not is_mask]
    return max(*others, min(least, max(values))) if others else max(values)


def choose_common_scale(scales: Sequence[Tensor], mask_limits: Sequence[float], least: float) -> Tensor:
    """Return the scale of `choose_common_scale_value` on tensors, where scales from a limit on are masks'."""
    if len({scale.device for scale in scales}) == len(set(mask_limits)) == 1 < len(scales) and is_untraced(scales[0]):
        held = torch.stack(list(scales))
        usual, largest = torch.where(held < mask_limits[0], held, SCALE_OF_ZEROS).amax(), held.amax()
    else:
        usual = take_largest_scale(
            *(torch.where(s < limit, s, SCALE_OF_ZEROS) for s, limit in zip(scales, mask_limits))
        )
        largest = take_largest_scale(*scales)
    scale = torch.where(usual == SCALE_OF_ZEROS, largest, torch.maximum(usual, largest.clamp(max=least)))
    return materialize_traced_scale(scale)


def divide_scales(scale: Tensor, other: Tensor) -> Tensor | float:
    """Return scale / other as a factor for a payload; a float where both are concrete."""
    over, under = read_scale(scale), read_scale(other)
    if over is not None and under is not None:
        return over / under
    # At least the smallest normal number: an infinite payload times a factor of 0 would be NaN.
    return (scale / other).clamp(min=SMALLEST_SCALE)


def multiply_without_overflow(payload: Tensor, factor: float) -> Tensor:
    """Return a float32 payload times a power of two, where products of finite elements stay finite."""
    moved = multiply_by_power(payload, factor)
    return moved if factor <= HUGE_SCALE else clamp_finite_values(moved, FLOAT32_MAX, payload)


def clamp_finite_values(values: Tensor, largest: Any, origin: Tensor | None = None) -> Tensor:
    """Return values clamped to +-largest (a tensor or number), but for infinities, theirs or those of `origin`."""
    return torch.where((values if origin is None else origin).isinf(), values, values.clamp(-largest, largest))


def multiply_by_power(payload: Tensor, factor: Tensor | float) -> Tensor:
    """Return a float32 payload times a power of two: exact within float32's range."""
    if isinstance(factor, Tensor):
        return payload * factor
    if factor < SMALLEST_SCALE:  # as float32 it might be 0, and infinity times 0 is NaN
        return payload * SMALLEST_SCALE * max(factor / SMALLEST_SCALE, SMALLEST_SCALE)
    if factor > LARGEST_SCALE:
        return payload * LARGEST_SCALE * min(factor / LARGEST_SCALE, LARGEST_SCALE)
    return payload if factor == 1.0 else payload * factor
