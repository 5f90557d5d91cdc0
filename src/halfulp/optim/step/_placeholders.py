"""The names that a step kernel binds: placeholders that say what each stands for."""

from __future__ import annotations


def weight_load(address, i):
    """The code of parameter element i."""
    raise AssertionError("bound when a kernel is built")


def weight_save(address, i, code):
    """Write the code of parameter element i."""
    raise AssertionError("bound when a kernel is built")


def weight_real(code):
    """The float32 of a parameter's code."""
    raise AssertionError("bound when a kernel is built")


def weight_nearest(x, random):
    """The parameter's code nearest to a float32."""
    raise AssertionError("bound when a kernel is built")


def weight_round(x, random):
    """The parameter's code for a float32, by the rounding of the weight."""
    raise AssertionError("bound when a kernel is built")


def residual_round(x, random):
    """The parameter's code for a float32, by the rounding of the residual."""
    raise AssertionError("bound when a kernel is built")


def read_weight(a0, a1, a2, a3, i):
    """The weight that an element and its auxiliary tensors represent, and three values that its update needs."""
    raise AssertionError("bound when a kernel is built")
