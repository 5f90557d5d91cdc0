"""Steps on an accelerator: one Triton launch for all parameters of a step specification, by addresses in a table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels.triton._launch import on_device, ready, to_device
from ...kernels.triton._table_kernel import PARTS, TILE
from ...kernels.triton._writer import OPTIONS, load_module
from ..parameters._step_spec import StepSpec
from ._triton_kernel import METER, largest_columns, scale_columns, triton_source
from ._triton_scales import LANES, expected_scales, scales_source, try_scales

VECTOR = 16


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


@dataclass(frozen=True)
class ScaledKernels:
    """The kernels of a step of scaled parameters, in the order in which they run.

    Attributes:
        read: fills the table of scales with the present ones.
        largest: finds the largest magnitudes, under the specification `amax`.
        choose: adds the new scales to the table.
        step: writes weights and states.
        keep: writes the new scales to their tensors, once all else is written.
        amax: the specification that finds the largest magnitudes.
    """

    read: Any
    largest: Any
    choose: Any
    step: Any
    keep: Any
    amax: StepSpec


def step_kernel(spec: StepSpec, device: torch.device, trial: Callable) -> Any:
    """Return a kernel, compared with the reference before its first use; None, counted, if it cannot be used.

    Args:
        spec: of step.
        device: where the parameters lie.
        trial: (spec, run, device) -> what a step on fixed elements writes; by the reference without `run`.
    """
    return ready(
        spec,
        f"optimizer step {spec.name}",
        device,
        lambda: load_module(triton_source(spec))["step"],
        lambda kernel, device: trial(spec, functools.partial(_run_trial, spec, kernel, device), device),
        lambda: trial(spec),
    )


def scaled_kernels(spec: StepSpec, amax: StepSpec, device: torch.device, trial: Callable) -> ScaledKernels | None:
    """Do what `step_kernel` does for a step of scaled parameters; `amax` finds the largest magnitudes."""
    largest, step = step_kernel(amax, device, trial), step_kernel(spec, device, trial)
    if largest is None or step is None:
        return None

    def build() -> ScaledKernels:
        scales = load_module(scales_source(spec))
        return ScaledKernels(scales["read_scales"], largest, scales["choose_scales"], step, scales["keep_scales"], amax)

    def run(kernels: ScaledKernels, device: torch.device) -> list[torch.Tensor]:
        def choose(pointers, constants, keys, addresses, words) -> torch.Tensor:
            parameters = parameter_table(spec, device, pointers, constants, keys, addresses)
            table = choose_scales(spec, kernels, parameters, len(words), lambda present: words)
            keep_scales(kernels, parameters, table)
            return table

        return try_scales(spec, device, choose)

    name = f"the scales of optimizer step {spec.name}"
    kernels: ScaledKernels | None = ready((spec, "scales"), name, device, build, run, lambda: expected_scales(spec))
    return kernels


def _run_trial(spec: StepSpec, kernel: Any, device: torch.device, chunks, pointers, constants, keys) -> Any:
    """Run a kernel under constants that hold the scales too; return the largest magnitudes if it finds them."""
    own = len(spec.rule.constants)
    held = _placed(chunks, _are_aligned(pointers), device, None)
    parameters = parameter_table(spec, device, pointers, constants[:, :own], keys)
    scales = to_device(np.ascontiguousarray(constants[:, own:]), device) if spec.scaled else None
    found = _run(spec, kernel, held, parameters, len(pointers), scales)
    return found.cpu().numpy().view(np.float32) if spec.finds_amax else None


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
        keys: uint64 array of shape (parameters, 1), or (parameters, 0) without draws.
        held: what an earlier call with the same chunks returned.

    Returns:
        What to give to the next call, and for a metered step a float64 array of shape (chunks, 4) in its order.
    """
    held = _placed(chunks, _are_aligned(pointers), device, held)
    parameters = parameter_table(spec, device, pointers, constants, keys)
    return held, _counts(spec, _run(spec, kernel, held, parameters, len(pointers)))


def launch_scaled(
    spec: StepSpec,
    kernels: ScaledKernels,
    device: torch.device,
    chunks: np.ndarray,
    pointers: np.ndarray,
    constants: np.ndarray,
    keys: np.ndarray,
    addresses: np.ndarray,
    held: DeviceChunks | None = None,
) -> tuple[DeviceChunks, np.ndarray | None, torch.Tensor]:
    """Do what `launch` does for scaled parameters, under scales that the device chooses, and write those too.

    Args:
        spec, device, chunks, pointers, keys, held: as there.
        kernels: of the step.
        constants: of the rule.
        addresses: int64 array of shape (parameters, 2), of the scales of weights and gradients.

    Returns:
        Also the scales under which the weights are stored, float32 (parameters,) on the device.
    """
    held = _placed(chunks, _are_aligned(pointers), device, held)
    parameters = parameter_table(spec, device, pointers, constants, keys, addresses)
    count = len(pointers)
    find = functools.partial(_run, kernels.amax, kernels.largest, held, parameters, count)
    scales = choose_scales(spec, kernels, parameters, count, find)
    written = _run(spec, kernels.step, held, parameters, count, scales)
    keep_scales(kernels, parameters, scales)
    return held, _counts(spec, written), scales[:, scale_columns(spec).index("new_scale")]


def choose_scales(
    spec: StepSpec,
    kernels: ScaledKernels,
    parameters: torch.Tensor,
    count: int,
    find_largest: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the table of scales before and after a step; their tensors stay as they are.

    Args:
        spec, kernels: of the step.
        parameters: the parameter table, of `count` rows.
        count: of parameters.
        find_largest: (table of present scales) -> words of the largest magnitudes under them.
    """
    device, grid = parameters.device, (-(-count // LANES),)
    scales = torch.empty(count, len(scale_columns(spec)), dtype=torch.float32, device=device)
    with on_device(device):
        kernels.read[grid](parameters, scales, count, **OPTIONS)
    largest = find_largest(scales)
    with on_device(device):
        kernels.choose[grid](parameters, largest, scales, count, **OPTIONS)
    return scales


def keep_scales(kernels: ScaledKernels, parameters: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the new scales of a table to their tensors."""
    count = len(scales)
    with on_device(scales.device):
        kernels.keep[(-(-count // LANES),)](parameters, scales, count, **OPTIONS)


def parameter_table(
    spec: StepSpec,
    device: torch.device,
    pointers: np.ndarray,
    constants: np.ndarray,
    keys: np.ndarray,
    addresses: np.ndarray | None = None,
) -> torch.Tensor:
    """Return the parameter table of `Columns` on a device; without addresses of scales these are 0."""
    columns = [pointers, np.ascontiguousarray(constants).view(np.uint32).astype(np.int64), keys.view(np.int64)]
    if spec.scaled:
        columns.append(np.zeros((len(pointers), 2), np.int64) if addresses is None else addresses)
    return to_device(np.concatenate(columns, 1), device)


def _run(
    spec: StepSpec,
    kernel: Any,
    held: DeviceChunks,
    parameters: torch.Tensor,
    count: int,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a kernel on all chunks; return the meter of the chunks, or the words of the parameters' largest numbers."""
    chunks, device = len(held.chunks), parameters.device
    if spec.finds_amax:
        meter = torch.zeros(count, largest_columns(spec), dtype=torch.int32, device=device)
    else:
        meter = torch.zeros(chunks if spec.metered else 0, PARTS, len(METER), dtype=torch.float64, device=device)
    parts = -(-int(held.chunks[:, 2].max(initial=0)) // TILE)
    more = () if scales is None else (scales,)
    with on_device(device):
        for first, last, aligned in ((0, held.aligned, True), (held.aligned, chunks, False)):
            if first < last:
                to = meter if spec.finds_amax else meter[first:]
                kernel[last - first, parts](held.tensor[first:last], parameters, to, *more, aligned, **OPTIONS)
    return meter


def _counts(spec: StepSpec, meter: torch.Tensor) -> np.ndarray | None:
    return meter.sum(1).cpu().numpy() if spec.metered else None


def _are_aligned(pointers: np.ndarray) -> np.ndarray:
    return (pointers % VECTOR == 0).all(1)


def _placed(chunks: np.ndarray, rows: np.ndarray, device: torch.device, held: DeviceChunks | None) -> DeviceChunks:
    if held is not None and np.array_equal(held.rows, rows):
        return held
    whole = rows[chunks[:, 0]] & (chunks[:, 1:3] % VECTOR == 0).all(1)
    ordered = chunks[np.argsort(~whole, kind="stable")]
    return DeviceChunks(rows, ordered, int(whole.sum()), to_device(ordered, device))
