"""All plants, by code."""

from . import accumulators, comparisons, quantization, ranges, requests, scales, updates
from .plant import PLANTS

__all__ = ["PLANTS", "accumulators", "comparisons", "quantization", "ranges", "requests", "scales", "updates"]
