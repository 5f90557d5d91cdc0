"""float16 in kernels has the bits of torch's conversions."""

import torch

from halfulp.kernels import compile_trace, record_function

from .rows import run_rows


def _through(x, into):
    trace, results = record_function(lambda value: [value], torch.float32, 1)
    kernel = compile_trace("test", trace, [r.number for r in results], [x.dtype], [into])
    y = torch.empty(len(x), dtype=into)
    run_rows(kernel, len(x), [x], [(len(x), 1)], [y])
    return y


def _assert_same(found, expected):
    assert torch.equal(found.isnan(), expected.isnan())
    words = torch.int16 if found.dtype == torch.float16 else torch.int32
    known = ~expected.isnan()
    assert torch.equal(found.view(words)[known], expected.view(words)[known])
    assert torch.equal(found.signbit(), expected.signbit())


def test_every_float16_is_read(cache):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    _assert_same(_through(every, torch.float32), every.float())


def test_float32_is_rounded_to_float16(cache, seed):
    """Every float16, the middles between neighbours, and what lies beside both; then random words."""
    every = torch.arange(0x7C01, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    middles = (every[1:] + every[:-1]) / 2
    middles[-1] = 65520.0
    near = torch.cat([every[:-1], middles])
    beside = [near, *(torch.nextafter(near, torch.tensor(edge)) for edge in (-torch.inf, torch.inf))]
    words = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32).view(torch.float32)
    tiny = torch.tensor([2.0**-149, 2.0**-126, torch.inf, torch.nan])
    x = torch.cat([*beside, words, tiny])
    x = torch.cat([x, -x])
    _assert_same(_through(x, torch.float16), x.to(torch.float16))
