"""Moments: the statistics that the published rules need, measured on the device and copied to the host once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moments:
    """Statistics of a tensor that the rules read.

    Attributes:
        mean, std: over all elements, zeros too; std divides by the count (no Bessel correction).
        low, high: smallest and largest element.
        smallest: least magnitude of the elements that are not zero; 0 where there is none.
        count, nonzero: how many elements there are, and how many of them are not zero.
        finite: False if an element is NaN or infinite; mean and std mean nothing then.
    """

    mean: float
    std: float
    low: float
    high: float
    smallest: float
    count: int
    nonzero: int
    finite: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> Moments:
        """Measure a floating-point tensor of any shape on its device, with one copy to the host.

        Sums are made in float32 (float64 for a float64 tensor) of x divided by its largest magnitude, so that the
        squares of no finite tensor overflow or vanish. An empty tensor has moments 0.

        Raises:
            TypeError: if x holds no real floating-point numbers.

        >>> Moments.of(torch.tensor([0.0, -4.0, 1.0, 3.0]))
        Moments(mean=0.0, std=2.549..., low=-4.0, high=3.0, smallest=1.0, count=4, nonzero=3, finite=True)
        """
        x = wide(x)
        if not x.numel():
            return cls(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, True)
        low, high = torch.aminmax(x)
        amax = torch.maximum(-low, high)
        unit = x / torch.where(amax > 0, amax, 1)
        mean = unit.mean()
        std = (unit - mean).square().mean().sqrt()
        smallest = torch.where(x == 0, torch.inf, x.abs()).amin()
        row = torch.stack([mean, std, low, high, smallest, *_split(x.count_nonzero(), x.dtype)])
        mean, std, low, high, smallest, *parts = row.tolist()
        nonzero, amax = _from_split(*parts), max(high, -low)
        return cls(
            mean=mean * amax,
            # CUDA means are sums times a rounded 1 / count: equal numbers may lie a rounding beside theirs.
            std=0.0 if low == high else std * amax,
            low=low,
            high=high,
            smallest=smallest if nonzero else 0.0,
            count=x.numel(),
            nonzero=nonzero,
            finite=math.isfinite(low) and math.isfinite(high),
        )

    @property
    def amax(self) -> float:
        """Largest magnitude."""
        return max(self.high, -self.low)


@dataclass(frozen=True)
class LogMoments:
    """Mean and std of ln|x| over the elements that are not zero, with what bounds the scale.

    Attributes:
        mean, std: of the natural logarithms, std without Bessel correction; 0 where there are none.
        amax, nonzero, finite: as of `Moments`.
    """

    mean: float
    std: float
    amax: float
    nonzero: int
    finite: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> LogMoments:
        """Measure a floating-point tensor of any shape on its device, with one copy to the host.

        Raises:
            TypeError: if x holds no real floating-point numbers.

        >>> LogMoments.of(torch.tensor([0.0, -1.0, 1.0]))
        LogMoments(mean=0.0, std=0.0, amax=1.0, nonzero=2, finite=True)
        """
        size = wide(x).abs()
        if not size.numel():
            return cls(0.0, 0.0, 0.0, 0, True)
        given = size > 0
        nonzero = given.count_nonzero()
        logs = torch.where(given, size, 1).log2()  # exact at powers of two, where ln is not
        mean = logs.sum() / nonzero.clamp(min=1)
        squares = torch.where(given, logs - mean, 0).square()
        std = (squares.sum() / nonzero.clamp(min=1)).sqrt()
        row = torch.stack([mean, std, size.amax(), *_split(nonzero, size.dtype)])
        mean, std, amax, *parts = row.tolist()
        return cls(mean * math.log(2), std * math.log(2), amax, _from_split(*parts), math.isfinite(amax))


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, or float64 as it is; no gradient flows back."""
    if not x.is_floating_point():
        raise TypeError(f"statistics are of real floating-point tensors; got {x.dtype}")
    return x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _split(count: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A count as two floats that hold it exactly, so that it travels with the rest in one copy."""
    return (count // 2**20).to(dtype), (count % 2**20).to(dtype)


def _from_split(upper: float, lower: float) -> int:
    return int(upper) * 2**20 + int(lower)
