"""A wrong kernel is found before its first real call."""

import math

import pytest
import torch

from halfulp._torch_versions import find_torch_dtype
from halfulp.kernels import KernelMismatchError, _canary, check_bits, same_bits
from halfulp.kernels.vector._machine_function import Kernel
from halfulp.rounding import _kernels, _quantize, quantize

DTYPES = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
FLOATS = sorted((x for x in DTYPES if x.is_floating_point), key=str)


def _codes(dtype: torch.dtype) -> torch.Tensor:
    """Words of a dtype: zeros, ones, infinities, NaNs of several payloads and signs, and numbers beside each."""
    bits = 8 * dtype.itemsize
    if bits == 8:
        return torch.arange(256, dtype=torch.uint8)
    tops = [0, 1, 0x3C, 0x3F, 0x40, 0x7B, 0x7C, 0x7E, 0x7F]
    words = [(top << 8 | low) << (bits - 16) for top in tops for low in (0, 0x80, 0xF0, 0xFF)]
    words += [word | 1 for word in words]
    words = sorted({*words, *(word - (1 << bits - 1) for word in words)})
    return torch.tensor(words, dtype={16: torch.int16, 32: torch.int32, 64: torch.int64}[bits])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_bits_of_every_two_elements(dtype):
    codes = _codes(dtype)
    values = codes.view(dtype)
    # Two float4 numbers lie in one byte, and none of them is NaN.
    numbers = [1.0] * len(codes) if dtype == find_torch_dtype("float4_e2m1fn_x2") else values.double().tolist()
    nans = [i for i, number in enumerate(numbers) if math.isnan(number)]
    assert nans or dtype == find_torch_dtype("float4_e2m1fn_x2")
    for i in {*range(0, len(codes), 25), *nans[:2], *nans[-2:]}:
        for k in range(len(codes)):
            wanted = i == k or (math.isnan(numbers[i]) and math.isnan(numbers[k]))
            assert same_bits(values[i], values[k]) is wanted, (codes[i], codes[k])
            assert same_bits(values[k], values[i]) is wanted, (codes[k], codes[i])


def test_one_element_of_many_that_differs_is_found():
    nan, x = torch.nan, torch.arange(6.0).view(2, 3)
    for place in range(6):
        for here, there in [(nan, 7.0), (7.0, nan), (0.0, -0.0), (torch.inf, nan), (torch.inf, -torch.inf)]:
            a, b = x.clone(), x.clone()
            a.view(-1)[place], b.view(-1)[place] = here, there
            assert not same_bits(a, b)
            assert not same_bits(a.T, b.T)
            a.view(-1)[place] = there
            assert same_bits(a.T, b.T.contiguous())


def test_same_bits_wants_one_dtype_and_shape():
    assert not same_bits(torch.ones(2), torch.ones(1, 2))
    assert not same_bits(torch.ones(()), torch.ones(1))
    assert not same_bits(torch.zeros(0), torch.zeros(0, 2))
    assert not same_bits(torch.ones(2), torch.ones(2).double())
    assert not same_bits(torch.ones(2).half(), torch.ones(2).bfloat16())
    assert not same_bits(torch.ones(2).int(), torch.ones(2))
    assert same_bits(torch.zeros(0, 2), torch.zeros(0, 2))
    assert same_bits(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert not same_bits(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert not same_bits(torch.tensor([True]), torch.tensor([False]))


def test_same_bits_of_complex_numbers_and_views():
    x = torch.tensor([complex(1, 0.0), complex(torch.nan, 2)])
    assert same_bits(x, x.clone())
    assert not same_bits(x, x.conj())
    assert same_bits(x.conj(), x.conj().resolve_conj())
    assert not same_bits(x[:1], torch.tensor([complex(1, -0.0)]))
    assert not same_bits(x[1:], torch.tensor([complex(3, 2)]))
    assert not same_bits(x[1:], torch.tensor([complex(torch.nan, 3)]))
    assert same_bits(x.conj().imag, -x.imag)
    assert not same_bits(x.conj().imag, x.imag)
    assert same_bits(torch.ones(1).expand(3), torch.ones(3))


def test_check_bits():
    check_bits("fine", lambda: [torch.ones(2)], lambda: [torch.ones(2)])
    with pytest.raises(KernelMismatchError, match=r"broken.*result 1.*HALFULP_ENGINE"):
        check_bits("broken", lambda: [torch.ones(2), torch.ones(2)], lambda: [torch.ones(2), torch.zeros(2)])


def test_a_wrong_kernel_raises(monkeypatch):
    monkeypatch.setattr(_canary, "_verified_kernel_keys", set())
    idle = Kernel(lambda packed: None, lambda *arguments: b"")
    monkeypatch.setattr(_kernels, "_compile_kernel", lambda *arguments: idle)
    _kernels.prepare_rounding_plan.cache_clear()
    _quantize._make_plan_without_operator.cache_clear()
    monkeypatch.setattr(_quantize, "_latest_call", (None,) * 6)
    with pytest.raises(KernelMismatchError, match="quantize"):
        quantize(torch.randn(10), "bf16")
