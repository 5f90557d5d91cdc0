"""Rows in pieces and in blocks, whose terms lie so far apart that one more cut, or none, is exact: the same words."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from halfulp.arithmetic import _exact_sums as kernels
from halfulp.arithmetic._exact_sum_kernels import (
    FORMAT_BY_ELEMENT_DTYPE,
    LIMB_COUNT,
    MIN_EXPONENT,
    count_block_elements,
    get_near_and_far_cut_counts,
)
from halfulp.kernels import engine, same_bits

from .cases import DTYPES


@pytest.fixture(autouse=True)
def always_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "_MOST_ELEMENTS_WITHOUT_BLOCKS", 0)


def sum_exactly_in_words(a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    with engine("reference"):
        return kernels.sum_rows(a, b, None)


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
    layout = FORMAT_BY_ELEMENT_DTYPE[dtype]
    gaps = torch.arange(0, min(130, layout.bias - 1))
    top = int(torch.randint(0, 12, ()))
    a = gapped(dtype, gaps, count_block_elements(dtype, product) + 50, top)
    signs = torch.where(torch.rand(a.shape) < 0.5, -1.0, 1.0).to(dtype)
    for x in (a, -a, a * signs):
        b = gapped(dtype, gaps // 2, a.shape[1], -top).roll(3, 1) if product else None
        assert torch.equal(kernels.sum_rows(x, b, None), sum_exactly_in_words(x, b))


@pytest.mark.parametrize("product", [False, True], ids=["sum", "dot"])
def test_rests_that_add_up(product, seed):
    """Of all elements, or products, the cut leaves a rest as large as can be, and all have one sign."""
    gaps = torch.arange(0, 60)
    if product:
        m = 2**52 + 2 * random.getrandbits(50) + 1
        # The product's lowest 19 bits are just below half of what the second cut keeps.
        n = 2**52 + (random.getrandbits(31) << 19) + ((2**18 - 1) * pow(m, -1, 2**19) - 2**52) % 2**19
        a, b = (torch.full((60, 556), v * 2.0**-52, dtype=torch.float64) for v in (m, n))
        assert (m * n) % 2**19 == 2**18 - 1
        b[:, 7::13] = 1.0 + 2.0**-52
    else:
        a, b = torch.full((60, 2100), 1 + 2.0 ** -random.randint(38, 44) - 2.0**-52, dtype=torch.float64), None
        a[40:] = 1 + 2.0**-41 - 2.0**-52
        gaps[40:] = torch.arange(28, 48)
    a[:, 7::13] = powers(-gaps)[:, None] * (1.0 + 2.0**-52)
    assert torch.equal(kernels.sum_rows(a, b, None), sum_exactly_in_words(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_way_is_taken(dtype, monkeypatch, seed):
    """Near, far and wild data do not all take the same way, or the tests above would prove little."""
    near = torch.randn(1, 8192, dtype=torch.float64)
    reach = {torch.float16: 1, torch.float64: 120}.get(dtype, 100)
    far, special = near * powers(torch.randint(-reach, 1, near.shape)), near.clone()
    special[0, ::1024] = float("inf")
    kernels.sum_rows(near.to(dtype), None, None)  # a kernel's first call tries it on numbers of its own
    first, second = get_near_and_far_cut_counts(dtype, False)
    tables, original = [], kernels._compile_table_kernel
    monkeypatch.setattr(kernels, "_compile_table_kernel", lambda by, table: tables.append(table) or original(by, table))
    for data, wanted in ((near, [first]), (far, [first, second][: 1 + (reach > 1)]), (special, [first, second])):
        tables.clear()
        kernels.sum_rows(data.to(dtype), None, None)
        assert [len(table.trace.sums) - 2 for table in tables if table.block_size] == wanted
    assert len([table for table in tables if not table.block_size]) == 4  # parts twice, lost elements, the words


@pytest.mark.parametrize("product", [False, True], ids=["sum", "dot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_processor_that_flushes_subnormals_changes_nothing(dtype, product, seed):
    least = torch.finfo(dtype).smallest_normal
    # Subnormal elements, and normal ones whose rests are subnormal.
    a = torch.cat([torch.randn(1, 2000, dtype=torch.float64) * least * scale for scale in (0.1, 1, 100, 2.0**60)], 1)
    a = a.to(dtype)
    b = torch.randn(a.shape).to(dtype) if product else None
    wanted = sum_exactly_in_words(a, b)
    if not torch.set_flush_denormal(True):
        return
    try:
        made = kernels.sum_rows(a, b, None)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(made, wanted)
    assert torch.equal(kernels.sum_rows(a, b, None), wanted)


def test_blocks_at_the_ends_of_float64(seed):
    for scale in (2.0**1022, 2.0**1009, 2.0**-969, 2.0**-1021, 2.0**-1060):
        x = torch.rand(1, 3000, dtype=torch.float64) * 1.9 * scale
        words = kernels.sum_rows(x, None, None)
        exact = sum((Fraction(v) for v in x[0].tolist()), Fraction())
        value = sum(int(w) << (32 * i) for i, w in enumerate(words[0, :LIMB_COUNT].tolist()))
        assert Fraction(value) * Fraction(2) ** MIN_EXPONENT == exact
        for other in (scale, 1.0 / scale if scale < 1e300 and scale > 1e-300 else 1.0, 3.0):
            y = torch.rand(1, 3000, dtype=torch.float64) * other
            assert torch.equal(kernels.sum_rows(x, y, None), sum_exactly_in_words(x, y))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_rows_in_pieces(rows, threads, monkeypatch, seed):
    for name, value in {
        "_MOST_ELEMENTS_AT_ONCE_BY_ENGINE": {"llvm": 9000, "reference": 7000},
        "_MOST_ROWS_AT_ONCE": 3,
        "_PIECE_LENGTH": 4096,
    }.items():
        monkeypatch.setattr(kernels, name, value)
    x, y = torch.randn(2, rows, 140_000 // rows)
    words, dots = sum_exactly_in_words(x), sum_exactly_in_words(x, y)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(kernels.sum_rows(x, None, None), words)
        assert torch.equal(kernels.sum_rows(x, y, None), dots)
        for dtype in (torch.float16, torch.float64):
            with engine("reference"):
                sums, dot = kernels.round_accumulators(words, dtype), kernels.sum_rows(x, y, dtype)
            assert same_bits(kernels.sum_rows(x, None, dtype), sums)
            assert same_bits(kernels.sum_rows(x, y, dtype), dot)
            assert same_bits(kernels.round_accumulators(dots, dtype), dot)
    finally:
        torch.set_num_threads(1)
