"""Refusals of what cannot see into tensors of several parts: recorders of graphs, torch.func.jvp of several dtypes."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_PROXY, _FAKE = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE
# How a model becomes plain, by the tensor class.
_PLAIN = {"ScaledTensor": "halfulp.scaled.unscalify", "MCTensor": "halfulp.mctensor.single_component"}


def refuse_make_fx(kind: str) -> None:
    """Raise where make_fx records operators of real tensors. A compiler records those of tensors without values.

    Raises:
        NotImplementedError: it does.
    """
    if not torch._C._len_torch_dispatch_stack():
        return
    if torch._C._get_dispatch_mode(_PROXY) is not None and torch._C._get_dispatch_mode(_FAKE) is None:
        raise NotImplementedError(_words("make_fx", kind))


def refuse_jit_trace(kind: str) -> None:
    """Raise where torch.jit.trace records, which keeps what it cannot see as a constant, or fails at a shape.

    Raises:
        NotImplementedError: it does.
    """
    if torch._C._is_tracing():
        raise NotImplementedError(_words("torch.jit.trace", kind))


def refuse_jvp(operands: Iterable[Tensor], what: str) -> None:
    """Raise inside torch.func.jvp if operands of a product have several dtypes.

    It derives a product outside of all that is made of an MCTensor, by torch's formulas, which have one dtype.

    Raises:
        NotImplementedError: they do.
    """
    if getattr(sys.modules.get("torch._functorch.eager_transforms"), "JVP_NESTING", 0):
        dtypes = {x.dtype: None for x in operands if x.is_floating_point()}
        if len(dtypes) > 1:
            raise NotImplementedError(
                f"torch.func.jvp of {what} with an MCTensor and operands of {', '.join(map(str, dtypes))}: give all "
                "one dtype, x.to(parameter.dtype) say, or take torch.autograd.forward_ad, which needs no such thing"
            )


def refuse_at_call(model: nn.Module, arguments: tuple) -> None:
    """Raise as a model is called if torch.jit.trace records it, or torch.func.jvp would derive it in several dtypes.

    Raises:
        NotImplementedError: so it is.
    """
    if torch._C._is_tracing():
        kinds = {type(p.data).__name__ for p in model.parameters()}
        for kind in kinds & _PLAIN.keys():
            refuse_jit_trace(kind)
    if getattr(sys.modules.get("torch._functorch.eager_transforms"), "JVP_NESTING", 0):
        parts = [p for p in model.parameters() if type(p.data).__name__ == "MCTensor"]
        refuse_jvp([*parts, *(x for x in arguments if isinstance(x, Tensor))] if parts else [], type(model).__name__)


def _words(recorder: str, kind: str) -> str:
    return (
        f"{recorder} would record constants in place of {kind}s, which are made of several tensors: record a plain "
        f"copy of the model, {_PLAIN[kind]}(copy.deepcopy(model)), or run the model as it is by torch.compile"
    )
