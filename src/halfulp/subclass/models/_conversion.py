"""Replacing a model's parameters by tensors of another class, with the hooks that these need, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from . import _model_fallbacks, _outer_modules, _state_dict
from ._module_parameters import ParameterRef

Converted = dict[int, Tensor]


def converted(refs: Sequence[ParameterRef], convert: Callable[[ParameterRef], Tensor]) -> Converted:
    """Return the converted tensors by the ids of the present ones; one that several modules share is converted once.

    The model is not changed yet, so that a parameter that cannot be converted leaves it as it was.
    """
    found: Converted = {}
    for ref in refs:
        if id(ref.value) not in found:
            found[id(ref.value)] = convert(ref)
    return found


def put_converted(model: nn.Module, refs: Sequence[ParameterRef], values: Converted) -> None:
    """Put tensors of a subclass in the parameters' places; install state dicts and counts of fallbacks."""
    for ref in refs:
        ref.put(values[id(ref.value)])
        _state_dict.install(ref.module)
    _state_dict.install_check(model)
    _model_fallbacks.install(model)
    _outer_modules.watch()


def put_plain(model: nn.Module, refs: Sequence[ParameterRef], values: Converted) -> None:
    """Put plain tensors in the parameters' places, and remove what `put_converted` installed."""
    for ref in refs:
        ref.put(values[id(ref.value)])
    for module in model.modules():
        _state_dict.remove(module)
        _model_fallbacks.remove(module)
