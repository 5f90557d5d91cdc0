"""Blocks whose terms lie exactly so far apart that one more vector loop, or none, is exact."""

import ctypes
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from halfulp.arithmetic.exact_sums import _run as kernels
from halfulp.arithmetic.exact_sums._accumulate import ONE_BY_ONE, RECORD
from halfulp.arithmetic.exact_sums._accumulator import LAYOUTS, LIMBS, UNIT, block_size
from halfulp.arithmetic.exact_sums._reference import words_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def gapped(dtype: torch.dtype, gaps: torch.Tensor, columns: int, top: int) -> torch.Tensor:
    """A row per gap: the largest mantissas below 2^(top + 1), and some that lie 2^gap lower and use their last bit."""
    ulp = torch.finfo(dtype).eps
    x = torch.full((len(gaps), columns), 2.0 - ulp, dtype=torch.float64)
    x[:, 7::13] = powers(-gaps)[:, None] * (1.0 + ulp)
    return (x * 2.0**top).to(dtype)


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two; torch's own exp2 and ldexp are not exact everywhere."""
    return torch.from_numpy(np.ldexp(np.ones(exponents.shape), exponents.numpy()))


@pytest.mark.parametrize("product", [False, True], ids=["sum", "dot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gap_between_exponents(dtype, product, seed):
    layout = LAYOUTS[dtype]
    gaps = torch.arange(0, min(130, (layout.fields - 3) // 2))
    top = int(torch.randint(0, 12, ()))
    a = gapped(dtype, gaps, block_size(dtype, product) + 50, top)
    signs = torch.where(torch.rand(a.shape) < 0.5, -1.0, 1.0).to(dtype)
    for x in (a, -a, a * signs):
        b = gapped(dtype, gaps // 2, a.shape[1], -top).roll(3, 1) if product else None
        assert torch.equal(kernels.partial(x, b), words_of(x, b))


@pytest.mark.parametrize("product", [False, True], ids=["sum", "dot"])
def test_rests_that_add_up(product, seed):
    """Of all elements, or products, the cut leaves a rest as large as can be, and all have one sign."""
    gaps = torch.arange(0, 60)
    if product:
        m = 2**52 + 2 * random.getrandbits(50) + 1
        # The product's lowest 19 bits are just below half of what the second cut keeps.
        n = 2**52 + (random.getrandbits(31) << 19) + ((2**18 - 1) * pow(m, -1, 2**19) - 2**52) % 2**19
        a, b = (torch.full((60, 300), v * 2.0**-52, dtype=torch.float64) for v in (m, n))
        assert (m * n) % 2**19 == 2**18 - 1
        b[:, 7::13] = 1.0 + 2.0**-52
    else:
        a, b = torch.full((60, 1100), 1 + 2.0 ** -random.randint(38, 44) - 2.0**-52, dtype=torch.float64), None
        a[40:] = 1 + 2.0**-41 - 2.0**-52
        gaps[40:] = torch.arange(28, 48)
    a[:, 7::13] = powers(-gaps)[:, None] * (1.0 + 2.0**-52)
    assert torch.equal(kernels.partial(a, b), words_of(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_loop_is_taken(dtype, seed):
    """Near, far and wild data do not all end in the same loop, or the tests above would prove little."""
    near = torch.randn(1, 5000, dtype=torch.float64)
    far = near * powers(torch.randint(-20 if dtype == torch.float16 else -60, 10, near.shape))
    taken = {int(s) for data in (near, far) for s in _summands(data.to(dtype), None)}
    assert taken <= set(range(1, 17))
    assert len(taken) >= 2 or dtype == torch.float16
    special = near.clone()
    special[0, ::1024] = float("inf")
    assert set(_summands(special.to(dtype), None)) == {ONE_BY_ONE}


def _summands(a: torch.Tensor, b: torch.Tensor | None) -> list[int]:
    """How many summands each block of the one row became."""
    kernels.partial(a, b)  # a kernel's first call tries it on numbers of its own
    seen = []
    original = kernels.run_chunks

    def spy(kernel, lengths, setup, records, *rest):
        original(kernel, lengths, setup, records, *rest)
        blocks = -(-a.shape[1] // block_size(a.dtype, b is not None))
        words = (ctypes.c_int64 * (RECORD * blocks)).from_address(records)
        seen.append(list(words)[::RECORD])

    kernels.run_chunks = spy
    try:
        kernels.partial(a, b)
    finally:
        kernels.run_chunks = original
    return seen[0]


@pytest.mark.parametrize("product", [False, True], ids=["sum", "dot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_processor_that_flushes_subnormals_changes_nothing(dtype, product, seed):
    least = torch.finfo(dtype).smallest_normal
    # Subnormal elements, and normal ones whose rests are subnormal.
    a = torch.cat([torch.randn(1, 2000, dtype=torch.float64) * least * scale for scale in (0.1, 1, 100, 2.0**60)], 1)
    a = a.to(dtype)
    b = torch.randn(a.shape).to(dtype) if product else None
    wanted = words_of(a, b)
    if not torch.set_flush_denormal(True):
        return
    try:
        made = kernels.partial(a, b)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(made, wanted)
    assert torch.equal(kernels.partial(a, b), wanted)


def test_blocks_at_the_ends_of_float64(seed):
    for scale in (2.0**1022, 2.0**1009, 2.0**-969, 2.0**-1021, 2.0**-1060):
        x = torch.rand(1, 3000, dtype=torch.float64) * 1.9 * scale
        words = kernels.partial(x, None)
        exact = sum((Fraction(v) for v in x[0].tolist()), Fraction())
        value = sum(int(w) << (32 * i) for i, w in enumerate(words[0, :LIMBS].tolist()))
        assert Fraction(value) * Fraction(2) ** UNIT == exact
        for other in (scale, 1.0 / scale if scale < 1e300 and scale > 1e-300 else 1.0, 3.0):
            y = torch.rand(1, 3000, dtype=torch.float64) * other
            assert torch.equal(kernels.partial(x, y), words_of(x, y))
