"""Bounds by which a kernel sees that a residual does not belong to its parameter: it was written from outside since."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.scalar._operations import bit_and, real, select, word
from ..states._storage import EXPONENT, Store

NONE = np.float32(0.0)

# Bound per store and weight update.
LEAST_BINADE, RESIDUAL_SHARE, RESIDUAL_LEAST = np.uint32(0), np.float32(0.0), np.float32(0.0)


def fitting(p, c):
    """Device function: a residual, or 0 if it is larger than its weight update leaves beside p, or p + c overflows."""
    raise AssertionError("bound when a kernel is built")


def fitting_wide(p, c):
    """Device function: `fitting` for stores with float32's exponents, where half an ulp above the largest is finite.

    Beside an infinite p the bound is NaN.
    """
    return select(abs(c) <= real(binade_of(p)) * RESIDUAL_SHARE + (p - p), c, NONE)


def fitting_any(p, c):
    """Device function: `fitting` for any store and bound."""
    w = p + c
    fits = (abs(c) <= real(binade_of(p)) * RESIDUAL_SHARE + RESIDUAL_LEAST) & (w - w == NONE)
    return select(fits, c, NONE)


def binade_of(p):
    """Device function: the word of the power of two at or below |p|, at least the store's."""
    binade = bit_and(word(p), EXPONENT)
    return select(binade > LEAST_BINADE, binade, LEAST_BINADE)


def fit_bindings(store: Store, ulps: float) -> dict[str, Any]:
    """Return the bindings of `fitting`, for residuals of at most `ulps` units in the last place of p.

    A residual's own last place is at least the store's least number. Beside float32's exponents that is added as a
    binade, for a subnormal operand in every sum may cost.
    """
    wide = store.emin == -126
    least = np.float32(0.0 if wide else 2.0**store.emin * ulp_of_one(store))
    share = np.float32(ulps * ulp_of_one(store))
    binade = np.uint32(store.emin + 127 + (wide and ulps < 1) << 23)
    piece = fitting_wide if wide and ulps < 1 else fitting_any
    return {"fitting": piece, "LEAST_BINADE": binade, "RESIDUAL_SHARE": share, "RESIDUAL_LEAST": least}


def ulp_of_one(store: Store) -> float:
    """The unit in the last place of 1."""
    return 2.0**-store.mantissa_bits
