"""Kernels on one element at a time: plain Python functions compiled by Numba."""
