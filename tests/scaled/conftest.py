"""Operators on narrow payloads held to the same operators on plain float32 tensors."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfulp.scaled import ScaledTensor
from halfulp.subclass import strict

FAR = 2.0**-60


def _value(x: Tensor) -> Tensor:
    return x.detach().decode() if isinstance(x, ScaledTensor) else x.detach()


@pytest.fixture(params=["on a CPU", "blind", "fused"])
def where_values_lie(request, benchmark_module):
    """Rules that look at values, as on a CPU; that do not, as on an accelerator; its kernels, by their reference."""
    launches = benchmark_module("_gpu._launches")
    with contextlib.ExitStack() as stack:
        if request.param != "on a CPU":
            stack.enter_context(launches.blind())
        if request.param == "fused":
            stack.enter_context(launches.fused_kernels())
        yield request.param


@pytest.fixture
def differences(where_values_lie) -> Callable:
    """The relative distances of a function's result and gradients from float32's; a fallback is an error.

    The function takes tensors of the given shapes, standard normal; scaled ones get a payload dtype. Both start from
    the values that the payloads hold. A gradient far below the payload's range gives the same gradients, as far below.
    """

    def measure(function: Callable, shapes: list, dtype: torch.dtype = torch.float16) -> list[float]:
        scaled = [ScaledTensor.encode(torch.randn(shape), dtype).requires_grad_() for shape in shapes]
        plain = [_value(x).requires_grad_() for x in scaled]
        expected = function(*plain)
        gradient = ScaledTensor.encode(torch.randn(expected.shape), dtype)
        expected.backward(_value(gradient))
        far = ScaledTensor(gradient.payload, gradient.scale * FAR, gradient.dtype)
        with strict():
            found = function(*scaled)
            tiny = torch.autograd.grad(found, scaled, far, retain_graph=True)
            found.backward(gradient)
        assert isinstance(found, ScaledTensor)
        for x, small in zip(scaled, tiny, strict=True):
            wanted = _value(x.grad)
            # Where the scale came out as another, sixteen bits round what is below their normal numbers otherwise.
            assert torch.allclose(_value(small) / FAR, wanted, rtol=0, atol=2.0**-22 * wanted.abs().max().item())
        pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(scaled, plain))]
        return [((_value(x) - _value(y)).norm() / _value(y).norm()).item() for x, y in pairs]

    return measure
