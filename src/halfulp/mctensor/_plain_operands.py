"""Encoding plain operands as MCTensors before an operator of several steps, so that no step has plain tensors alone.

Where an operator has one step, its rule reads a plain operand exactly. In several steps, `running_variance + eps` say,
torch would compute in the plain operand's own type before an MCTensor is met.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..arithmetic import renormalize
from ..subclass._in_backward import refuse_jit_trace, refuse_make_fx
from ._history import with_history
from ._mctensor import MCTensor, wrap
from ._result_type import ResultType, make_scaled, parts_of

_NESTS = (list, tuple, dict)


def is_plain(x: Any) -> bool:
    """Return whether an operand is a plain floating-point tensor."""
    return isinstance(x, Tensor) and not isinstance(x, MCTensor) and x.is_floating_point()


def has_plain(arguments: tuple, options: dict) -> bool:
    """Return whether any operand, lists of operands included, is a plain floating-point tensor."""
    for x in (*arguments, *options.values()):
        if is_plain(x) or (isinstance(x, _NESTS) and any(map(is_plain, tree_leaves(x)))):
            return True
    return False


def encode_plain_operands(operands: Any, form: ResultType, with_gradients: bool = False) -> Any:
    """Encode every plain floating-point tensor among nested operands as an MCTensor of an operator's result type.

    Those without dimensions, which promote nothing beside others that have some, keep all the digits of a float64.

    with_gradients: whether gradients flow back to the plain operands.
    """
    refuse_make_fx("MCTensor")
    refuse_jit_trace("MCTensor")
    ranked = any(isinstance(x, Tensor) and x.dim() and x.is_floating_point() for x in tree_leaves(operands))

    def lift(x: Any) -> Any:
        if not is_plain(x):
            return x
        made = _encode_plain_operand(x.detach(), form, ranked)
        return with_history(x, made) if with_gradients else made

    return tree_map(lift, operands)


def _encode_plain_operand(x: Tensor, form: ResultType, ranked: bool) -> MCTensor:
    parts = parts_of(x, form.device)
    if ranked and not x.dim():
        return wrap(renormalize(parts, form.components, x.double().dtype), None, form.gradients)
    if form.scaled:
        return make_scaled(tuple(part.double() for part in parts), form)
    return wrap(renormalize(parts, form.components, form.dtype), None, form.gradients)
