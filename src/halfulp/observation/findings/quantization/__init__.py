"""What quantizers and blocks do to a tensor: zeros, saturation, noise above the signal."""

from ._block_hidden import BlockHidden as BlockHidden
from ._gradient_below_noise import GradientBelowNoise as GradientBelowNoise
from ._payload_saturated import PayloadSaturated as PayloadSaturated
from ._quantized_to_zero import QuantizedToZero as QuantizedToZero
