"""Kernels as Triton source."""
