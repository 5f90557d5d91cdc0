"""torch operators: what a user's torch.compile may meet, opaque so that no compiler removes a rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from .._torch_import import defining_operators

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
    tags += [torch.Tag.cudagraph_unsafe] if random or host else []
    with defining_operators():
        _library.define(schema, tags=tuple(tags))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfulp::{name}", fake, lib=_library)
    return getattr(torch.ops.halfulp, name).default
