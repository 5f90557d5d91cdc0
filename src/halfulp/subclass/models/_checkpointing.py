"""Activation checkpointing: what the backward pass computes again, computed under the same mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._messages import ENVIRONMENT

Wrapper = Callable[[Callable], Callable]
_ADVICE = "checkpoint the whole model instead, or run it without checkpointing"


def capture_hooks(pack: Callable, wrap: Wrapper, what: str) -> None:
    """Make what torch.utils.checkpoint(use_reentrant=False) recomputes run under a mode.

    Its frame is reached through the saved-tensor hooks that are on top while the checkpointed function runs; hooks of
    others are left alone, and so is a frame that the same function has wrapped already.

    Args:
        pack: the hook that packs.
        wrap: makes a function run under the mode.
        what: names the mode in errors.

    Raises:
        NotImplementedError: If this torch keeps its frames differently.
    """
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint" or "_recomputation_hook" in pack.__qualname__:
        return
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or ()))
    frame = cells["frame"].cell_contents if "frame" in cells else None
    if frame is None or not callable(getattr(frame, "recompute_fn", None)):
        raise NotImplementedError(
            f"{what} does not know the activation checkpointing of torch {torch.__version__}: {_ADVICE}; {ENVIRONMENT}"
        )
    if getattr(frame.recompute_fn, "_wrapped_by", None) is wrap:
        return
    frame.recompute_fn = wrap(frame.recompute_fn)
    frame.recompute_fn._wrapped_by = wrap


def capture_node(node: Any, name: str, wrap: Wrapper, what: str) -> None:
    """Run what reentrant checkpointing (torch.utils.checkpoint) recomputes in the backward pass under a mode."""
    if name.endswith("CheckpointFunctionBackward"):
        if not callable(getattr(node, "run_function", None)):
            raise NotImplementedError(f"{what} does not know the checkpointing of {name}: {_ADVICE}; {ENVIRONMENT}")
        node.run_function = wrap(node.run_function)
