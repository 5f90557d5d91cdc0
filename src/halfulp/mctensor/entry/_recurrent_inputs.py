"""Inputs of recurrent layers: torch.nn asks that they have the weights' dtype, so both come to the promoted one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from ...kernels import untraced
from ...subclass.models._module_parameters import remove_hooks
from .._mctensor import MCTensor
from ._promoted_operands import in_one_dtype


def install(model: nn.Module) -> None:
    """Let recurrent layers with MCTensors take inputs of any floating dtype, by hooks around their forward."""
    remove(model)
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and any(isinstance(p, MCTensor) for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_promote, with_kwargs=True)
            module.register_forward_hook(_restore, always_call=True)


def remove(model: nn.Module) -> None:
    """Remove the hooks of `install`."""
    remove_hooks(model.modules(), lambda hook: hook is _promote or hook is _restore)


@untraced
def _promote(module: Any, arguments: tuple, options: dict) -> tuple[tuple, dict] | None:
    weights = _own_weights(module)
    packed, (arguments, options) = _opened((arguments, options))  # older torch sees no tensors inside of a packed one
    given = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor) and x.is_floating_point()]
    if all(x.dtype == weights[0].dtype for x in given) or torch.is_autocast_enabled(weights[0].device.type):
        return None
    with torch.enable_grad():  # a thread that records gradients may meet the weights of one that does not
        arguments, options, module._flat_weights = in_one_dtype((arguments, options, weights))
    return _closed((arguments, options), packed)


@untraced
def _restore(module: Any, arguments: tuple, results: Any) -> None:
    _own_weights(module)


def _own_weights(module: Any) -> list:
    """Return a layer's own weights, put back in their place: an interrupted forward, or another thread's, may have not.

    They are read from the module each time, so that no list but theirs is ever taken for them.
    """
    if hasattr(module, "_update_flat_weights"):  # else forward would, where parameters are new objects
        module._update_flat_weights()
    own = [getattr(module, name, None) for name in module._flat_weights_names]
    if any(x is not y for x, y in zip(own, module._flat_weights, strict=True)):
        module._flat_weights = own
    return own


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
