"""Activation checkpointing: what is computed again in the backward pass is rounded again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._messages import ENVIRONMENT

Wrapper = Callable[[Callable], Callable]
_ADVICE = "checkpoint the whole emulated model instead, or run it without checkpointing"


def capture_hooks(pack: Callable, emulated: Wrapper) -> None:
    """Make what torch.utils.checkpoint(use_reentrant=False) recomputes run under emulation.

    Its frame is reached through the saved-tensor hooks that are on top while the checkpointed function runs; hooks of
    others are left alone.

    Args:
        pack: the hook that packs.
        emulated: makes a function run under emulation.

    Raises:
        NotImplementedError: If this torch keeps its frames differently.
    """
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint" or "_recomputation_hook" in pack.__qualname__:
        return
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or ()))
    frame = cells["frame"].cell_contents if "frame" in cells else None
    if frame is None or not callable(getattr(frame, "recompute_fn", None)):
        raise NotImplementedError(
            f"emulate does not know the activation checkpointing of torch {torch.__version__}: {_ADVICE}; {ENVIRONMENT}"
        )
    frame.recompute_fn = emulated(frame.recompute_fn)


def capture_node(node, name: str, emulated: Wrapper) -> None:
    """Emulate what reentrant checkpointing (torch.utils.checkpoint) recomputes in the backward pass."""
    if name.endswith("CheckpointFunctionBackward"):
        if not callable(getattr(node, "run_function", None)):
            raise NotImplementedError(f"emulate does not know the checkpointing of {name}: {_ADVICE}")
        node.run_function = emulated(node.run_function)
