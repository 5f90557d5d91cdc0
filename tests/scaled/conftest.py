"""Operators on narrow payloads held to the same operators on plain float32 tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfulp.scaled import ScaledTensor
from halfulp.tensors import strict


def _value(x: Tensor) -> Tensor:
    return x.detach().decode() if isinstance(x, ScaledTensor) else x.detach()


@pytest.fixture
def differences() -> Callable:
    """The relative distances of a function's result and gradients from float32's; a fallback is an error.

    The function takes tensors of the given shapes, standard normal; scaled ones get a payload dtype. Both start from
    the values that the payloads hold.
    """

    def measure(function: Callable, shapes: list, dtype: torch.dtype = torch.float16) -> list[float]:
        scaled = [ScaledTensor.encode(torch.randn(shape), dtype).requires_grad_() for shape in shapes]
        plain = [_value(x).requires_grad_() for x in scaled]
        expected = function(*plain)
        gradient = ScaledTensor.encode(torch.randn(expected.shape), dtype)
        expected.backward(_value(gradient))
        with strict():
            found = function(*scaled)
            found.backward(gradient)
        assert isinstance(found, ScaledTensor)
        pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(scaled, plain))]
        return [((_value(x) - _value(y)).norm() / _value(y).norm()).item() for x, y in pairs]

    return measure
