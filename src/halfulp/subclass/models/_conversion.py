"""Replacing a model's parameters by tensors of another class, and back; the fallbacks of such a model, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import untraced
from .. import _fallbacks as _fallback
from .._in_backward import refuse_at_call
from . import _outer_modules, _state_dict
from ._module_parameters import ParameterRef, check_module, remove_hooks

_COUNTS = "_halfulp_fallbacks"


def fallbacks(model: nn.Module | None = None) -> dict[str, int]:
    """Return how often operators without a rule ran on plain tensors: in float64, or in float32 for scaled ones.

    Args:
        model: one that `multicomponent` or `scalify` changed, or that holds such a model: counted since then, in its
            forward passes and in whatever follows one until another such model runs forward: its backward pass, the
            optimizer's step. None counts the whole process.

    Raises:
        ValueError: nothing is counted for this model.

    >>> import torch
    >>> from halfulp.mctensor._convert_model import multicomponent
    >>> fallbacks(multicomponent(torch.nn.Linear(2, 2)))
    {}
    """
    if model is None:
        return _fallback.fallbacks()
    check_module(model, "fallbacks")
    counts = [module.__dict__[_COUNTS] for module in model.modules() if _COUNTS in module.__dict__]
    if not counts:
        raise ValueError(
            f"this {type(model).__name__} has neither multi-component nor scaled parameters: hu.multicomponent(model) "
            "or hu.scalify(model)"
        )
    return dict(sum(counts, Counter()))


def install_counts(model: nn.Module) -> None:
    """Count the fallbacks of a model's forward and backward passes."""
    if _COUNTS not in model.__dict__:
        model.__dict__[_COUNTS] = Counter()
        model.register_forward_pre_hook(_begin)


def remove_counts(module: nn.Module) -> None:
    """Remove a model's counts and hooks."""
    counts = module.__dict__.pop(_COUNTS, None)
    remove_hooks([module], lambda hook: hook is _begin)
    if _fallback._running.counts is counts:
        _fallback._running.counts = None


@untraced
def _begin(module: nn.Module, arguments: Any) -> None:
    """Attribute the following fallbacks to this model, and refuse recorders."""
    if not torch.compiler.is_compiling():
        refuse_at_call(module, arguments)
    _fallback._running.counts = module.__dict__[_COUNTS]


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
    install_counts(model)
    _outer_modules.watch()


def put_plain(model: nn.Module, refs: Sequence[ParameterRef], values: Converted) -> None:
    """Put plain tensors in the parameters' places, and remove what `put_converted` installed."""
    for ref in refs:
        ref.put(values[id(ref.value)])
    for module in model.modules():
        _state_dict.remove(module)
        remove_counts(module)
