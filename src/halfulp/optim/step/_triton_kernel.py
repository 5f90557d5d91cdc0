"""Steps on an accelerator: the kernels of a step specification, and one launch of each for all of its parameters.

The scales of scaled parameters are chosen there too, by a kernel whose elements are parameters: a step of any number of
them launches each kernel once, and nothing waits for a number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels import address, run_on_tensors
from ...kernels.triton._launch import (
    PlacedChunks,
    TableKernel,
    TensorKernel,
    find_checked_kernel,
    place_chunks,
    to_device,
)
from ..parameters._step_spec import StepSpec
from ._kernel import make_step_table, record_step
from ._scales import fill_fixed_columns, make_unit_columns, present_columns, scale_columns, scale_table


@functools.cache
def make_kernel(spec: StepSpec) -> TableKernel:
    """Return the kernel of a specification.

    One that finds the largest magnitudes gives their words: of the weight, of each scaled state, of the payload.
    """
    recorded = record_step(spec, with_payload=spec.finds_amax)
    return TableKernel(dataclasses.replace(make_step_table(spec), trace=recorded))


def find_step_kernel(spec: StepSpec, device: torch.device, trial: Callable) -> TableKernel | None:
    """Return a kernel, compared with the reference before its first use; None, counted, if it cannot be used.

    `trial(spec, run, device)` is what a step on fixed elements writes, by the reference without `run`.
    """
    kernel: TableKernel | None = find_checked_kernel(
        spec,
        f"optimizer step {spec.name}",
        device,
        lambda: make_kernel(spec),
        lambda kernel, device: trial(spec, functools.partial(_run_trial, kernel, device), device),
        lambda: trial(spec),
    )
    return kernel


def _run_trial(kernel: TableKernel, device: torch.device, chunks, pointers, constants, keys) -> np.ndarray | None:
    """Run a kernel under constants that hold the scales too; return the largest magnitudes if it finds them."""
    rows = make_parameter_rows(device, pointers, constants, keys)
    found = kernel.launch(place_chunks(chunks, pointers, device), rows)
    return found.cpu().numpy().view(np.float32) if kernel.largest_columns else None


def make_parameter_rows(
    device: torch.device, pointers: np.ndarray, constants: np.ndarray, keys: np.ndarray
) -> torch.Tensor:
    """Return the rows of a kernel's table on a device: pointers, float32 constants by their bits, keys."""
    bits = np.ascontiguousarray(constants).view(np.uint32).astype(np.int64)
    return to_device(np.concatenate([pointers, bits, keys.view(np.int64)], 1), device)


@dataclass(frozen=True)
class ScaledKernels:
    """The kernels of a step of scaled parameters.

    The first finds the largest magnitudes, the second chooses the new scales, the last writes weights and states.
    """

    amax_kernel: TableKernel
    scale_kernel: TensorKernel
    step_kernel: TableKernel


def find_scaled_kernels(spec: StepSpec, amax: StepSpec, device: torch.device, trial: Callable) -> ScaledKernels | None:
    """Do what `find_step_kernel` does for a step of scaled parameters; `amax` finds the largest magnitudes."""
    largest, step = find_step_kernel(amax, device, trial), find_step_kernel(spec, device, trial)
    if largest is None or step is None:
        return None

    def run(kernel: TensorKernel, device: torch.device) -> list[torch.Tensor]:
        return [fill_fixed_columns(spec, functools.partial(_run_scale_kernel, kernel), device).cpu()]

    def reference() -> list[torch.Tensor]:
        return [fill_fixed_columns(spec, functools.partial(run_on_tensors, scale_table(spec).trace))]

    choose: TensorKernel | None = find_checked_kernel(
        (spec, "scales"),
        f"the scales of optimizer step {spec.name}",
        device,
        lambda: TensorKernel(scale_table(spec)),
        run,
        reference,
    )
    return None if choose is None else ScaledKernels(largest, choose, step)


def _run_scale_kernel(kernel: TensorKernel, columns: Sequence[torch.Tensor]) -> None:
    kernel.launch(columns[0].device, [*map(address, columns)], len(columns[0]))


def launch_scaled_step(
    spec: StepSpec,
    kernels: ScaledKernels,
    placed: PlacedChunks,
    rows: torch.Tensor,
    present: Sequence[Sequence[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one step of every scaled parameter of a batch, under scales that the device chooses, and write those too.

    Args:
        spec: of the step.
        kernels: its kernels.
        placed: the chunks.
        rows: the kernels' table, with any constants in the place of the scales.
        present: the scales of the weights, of the gradients, and of each scaled state, 0-d tensors.

    Returns:
        The sums of the step's kernel, and the scales under which the weights are stored, float32 (parameters,).
    """
    columns, names = make_unit_columns(spec, len(rows), rows.device), scale_columns(spec)
    for column, scales in zip(present_columns(spec), present, strict=True):
        torch.stack([*scales], out=columns[column])
    table = kernels.step_kernel.table
    places = slice(table.columns + table.constants - len(names), table.columns + table.constants)
    rows[:, places] = columns[: len(names)].t().contiguous().view(torch.int32)
    largest = kernels.amax_kernel.launch(placed, rows)
    _run_scale_kernel(kernels.scale_kernel, [*columns, *largest.t().contiguous().view(torch.float32)])
    rows[:, places] = columns[: len(names)].t().contiguous().view(torch.int32)
    totals = kernels.step_kernel.launch(placed, rows)
    new_scales = columns[names.index("new_scale")]
    kept = [present[0], *present[2:]]
    chosen = [new_scales, *columns[len(names) :]]
    for scales, new in zip(kept, chosen, strict=True):
        torch._foreach_copy_([*scales], [*new])
    return totals, new_scales
