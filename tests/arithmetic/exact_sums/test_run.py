"""How rows are split over accumulators and calls: no split changes a word."""

import pytest
import torch

from halfulp.arithmetic.exact_sums import _run as kernels
from halfulp.arithmetic.exact_sums._reference import round_words, words_of
from halfulp.kernels import same_bits


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_rows_in_pieces(rows, threads, monkeypatch, seed):
    monkeypatch.setattr(kernels, "_BLOCKS_AT_ONCE", 3)
    monkeypatch.setattr(kernels, "_ITEM", 2)
    x, y = torch.randn(2, rows, 140_000 // rows)
    words, dots = words_of(x), words_of(x, y)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(kernels.partial(x, None), words)
        assert torch.equal(kernels.partial(x, y), dots)
        for dtype in (torch.float16, torch.float64):
            assert same_bits(kernels.summed(x, None, dtype), round_words(words, dtype))
            assert same_bits(kernels.summed(x, y, dtype), round_words(dots, dtype))
            assert same_bits(kernels.rounded(dots, dtype), round_words(dots, dtype))
    finally:
        torch.set_num_threads(1)
