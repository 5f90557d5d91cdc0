"""Slicing for exact products of matrices: how many slices, where they suffice, and the kernels that cut and sum."""

from __future__ import annotations

import functools
import math

import torch

from ...kernels import exponent, floor, is_finite, power, select, times_power
from .._error_free import Terms, distill, sweep, two_sum
from ..expansions._pointwise import PRECISION, Elements
from ..expansions._round_components import round_to_components, to_float64_terms

BITS = 22  # of the first slice; the later ones have one more, for their sign
BLOCK = 512  # 2 BITS + log2(BLOCK) = 53: inner products of slices are exact up to this length
MOST_SLICES = 12
FLUSHED = 2.0**-60  # magnitudes below it do not count in the sums that judge the slices


def covered(slices: int) -> int:
    """Return how many bits below a row's largest magnitude the slices cover."""
    return BITS + (slices - 1) * (BITS + 1)


def products(slices: int) -> int:
    """How many plain products of matrices: exact ones of slices i + j <= slices + 1, and one per slice with a tail."""
    return slices * (slices + 1) // 2 + slices + 1


def least_sum(slices: int, inner: int, bits: int) -> float:
    """The |A||B| (scaled) from which on the tails' error stays under half of 2^-bits of it.

    Every tail product is at most inner 2^-(covered + 1). Their sum, of `length` products in one accumulator, is off by
    at most `length` units of its absolute sum, and with independent roundings (Higham and Mary 2019) by 4 sqrt(length)
    of them: twelve standard deviations where nothing cancels.
    """
    length = (slices + 1) * inner
    growth = min(length, 4 * math.sqrt(length)) + 4
    # Sums are float32: a smaller limit would be taken for zero, and zero for enough.
    return max(growth * length * 2.0 ** (bits + 1 - covered(slices) - 1 - 53), 2.0**-126)


def tails_error(slices: int, inner: int) -> float:
    """Return a bound of the tails' rounding error in any order of additions, in scaled units."""
    return 1.01 * ((slices + 1) * inner + 8) * inner * (slices + 1) * 2.0 ** (-covered(slices) - 1 - 53)


def first_slices(inner: int, bits: int) -> int:
    """Slices that suffice where |A||B| is not much below its largest possible."""
    for slices in range(1, MOST_SLICES):
        if least_sum(slices, inner, bits) <= inner / 64:
            return slices
    return MOST_SLICES


@functools.cache
def slicer(dtype: torch.dtype, count: int, slices: int) -> Elements:
    """Kernel: components and two factors -> slices, the tail, and the magnitude as float32."""

    def cut(*values) -> Terms:
        first, second = values[count], values[count + 1]
        rest = list(values[:count]) if dtype == torch.float64 else to_float64_terms(list(values[:count]))
        rest = [part * first * second for part in rest]
        out, size = [], abs(rest[0])
        for k in range(slices):
            if k and len(rest) > 1:
                rest = sweep(rest)
            # Adding 1.5 * 2^52 units of the slice leaves no bit below one unit.
            magic = 1.5 * 2.0 ** (52 - covered(k + 1))
            out.append((rest[0] + magic) - magic)
            rest = [rest[0] - out[-1], *rest[1:]]
        tail = rest[-1]
        for part in rest[-2::-1]:
            tail = part + tail
        return [*out, tail, select(size < FLUSHED, 0.0, size)]

    inputs = (dtype,) * count + (torch.float64, torch.float64)
    outputs = (torch.float64,) * (slices + 1) + (torch.float32,)
    return Elements("matmul_slice", cut, torch.float64, inputs, outputs)


@functools.cache
def summer(results: int, carried: int, components: int, dtype: torch.dtype) -> Elements:
    """Kernel: products largest first, the exponents of row and column, what was carried -> components."""
    working = components if dtype == torch.float64 else -(-(components * PRECISION[dtype] + 4) // 53)

    def add_up(*values) -> Terms:
        terms = list(values[:results])
        scale = values[results] + values[results + 1]
        known = list(values[results + 2 :])
        terms = _gathered(terms, working)
        terms = [times_power(term, scale) for term in terms]
        if known:
            terms = distill([*known, *terms], working)
        head = terms[0]
        terms = [head, *(select(is_finite(head), term, 0.0) for term in terms[1:])]
        return terms if dtype == torch.float64 else round_to_components(terms, dtype, components)

    inputs = (torch.float64,) * (results + 2 + carried)
    return Elements("matmul_sum", add_up, torch.float64, inputs, (dtype,) * components)


def _gathered(terms: Terms, keep: int) -> Terms:
    """The sum to `keep` components, with an error of order u^(keep + 1) of the largest term."""
    if keep == 1:
        terms = sweep(terms)
        return [terms[0] + _plain_sum(terms[1:])] if len(terms) > 1 else terms
    if keep > 2 or len(terms) < 3:
        return distill(terms, keep)
    # n passes of VecSum and a plain sum are as good as n + 1 times the precision (Ogita, Rump, Oishi 2005).
    terms = sweep(sweep(terms))
    return list(two_sum(terms[0], _plain_sum(terms[1:])))


def _plain_sum(terms: Terms):
    total = terms[-1]
    for term in terms[-2::-1]:
        total = term + total
    return total


def exponents(head: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row or column: k with every magnitude at most 2^k (NaN for infinities and NaNs), and two factors of 2^-k."""
    largest = head.abs().amax(dim, keepdim=True)
    out = torch.empty_like(largest), torch.empty_like(largest), torch.empty_like(largest)
    _scaler()([largest], out)
    return out


@functools.cache
def _scaler() -> Elements:
    def scales(largest) -> Terms:
        k = exponent(largest) + 1.0
        # Neither factor leaves the range, where 2^-k would.
        half = floor(k * 0.5)
        return [select(is_finite(largest), k, float("nan")), power(-half), power(half - k)]

    return Elements("matmul_scale", scales, torch.float64, (torch.float64,), (torch.float64,) * 3)
