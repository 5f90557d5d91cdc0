"""What every launch of a Triton kernel shares: the device, the first use with its comparison, and who has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from .._canary import check_bits
from .._engine import note, note_and_warn_once, reference_in_this_thread
from .._operator import under_transform

_kernels: dict[Hashable, Any] = {}


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a kernel runs on a device: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a table to a device without waiting for it: from pageable memory torch would synchronise the stream."""
    table = torch.from_numpy(array)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def ready(
    key: Hashable,
    name: str,
    device: torch.device,
    build: Callable[[], Any],
    run: Callable[[Any, torch.device], list[torch.Tensor]],
    reference: Callable[[], list[torch.Tensor]],
) -> Any:
    """Return a kernel, compared with the reference before its first use; None, counted, if it cannot be used.

    Args:
        key: of the kernel.
        name: of what it computes, for messages.
        device: where it is to run.
        build: makes it.
        run: (kernel, device) -> what it writes for fixed elements, on the CPU.
        reference: what is to be written, by plain torch on the CPU.
    """
    known = _kernels.get((key, device), _UNKNOWN)
    if known is _UNKNOWN:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The comparison reads results back, which no capture allows: a call outside of one makes it.
            note("engine", f"{name} by plain torch operations: its first call was captured into a CUDA graph")
            return None
        if under_transform():
            note("engine", f"{name} by plain torch operations: its first call was under a transform of torch.func")
            return None  # which would take the comparison for its own
        known = _kernels[key, device] = _tried(name, device, build, run, reference)
    if known is None:
        note("engine", f"no Triton kernel for {name} on {device.type}: plain torch instead")
    return known


_UNKNOWN = object()


def _tried(name: str, device: torch.device, build: Any, run: Any, reference: Any) -> Any:
    try:
        kernel = build()
        with reference_in_this_thread():  # an engine that was asked for may not run what the CPU does on the way
            check_bits(name, lambda: run(kernel, device), lambda: list(reference()))
    except torch.OutOfMemoryError:
        raise  # which says nothing of the kernel
    except Exception as error:  # whatever a compiler for another machine may raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        note_and_warn_once("engine", f"no Triton kernel for {name} on {device.type} ({reason}): plain torch instead")
        return None
    return kernel
