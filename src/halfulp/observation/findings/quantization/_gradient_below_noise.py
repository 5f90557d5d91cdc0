"""gradient-below-noise: a quantized gradient that is smaller than its quantization noise."""

import math
from collections.abc import Iterator

from ..._finding import Finding
from ..._words import confidence_of
from ...record._record import Record
from .._kind import FindingKind, register_finding
from .._range_use import GRADIENTS, tensors

# "FP4 All the Way", arXiv 2505.19115, section 4: training with quantized gradients stalls where the gradient's norm
# falls below sqrt(3) times the standard deviation of the quantization noise times the square root of the size.
RATIO = math.sqrt(3.0)


@register_finding
class GradientBelowNoise(FindingKind):
    """The gradient is smaller than sqrt(3) times the noise of its quantization, where quantized training stalls."""

    code = "gradient-below-noise"
    cure = "finish the training with gradients in bfloat16, or in a format of smaller blocks (nvfp4)"
    worst = "-ratio"
    explained_by = ("block-hidden", "gradient-underflow", "payload-saturated", "quantized-to-zero")

    def in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in tensors(record, *GRADIENTS):
            noise = tensor.quantization_error
            if tensor.asked_format is None or not noise or not tensor.rms < RATIO * noise:
                continue
            yield self.found(
                tensor.name,
                "warning",
                max(0.5, confidence_of(tensor.steps, 4)),
                f"{tensor.role} is {tensor.rms / noise:.2g} times the quantization noise of {tensor.asked_format}; "
                f"training stalls below {RATIO:.2f}",
                ratio=tensor.rms / noise,
                rms=tensor.rms,
                noise=noise,
                role=tensor.role,
                steps=tensor.steps,
            )
