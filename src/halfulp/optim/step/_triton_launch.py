"""Steps on an accelerator: one Triton launch for all parameters of a step specification, by addresses in a table."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels import check_bits, note_and_warn_once
from ...kernels.triton._writer import OPTIONS, load_module
from ._spec import StepSpec
from ._triton_kernel import METER, PARTS, TILE, triton_source

VECTOR = 16
_kernels: dict[tuple[StepSpec, torch.device], Any] = {}


@dataclass
class DeviceChunks:
    """The chunks of a batch on its device, those first that hold whole vectors at aligned addresses.

    Attributes:
        rows: bool array of shape (parameters,): whose addresses are aligned.
        chunks: int64 array of shape (chunks, 4), in the order in which they lie there.
        aligned: how many come first.
        tensor: the same on the device.
    """

    rows: np.ndarray
    chunks: np.ndarray
    aligned: int
    tensor: torch.Tensor


def ready(spec: StepSpec, device: torch.device, trial: Callable) -> Any:
    """Return a kernel, compared with the reference before its first use; None, with a warning, if it cannot be used.

    Args:
        spec: of step.
        device: where the parameters lie.
        trial: (spec, run, device) -> what a step on fixed elements writes; by the reference without `run`.
    """
    key = (spec, device)
    if key not in _kernels:
        try:
            kernel = load_module(triton_source(spec))["step"]
            run = functools.partial(launch, spec, kernel, device)
            check_bits(spec.name, lambda: trial(spec, run, device), lambda: trial(spec), spec.advice)
            _kernels[key] = kernel
        except Exception as error:  # whatever a compiler for another machine may raise
            _kernels[key] = None
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            note_and_warn_once(
                "engine",
                f"no Triton kernel for optimizer step {spec.name} on {device.type} ({reason}): plain torch instead",
            )
    return _kernels[key]


def launch(
    spec: StepSpec,
    kernel: Any,
    device: torch.device,
    chunks: np.ndarray,
    pointers: np.ndarray,
    constants: np.ndarray,
    keys: np.ndarray,
    held: DeviceChunks | None = None,
) -> tuple[DeviceChunks, np.ndarray | None]:
    """One step of every parameter of a batch.

    Args:
        spec, kernel, device: the step specification, its kernel, and where it runs.
        chunks: int64 array of shape (chunks, 4).
        pointers: int64 array of shape (parameters, pointers).
        constants: float32 array of shape (parameters, constants).
        keys: uint64 array of shape (parameters, words).
        held: what an earlier call with the same chunks returned.

    Returns:
        What to give to the next call, and for a metered step a float64 array of shape (chunks, 4) in its order.
    """
    held = _placed(chunks, (pointers % VECTOR == 0).all(1), device, held)
    columns = [pointers, constants.view(np.uint32).astype(np.int64), keys.view(np.int64)]
    parameters = _to_device(np.concatenate(columns, 1), device)
    count = len(chunks)
    meter = torch.zeros(count if spec.metered else 0, PARTS, len(METER), dtype=torch.float64, device=device)
    parts = -(-int(chunks[:, 2].max(initial=0)) // TILE)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for first, last, aligned in ((0, held.aligned, True), (held.aligned, count, False)):
            if first < last:
                grid = (last - first, parts)
                kernel[grid](held.tensor[first:last], parameters, meter[first:], aligned, **OPTIONS)
    return held, meter.sum(1).cpu().numpy() if spec.metered else None


def _placed(chunks: np.ndarray, rows: np.ndarray, device: torch.device, held: DeviceChunks | None) -> DeviceChunks:
    if held is not None and np.array_equal(held.rows, rows):
        return held
    whole = rows[chunks[:, 0]] & (chunks[:, 1:3] % VECTOR == 0).all(1)
    ordered = chunks[np.argsort(~whole, kind="stable")]
    return DeviceChunks(rows, ordered, int(whole.sum()), _to_device(ordered, device))


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a table to a device without waiting for it: from pageable memory torch would synchronise the stream."""
    table = torch.from_numpy(array)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
