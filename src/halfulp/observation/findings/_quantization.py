"""Findings about quantizers and blocks: zeros, saturation, noise above the signal."""

import math
from collections.abc import Iterator
from typing import Any

from .._finding import Finding, Severity
from .._record import Record
from .._text import compute_confidence, format_percent, name_dtype
from ._kind import FindingKind, register_finding
from ._ranges import GRADIENT_ROLES, count_nonzero, get_storage_format, has_float32_range, list_tensor_records_of_roles

FEWEST_BLOCK_ELEMENTS = 64
# Of normally distributed numbers 4-bit blocks hide up to 12%; twice that is one large element in most blocks.
HIDDEN_SHARE_WARNING = 0.25
HIDDEN_SHARE_ERROR = 0.5


@register_finding
class BlockHidden(FindingKind):
    """One element of a block is so much larger that the scale it sets sends the others to zero."""

    code = "block-hidden"
    cure = (
        "a format with smaller blocks (nvfp4 for mxfp4) or more exponent bits (mxfp8_e5m2), or leave this "
        "layer out of emulation"
    )
    worst = "hidden"
    explained_by = ("quantized-to-zero",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in record.tensors.values():
            count, format = count_nonzero(tensor), tensor.asked_format
            if tensor.block_hidden is None or count < FEWEST_BLOCK_ELEMENTS:
                continue
            share = min(1.0, tensor.block_hidden / count)
            if share >= HIDDEN_SHARE_WARNING:
                severity: Severity = "error" if share >= HIDDEN_SHARE_ERROR else "warning"
                said = f"{format_percent(share)} of nonzero elements of {tensor.role} become 0 beside their block's "
                said += f"largest in {format}"
                evidence: dict[str, Any] = {"hidden": share, "role": tensor.role, "format": format, "seen": count}
                sure = compute_confidence(count, FEWEST_BLOCK_ELEMENTS)
                yield self.found(tensor.name, severity, sure, said, **evidence)


# "FP4 All the Way", arXiv 2505.19115, section 4: training with quantized gradients stalls where the gradient's norm
# falls below sqrt(3) times the standard deviation of the quantization noise times the square root of the size.
STALLING_GRADIENT_TO_NOISE_RATIO = math.sqrt(3.0)


@register_finding
class GradientBelowNoise(FindingKind):
    """The gradient is smaller than sqrt(3) times the noise of its quantization, where quantized training stalls."""

    code = "gradient-below-noise"
    cure = "finish the training with gradients in bfloat16, or in a format of smaller blocks (nvfp4)"
    worst = "-ratio"
    explained_by = ("block-hidden", "gradient-underflow", "payload-saturated", "quantized-to-zero")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in list_tensor_records_of_roles(record, *GRADIENT_ROLES):
            noise = tensor.quantization_error
            if tensor.asked_format is None or not noise or not tensor.rms < STALLING_GRADIENT_TO_NOISE_RATIO * noise:
                continue
            said = f"{tensor.role} is {tensor.rms / noise:.2g} times the quantization noise of {tensor.asked_format}; "
            said += f"training stalls below {STALLING_GRADIENT_TO_NOISE_RATIO:.2f}"
            evidence: dict[str, Any] = {"ratio": tensor.rms / noise, "rms": tensor.rms, "noise": noise}
            evidence |= {"role": tensor.role, "steps": tensor.steps}
            yield self.found(tensor.name, "warning", max(0.5, compute_confidence(tensor.steps, 4)), said, **evidence)


# A scale taken from the largest magnitude puts one element of each tensor there, and its near neighbours.
FEWEST_SATURATED_ELEMENTS = 8
SATURATED_SHARE_WARNING = 0.001
# The largest elements carry most of a product: with a hundredth of them cut off the layer computes something else.
SATURATED_SHARE_ERROR = 0.01
SCALE_BEFORE_ROUNDING_CURE = (
    "scale this tensor before it is rounded (hu.scalify gives every tensor a scale), or round it to mxfp8_e4m3, "
    "whose blocks have scales, or to e5m2"
)


@register_finding
class PayloadSaturated(FindingKind):
    """Elements sit at the format's largest number: the scale is out of date or too small, and they were cut off."""

    code = "payload-saturated"
    cure = "a larger scale: hu.rescale(tensor) or current instead of delayed scaling, or e5m2 for this tensor"
    says = "{place} [is|are] cut off at {format}'s largest number: {saturated:share} of [its|their] {role}"
    worst = "saturated"
    explained_by = ("dtype-not-asked",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in record.tensors.values():
            held_in, asked = get_storage_format(tensor), tensor.asked_format
            cases: list[tuple[int, int, str, str, str]] = []
            # Of what the run rounds narrower afterwards; blocks are exempt by their own scales.
            if asked is not None:
                said = f"beyond {asked}'s largest number and reach {tensor.amax:.4g}"
                cases.append((tensor.asked_overflow, tensor.sampled, asked, said, SCALE_BEFORE_ROUNDING_CURE))
            if held_in is not None and not has_float32_range(held_in):
                said = f"at {held_in.name}'s largest number, {held_in.max:.6g}"
                count = tensor.largest - tensor.steps  # a scale puts one there in each step
                cases.append((count, tensor.elements, held_in.name, said, self.cure))
            for count, elements, format, said, cure in cases:
                share = count / max(1, elements)
                if count < FEWEST_SATURATED_ELEMENTS or share < SATURATED_SHARE_WARNING:
                    continue
                sure = compute_confidence(count, FEWEST_SATURATED_ELEMENTS)
                severity: Severity = "error" if share >= SATURATED_SHARE_ERROR else "warning"
                evidence: dict[str, Any] = {"saturated": share, "count": count, "role": tensor.role}
                evidence |= {"format": format, "scale": tensor.scale}
                said = f"{format_percent(share)} of {tensor.role} elements are {said}"
                yield self.found(tensor.name, severity, sure, said, cure=cure, **evidence)


@register_finding
class QuantizedToZero(FindingKind):
    """A quantizer makes zeros of everything: its scale is too large, or its format too coarse."""

    code = "quantized-to-zero"
    cure = (
        "take the scale from the data (largest magnitude over the format's largest number): hu.quantize with "
        "a block format, or hu.scalify"
    )
    role = "activation"
    worst = "elements"
    explained_by = ("activation-underflow", "dtype-not-asked")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in list_tensor_records_of_roles(record, "activation"):
            entered = tensor.input_amax
            # Zeros in 16 bits and more are those of a ReLU, a mask or a zero weight, unless a quantizer made them.
            quantizes = tensor.dtype.itemsize == 1 or "quant" in tensor.kind.lower()
            if not quantizes or not tensor.is_zero_in_all_steps or not entered:
                continue
            said = f"all {tensor.elements} outputs in {name_dtype(tensor.dtype)} are 0, of inputs up to {entered:.3g}"
            evidence: dict[str, Any] = {"elements": tensor.elements, "input_amax": entered, "steps": tensor.steps}
            yield self.found(tensor.name, "error", compute_confidence(tensor.elements, 8), said, **evidence)
