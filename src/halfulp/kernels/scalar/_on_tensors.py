"""Functions of one element run on tensors."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch

from .._devices import float32_root

_TENSOR_OPERATIONS = {
    "sqrt": float32_root,
    "divide": torch.div,
    "maximum": torch.maximum,
    "sign_of": lambda x: torch.where(x.isnan(), x, x.sign()),
}


def on_tensors(function: Callable) -> Callable:
    """Convert a function of scalars, made of + - * `sqrt` `divide` `maximum` `sign_of`, to one of float32 tensors."""
    namespace = {name: _TENSOR_OPERATIONS.get(name, value) for name, value in function.__globals__.items()}
    for name in _names(function.__code__):
        value = namespace.get(name)
        if isinstance(value, types.FunctionType) and name not in _TENSOR_OPERATIONS:
            namespace[name] = on_tensors(value)
    return types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)


def _names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return sorted(set(names))
