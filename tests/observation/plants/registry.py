"""All plants, by code."""

from . import accumulators, comparisons, quantization, ranges, requests, scales, updates
from .plant import PLANTS, Run

__all__ = ["PLANTS", "Run", "accumulators", "comparisons", "quantization", "ranges", "requests", "scales", "updates"]
