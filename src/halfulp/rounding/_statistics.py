"""Statistics of a tensor in a format: range, underflow, overflow, error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..formats import Format, get
from ..kernels import keeping_subnormals
from ._modes import Nearest, Rounding, get_rounding
from ._quantize import check_tensor, quantize


@dataclass(frozen=True)
class Fit:
    """Shares of a tensor's elements that a format loses or keeps.

    Attributes:
        elements: how many there are.
        amax: largest finite magnitude; 0 where there is none.
        zero: share that is zero in the tensor.
        underflow: share that is not zero, and becomes zero.
        subnormal: share that becomes a subnormal of the format.
        overflow: share that is finite, and goes beyond the largest number.
        not_finite: share that is NaN or infinite in the tensor.
        mean_squared_error: over the elements that are finite and do not overflow.
        signal_to_noise: mean square over mean squared error of the same elements, in decibels; inf where exact.
    """

    elements: int
    amax: float
    zero: float
    underflow: float
    subnormal: float
    overflow: float
    not_finite: float
    mean_squared_error: float
    signal_to_noise: float

    def __str__(self) -> str:
        shares = {
            "to zero": self.underflow,
            "subnormal": self.subnormal,
            "overflow": self.overflow,
            "not finite": self.not_finite,
        }
        text = ", ".join(f"{share:.2%} {name}" for name, share in shares.items() if share)
        return f"amax {self.amax:.3g}, {self.signal_to_noise:.1f} dB{', ' if text else ''}{text}"


@keeping_subnormals()
def fit(
    x: torch.Tensor,
    format: Format | str | torch.dtype,
    rounding: Rounding | str = Nearest(),  # noqa: B008  frozen
) -> Fit:
    """Measure what rounding a tensor to a format loses; x is not changed.

    Args:
        x: float16, bfloat16, float32 or float64 tensor of any shape.
        format: what it would be rounded to.
        rounding: how.

    Returns:
        A `Fit`; its sums are made in float64.

    Raises:
        TypeError, ValueError: as `quantize`.

    >>> print(fit(torch.tensor([1.0, 1e-9, 3.0, 1e9]), "fp16"))
    amax 1e+09, 190.0 dB, 25.00% to zero, 25.00% overflow
    """
    check_tensor(x)
    format, rounding = get(format), get_rounding(rounding)
    wide = x.detach().to(torch.float64)
    magnitude = wide.abs()
    finite = magnitude.isfinite()
    # Overflow shown as NaN tells it from a number that rounds to the largest one.
    rounded = quantize(wide, format, rounding, overflow="nan")
    over = finite & ~rounded.isfinite()
    if rounding.name in ("toward_zero", "up", "down"):
        over |= finite & (magnitude > format.max)
    size = rounded.abs()
    kept = finite & ~over
    # Squares beside 1 neither overflow nor vanish.
    largest = float(torch.where(kept, magnitude, 0.0).amax()) if x.numel() else 0.0
    scale = math.ldexp(1.0, min(1000, -math.frexp(largest)[1]))
    error = torch.where(kept, (rounded - wide) * scale, 0.0).square().sum()
    signal = torch.where(kept, wide * scale, 0.0).square().sum()
    count = max(1, x.numel())
    kept_count = max(1, int(kept.sum()))

    def share(mask: torch.Tensor) -> float:
        return int(mask.sum()) / count

    small = kept & (size > 0) & (size < format.smallest_normal)
    amax = float(torch.where(finite, magnitude, 0.0).amax()) if x.numel() else 0.0
    ratio = float(signal) / float(error) if float(error) else math.inf
    return Fit(
        elements=x.numel(),
        amax=amax,
        zero=share(magnitude == 0),
        underflow=share(kept & (magnitude > 0) & (size == 0)),
        subnormal=share(small),
        overflow=share(over),
        not_finite=share(~finite),
        mean_squared_error=float(error) / kept_count / scale / scale,
        signal_to_noise=10 * math.log10(ratio) if 0 < ratio < math.inf else math.inf if ratio else -math.inf,
    )
