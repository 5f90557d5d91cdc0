"""Counts of fallbacks by model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from ...kernels import untraced
from .. import _fallbacks as _fallback
from .._recorders import refuse_at_call
from ._hooks import remove_hooks
from ._module_parameters import check_module

_COUNTS = "_halfulp_fallbacks"


def fallbacks(model: nn.Module | None = None) -> dict[str, int]:
    """How often each operator without a rule ran on plain tensors instead: in float64, or for scaled ones in float32.

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


def install(model: nn.Module) -> None:
    """Count the fallbacks of a model's forward and backward passes."""
    if _COUNTS not in model.__dict__:
        model.__dict__[_COUNTS] = Counter()
        model.register_forward_pre_hook(_begin)


def remove(module: nn.Module) -> None:
    """Remove a model's counts and hooks."""
    counts = module.__dict__.pop(_COUNTS, None)
    remove_hooks([module], lambda hook: hook is _begin)
    if _fallback._running.counts is counts:
        _fallback._running.counts = None


@untraced
def _begin(module: nn.Module, arguments: Any) -> None:
    """Attribute the fallbacks that follow to this model, and refuse recorders."""
    if not torch.compiler.is_compiling():
        refuse_at_call(module, arguments)
    _fallback._running.counts = module.__dict__[_COUNTS]
