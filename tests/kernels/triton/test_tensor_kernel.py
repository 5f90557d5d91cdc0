"""Kernels of whole tensors: their text, and what the compiler makes of it."""

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.kernels import address, square_root
from halfulp.kernels._device_function import ElementTraceBuilder, PointerTableFunction
from halfulp.kernels._operations import load64, real, store64, word
from halfulp.kernels.triton._launch import TensorKernel

from .compiled import inexact, instructions
from .interpreted import interpreted
from .source import check_source

NUMBERS = (-0.0, float("nan"), 5e-324)


def _wide() -> TensorKernel:
    """A root of |-(x / y)| in float64, times a constant, where x is not a special number."""
    element = ElementTraceBuilder(3, 4, "f64")
    i, (x, y, out) = element.index, element.arrays
    a, b = real(load64(x, i)), real(load64(y, i))
    value = square_root(abs(-(a / b))) * element.constants[2] - element.constants[0]
    for number in NUMBERS:
        value = hu.kernels.select(a == np.float64(number), np.float64(number), value)
    store64(out, i, word(value))
    return TensorKernel(PointerTableFunction(element.trace, 3, 4))


def wide_results(device: str) -> list[bool]:
    """Whether the kernel above gives torch's results, with whole vectors and without; printed when run apart."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(1040, generator=generator, dtype=torch.float64) for _ in range(2))
    x[:4], y[:4] = torch.tensor([0.0, 5e-324, 2.0**-1070, torch.inf], dtype=torch.float64), 1.0
    wanted = square_root((x / y).abs()) * 3.0 - 2.0  # torch's own is an ulp off for some
    wanted = torch.where(x == 0, -0.0, torch.where(x == 5e-324, x, wanted))
    kernel, found = _wide(), []
    for count in (1040, 1039):
        out = torch.full((1040,), 7.0, dtype=torch.float64, device=device)
        here = [one.to(device) for one in (x, y)]
        given = [address(one) for one in (*here, out)]
        constants = kernel.select_launch_constants(np.array([2.0, 99.0, 3.0, 99.0]).view(np.uint64))
        assert len(constants) == 2, "those that are used"
        kernel.launch(torch.device(device), given, count, constants, aligned=count % 16 == 0)
        found.append(hu.kernels.same_bits(out[:count].cpu(), wanted[:count]))
        found.append(bool((out[count:] == 7.0).all()))
    return found


def test_operations_on_64_bits_are_those_of_torch():
    assert (
        interpreted("tests.kernels.triton.test_tensor_kernel", "test.wide_results('cpu')") == "[True, True, True, True]"
    )


@pytest.mark.cuda
def test_operations_on_64_bits_are_those_of_torch_on_a_gpu():
    pytest.importorskip("triton", reason="Triton is not installed")
    assert wide_results("cuda") == [True] * 4


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_operations_on_64_bits_round_correctly(capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = instructions(_wide(), capability, aligned=True)
    assert inexact(found) == []
    assert {"ld.global.v2.b64", "st.global.v2.b64", "div.rn.f64", "sqrt.rn.f64"} <= set(found)


def test_the_text_holds_what_triton_can_compile():
    text = _wide().source
    assert {"element", "run"} <= check_source(text)
    assert "def run(a0: tl.int64, a1: tl.int64, a2: tl.int64, c0: tl.int64, c2: tl.int64, key" in text
    assert "real(tl.full([], 9223372036854775808, tl.uint64))" in text, "the sign of a zero"
    assert "real(tl.full([], 9221120237041090560, tl.uint64))" in text, "a NaN"
