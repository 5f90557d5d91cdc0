"""The scale that keeps a share of numbers from underflow by these numbers themselves, whatever their distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...kernels import in_float64
from ._estimators import NOTHING, LogScale
from ._moments import wide

# Rows and columns of a product of which all sums are made.
_SAMPLED = 128


def observed(numbers: Tensor, *, share: float, u_min: float, u_max: float) -> LogScale:
    """log2 of the scale at which at most half a share of the numbers that are not zero lie under ``u_min``.

    Half, as numbers that are a sample scatter. The numbers are finite.

    >>> observed(torch.tensor([0.0, 2.0**-20, 1.0]), share=1e-3, u_min=2.0**-14, u_max=65504.0).lower
    6.0
    """
    sizes = wide(numbers).abs().flatten()
    sizes = sizes[sizes > 0]
    if not sizes.numel():
        return NOTHING
    rank = 1 + int(share / 2 * sizes.numel())
    least, largest = torch.stack([sizes.kthvalue(rank).values, sizes.amax()]).tolist()
    return LogScale(math.log2(u_min) - math.log2(least), math.log2(u_max) - math.log2(largest))


def sampled(gradient: Tensor, weight: Tensor) -> Tensor:
    """A product's sums for some rows of (..., K) and some columns of (K, ...), evenly chosen, in float64."""
    rows, columns = gradient.reshape(-1, gradient.shape[-1]), weight.reshape(weight.shape[0], -1)
    rows, columns = rows[:: 1 + len(rows) // _SAMPLED], columns[:, :: 1 + columns.shape[1] // _SAMPLED]
    return in_float64(rows) @ in_float64(columns)
