"""torch operators: what a user's torch.compile may meet, opaque so that no compiler removes a rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from .._torch_import import defining_operators
from .._torch_versions import CUDAGRAPH_UNSAFE, lacks

_library = torch.library.Library("halfulp", "DEF")


def define_operator(
    schema: str, implementation: Callable, fake: Callable, random: bool = False, host: bool = False
) -> OpOverload:
    """Define `halfulp::<schema>` with one implementation for every device, and its shape rule for tracing.

    Args:
        schema: such as "round(Tensor x, float scale) -> Tensor".
        implementation: takes plain tensors; chooses its engine by their device.
        fake: the same call on tensors without data; returns tensors of the right shape, dtype and device.
        random: whether it draws from torch's default generator; then no compiler merges two calls or repeats one.
        host: whether what the host knows as it runs decides what it does; no CUDA graph replays it then. So with
            `random`, whose draws begin on the host.

    Returns:
        The operator's default overload, callable.
    """
    name = schema.split("(", 1)[0]
    tags = [torch.Tag.pt2_compliant_tag]
    tags += [torch.Tag.nondeterministic_seeded] if random else []
    if random or host:
        tags += [CUDAGRAPH_UNSAFE] if CUDAGRAPH_UNSAFE else []
        implementation = implementation if CUDAGRAPH_UNSAFE else _outside_cuda_graphs(name, implementation)
    with defining_operators():
        _library.define(schema, tags=tuple(tags))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfulp::{name}", fake, lib=_library)
    return getattr(torch.ops.halfulp, name).default


def _outside_cuda_graphs(name: str, implementation: Callable) -> Callable:
    """Refuse to be captured into a CUDA graph, which would replay what the host decided at the capture."""

    def run(*arguments: Any) -> Any:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            feature = f"halfulp::{name} must be left out of CUDA graphs, which needs Tag.cudagraph_unsafe"
            raise lacks(feature, 'compile without mode="reduce-overhead" and "max-autotune"')
        return implementation(*arguments)

    return run


def under_transform() -> bool:
    """Return whether a torch.func transform or a level of forward-mode differentiation is active.

    Not while a compiler traces, which knows the transforms itself.

    There an operator's registered backward rule is no rule: grad refuses it and jvp takes its derivative for 0. An
    autograd.Function with a jvp serves all of them, at a cost that a plain call need not pay.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
