"""Steps on an accelerator: the kernels of a step specification, and one launch of each for all of its parameters.

The scales of scaled parameters are chosen there too, by torch operations on a row of all parameters: a step of any
number of them launches each kernel once, and nothing waits for a number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...kernels.triton._launch import (
    PlacedChunks,
    TableKernel,
    copy_to_device,
    find_checked_kernel,
    place_chunks,
)
from ..parameters._step_spec import StepSpec
from ._kernel import make_step_table, record_step
from ._scales import choose_scales, find_column, list_present_columns


@functools.cache
def make_step_kernel(spec: StepSpec) -> TableKernel:
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
        lambda: make_step_kernel(spec),
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
    return copy_to_device(np.concatenate([pointers, bits, keys.view(np.int64)], 1), device)


def launch_scaled_step(
    spec: StepSpec,
    kernels: Sequence[TableKernel],
    placed: PlacedChunks,
    rows: torch.Tensor,
    present: Sequence[Sequence[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one step of every scaled parameter of a batch, under scales that the device chooses, and write those too.

    Args:
        spec: of the step.
        kernels: the one that finds the largest magnitudes, and the one that writes weights and states.
        placed: the chunks.
        rows: the kernels' table, with any constants in the place of the scales.
        present: the scales of the weights, of the gradients, and of each scaled state, 0-d tensors.

    Returns:
        The sums of the step's kernel, and the scales under which the weights are stored, float32 (parameters,).
    """
    now = torch.stack([torch.stack([*scales]) for scales in present])
    first, last = (kernels[1].table.columns + count for count in (len(spec.rule.constants), len(spec.constants)))
    columns = torch.ones(last - first, len(rows), dtype=torch.float32, device=rows.device)
    for place, scales in zip(list_present_columns(spec), now, strict=True):
        columns[place] = scales  # one by one: a list of places would be copied to the device, which waits
    rows[:, first:last] = columns.t().contiguous().view(torch.int32)
    largest = kernels[0].launch(placed, rows).t().contiguous().view(torch.float32)
    columns = choose_scales(spec, now.double(), largest.double()).float()
    rows[:, first:last] = columns.t().contiguous().view(torch.int32)
    totals = kernels[1].launch(placed, rows)
    new_scales = columns[find_column(spec, "new_scale")]
    of_states = (1 / columns[find_column(spec, f"inverse_{k}")] for k in spec.scaled_states)
    for scales, new in zip((present[0], *present[2:]), (new_scales, *of_states), strict=True):
        torch._foreach_copy_([*scales], [*new])
    return totals, new_scales
