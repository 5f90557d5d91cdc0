"""A wrong kernel is found before its first real call."""

import pytest
import torch

from halfulp.kernels import KernelMismatchError, check_bits, same_bits
from halfulp.rounding import _kernels, quantize


def test_same_bits():
    nan = torch.tensor([torch.nan])
    assert same_bits(nan, (nan.view(torch.int32) | 1).view(torch.float32))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.ones(2), torch.ones(1, 2))
    assert not same_bits(torch.ones(2), torch.ones(2).double())
    assert same_bits(torch.tensor([1, 2]), torch.tensor([1, 2]))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
        assert same_bits(torch.ones(3).to(dtype), torch.ones(3).to(dtype))


def test_check_bits():
    check_bits("fine", lambda: [torch.ones(2)], lambda: [torch.ones(2)])
    with pytest.raises(KernelMismatchError, match=r"broken.*result 1.*HALFULP_ENGINE"):
        check_bits("broken", lambda: [torch.ones(2), torch.ones(2)], lambda: [torch.ones(2), torch.zeros(2)])


def test_a_wrong_kernel_raises(monkeypatch):
    monkeypatch.setattr(_kernels, "_kernel", lambda *arguments: lambda *arguments: None)
    with pytest.raises(KernelMismatchError, match="quantize"):
        quantize(torch.randn(10), "bf16")
