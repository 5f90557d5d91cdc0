"""Selects that one instruction makes, which chooses by the class of a number."""

import torch

from halfulp.kernels import compile_trace, record_function
from halfulp.kernels._operations import word
from halfulp.kernels._trace import select
from halfulp.kernels.vector._builder import match_select_to_fixup

from .rows import run_rows


def test_a_select_that_compares_two_words_as_well_is_none_of_them(cache):
    def choose(x, y, z):
        return [select((word(y) == word(z)) & (x == 0.0), 0.0, x + y)]

    trace, (result,) = record_function(choose, torch.float32, 3)
    assert match_select_to_fixup(trace, result.number) is None
    kernel = compile_trace("test", trace, [result.number], [torch.float32] * 3, [torch.float32])
    x, y = torch.zeros(32), torch.arange(1.0, 33.0)
    z, found = torch.where(y < 9, y, 0.0), torch.empty(32)
    run_rows(kernel, 32, [x, y, z], [(32, 1)] * 3, [found])
    assert torch.equal(found, torch.where(y < 9, 0.0, y))
