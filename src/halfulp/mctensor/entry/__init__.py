"""Operators that are taken apart, or whose operands are encoded, before autograd sees them."""
