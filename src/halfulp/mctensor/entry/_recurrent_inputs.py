"""Inputs of recurrent layers: torch.nn asks that they have the weights' dtype, so both come to the promoted one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from ...kernels import untraced
from .._mctensor import MCTensor
from ._promoted_operands import in_one_dtype

# Where a layer keeps its own weights while those of another dtype are in their place.
_OWN_WEIGHTS = "_halfulp_flat_weights"


def install(model: nn.Module) -> None:
    """Let recurrent layers with MCTensors take inputs of any floating dtype, by hooks around their forward."""
    remove(model)
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and any(isinstance(p, MCTensor) for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_promote, with_kwargs=True)
            module.register_forward_hook(_restore, always_call=True)


def remove(model: nn.Module) -> None:
    """Remove the hooks of `install`."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _promote:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        for key, hook in list(module._forward_hooks.items()):
            if hook is _restore:
                del module._forward_hooks[key]
                module._forward_hooks_always_called.pop(key, None)


@untraced
def _promote(module: Any, arguments: tuple, options: dict) -> tuple[tuple, dict] | None:
    if hasattr(module, "_update_flat_weights"):  # else forward would, where parameters are new objects
        module._update_flat_weights()
    weights = module._flat_weights
    given = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor) and x.is_floating_point()]
    if all(x.dtype == weights[0].dtype for x in given) or torch.is_autocast_enabled(weights[0].device.type):
        return None
    packed, (arguments, options) = _opened((arguments, options))
    arguments, options, weights = in_one_dtype((arguments, options, list(weights)))
    module.__dict__.setdefault(_OWN_WEIGHTS, module._flat_weights)
    module._flat_weights = weights
    return _closed((arguments, options), packed)


@untraced
def _restore(module: Any, arguments: tuple, results: Any) -> None:
    own = module.__dict__.pop(_OWN_WEIGHTS, None)
    if own is not None:
        module._flat_weights = own


def _opened(given: tuple) -> tuple[PackedSequence | None, tuple]:
    """Return a packed sequence among arguments, and the arguments with its rows in its place."""
    arguments, options = given
    first = arguments[0] if arguments else options.get("input")
    if not isinstance(first, PackedSequence):
        return None, given
    if arguments:
        return first, ((first.data, *arguments[1:]), options)
    return first, (arguments, options | {"input": first.data})


def _closed(given: tuple, packed: PackedSequence | None) -> tuple[tuple, dict]:
    arguments, options = given
    if packed is None:
        return arguments, options
    if arguments:
        return (packed._replace(data=arguments[0]), *arguments[1:]), options
    return arguments, options | {"input": packed._replace(data=options["input"])}
