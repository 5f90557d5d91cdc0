"""Sums and dot products that are rounded once: an accumulator of integer words, and the kernels that fill it."""
