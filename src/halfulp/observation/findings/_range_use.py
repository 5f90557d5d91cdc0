"""Where a tensor's numbers lie in the range of the format that holds them."""

import math

from ... import formats
from ...formats import Format
from .._record import Record, Role, TensorRecord

# bfloat16's and float32's largest numbers are beyond this power of two.
WIDE = 2.0**100
GRADIENTS: tuple[Role, ...] = ("activation gradient", "weight gradient")


def storage_format(tensor: TensorRecord) -> Format | None:
    """Return the format of a tensor's dtype; None for what is none, such as integers."""
    try:
        return formats.get(tensor.dtype)
    except ValueError:
        return None


def tensors(record: Record, *roles: Role) -> list[TensorRecord]:
    """Return the tensors of some roles, in order of computation."""
    return sorted((tensor for (role, _), tensor in record.tensors.items() if role in roles), key=lambda t: t.order)


def nonzero(tensor: TensorRecord) -> int:
    """Return how many sampled elements are finite and not zero."""
    return sum(tensor.histogram.values())


def subnormal_share(tensor: TensorRecord, format: Format) -> float:
    """Return the share of sampled nonzero elements that are below a format's smallest normal number."""
    below = sum(count for binade, count in tensor.histogram.items() if binade < format.emin)
    return below / max(1, nonzero(tensor))


def rounds_to_zero(entered: float, weight: float | None, format: Format) -> bool:
    """Return whether zeros are what rounding to a format made, and not a mask, a ReLU or a weight that is zero.

    Sums of products of which the largest is below the smallest normal number may be zeros; so may numbers that are
    handed on, if the format has none as small as half its smallest. float32's range is not left by what trains.

    Args:
        entered: the largest magnitude of what came in.
        weight: of what it was multiplied by; None where it was handed on.
        format: of the zeros; one of 8 bits has a scale, and zeros are the work of a quantizer.
    """
    if has_wide_range(format) or format.bits < 16:
        return False
    if weight is None:
        return 0 < entered <= format.smallest_subnormal / 2
    # A gate that began at zero is as small as its first updates, and zeros behind it are meant.
    return weight >= format.smallest_normal and 0 < entered * weight < format.smallest_normal


def vanished_share(tensor: TensorRecord, format: Format) -> float:
    """Return an estimate of the share of elements that became zero when they were rounded to a format.

    Zeros tell nothing, since dropout and ReLU make them. What is left at the smallest number does: rounding sends an
    interval of its own width there, and half as much, next to zero, to zero. Numbers spread evenly around zero on so
    small a scale, so half as many vanished.
    """
    lowest = math.frexp(format.smallest_subnormal)[1] - 1
    vanished = 0.5 * sum(count for binade, count in tensor.histogram.items() if binade <= lowest)
    return vanished / max(1.0, nonzero(tensor) + vanished)


def margin(tensor: TensorRecord, format: Format) -> float:
    """Return how many binades lie between a tensor's largest magnitude and the format's."""
    return math.log2(format.max / tensor.amax) if tensor.amax > 0 else math.inf


def has_wide_range(format: Format | None) -> bool:
    """Return whether a format reaches as far as float32 does: what leaves it finds no more room in bfloat16 either."""
    return format is not None and format.max >= WIDE


def unscaled(tensor: TensorRecord) -> bool:
    """Return whether nothing chooses a scale for the tensor: what does comes close to the largest number on purpose."""
    return tensor.scale == 1.0


def loss_is_scaled(record: Record) -> bool:
    """Return whether a gradient scaler was seen."""
    return any(step.loss_scale is not None for step in record.history) or bool(record.sites)
