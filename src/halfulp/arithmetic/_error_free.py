"""Error-free transforms: a sum or product as its rounded value and what the rounding left out."""

from __future__ import annotations

from typing import Any

from ..kernels import product_error, shared_network

Terms = list[Any]  # of values: tensors, or traced ones


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b = s + e exactly, s = fl(a + b) (Knuth 1969, Moller 1965); 6 operations."""
    s = a + b
    other = s - a
    return s, (a - (s - other)) + (b - other)


def fast_two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b = s + e exactly for |a| >= |b| or a = 0 (Dekker 1971); 3 operations."""
    s = a + b
    return s, b - (s - a)


def two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """a b = p + e exactly where e is representable, p = fl(a b)."""
    p = a * b
    return p, product_error(a, b, p)


def sweep_terms(terms: Terms, first: int = 0) -> Terms:
    """Add error-free from the last term up to `first`: the sum stays, its head gathers there (VecSum)."""
    out = list(terms)
    for i in range(len(out) - 2, first - 1, -1):
        out[i], out[i + 1] = two_sum(out[i], out[i + 1])
    return out


@shared_network
def distill_terms(terms: Terms, keep: int) -> Terms:
    """Return the `keep` leading components of a sum of any terms: pass after pass, each fixing one more of them.

    The order of the terms does not matter, nor how much of them cancels (Priest 1992; Ogita, Rump, Oishi 2005: each
    pass divides the condition of what is left by an ulp).
    """
    out = list(terms)
    for _ in range(2):
        out = sweep_terms(out)
    for first in range(1, min(keep, len(out) - 1) + 1):
        out = sweep_terms(sweep_terms(out, first), first - 1)
    return out[:keep] + [out[0] * 0.0] * (keep - len(out))
