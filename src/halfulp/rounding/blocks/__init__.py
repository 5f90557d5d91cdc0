"""Rounding in blocks of elements that share a scale."""
