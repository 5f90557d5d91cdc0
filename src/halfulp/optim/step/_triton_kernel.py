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
    DeviceChunks,
    PointerTableKernel,
    copy_chunks_to_device,
    copy_to_device,
    find_checked_kernel,
)
from ..parameters._step_spec import StepSpec
from ._kernel import make_step_table_function, record_step
from ._scales import compute_scale_constants, find_scale_column, list_current_scale_columns


@functools.cache
def make_triton_step_kernel(spec: StepSpec) -> PointerTableKernel:
    """Return the kernel of a specification; largest magnitudes are of weight, scaled states and payload, as words."""
    recorded = record_step(spec, finds_payload_amax=spec.computed_reduction == "amax")
    return PointerTableKernel(dataclasses.replace(make_step_table_function(spec), trace=recorded))


def get_checked_step_kernel(
    spec: StepSpec, device: torch.device, step_check_elements: Callable
) -> PointerTableKernel | None:
    """Return a kernel, compared with the reference before its first use; None, counted, if it cannot be used.

    `step_check_elements(spec, run, device)` is what a step on fixed elements writes, by the reference without `run`.
    """

    def run(kernel: PointerTableKernel, chunks, pointers, constants, keys) -> np.ndarray | None:
        rows = make_device_table_rows(device, pointers, constants, keys)
        found = kernel.launch(copy_chunks_to_device(chunks, pointers, device), rows)
        return found.cpu().numpy().view(np.float32) if kernel.maximum_count else None

    kernel: PointerTableKernel | None = find_checked_kernel(
        spec,
        f"optimizer step {spec.name}",
        device,
        lambda: make_triton_step_kernel(spec),
        lambda kernel, device: step_check_elements(spec, functools.partial(run, kernel), device),
        lambda: step_check_elements(spec),
    )
    return kernel


def make_device_table_rows(
    device: torch.device, pointers: np.ndarray, constants: np.ndarray, keys: np.ndarray
) -> torch.Tensor:
    """Return the rows of a kernel's table on a device: pointers, float32 constants by their bits, keys."""
    bits = np.ascontiguousarray(constants).view(np.uint32).astype(np.int64)
    return copy_to_device(np.concatenate([pointers, bits, keys.view(np.int64)], 1), device)


def launch_scaled_step(
    spec: StepSpec,
    kernels: Sequence[PointerTableKernel],
    chunks: DeviceChunks,
    rows: torch.Tensor,
    current_scales: Sequence[Sequence[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one step of every scaled parameter of a batch, under scales that the device chooses, and write those too.

    `kernels` find the largest magnitudes, and write; `rows` hold any constants in the place of the scales;
    `current_scales` are the scales of the weights, of the gradients and of each scaled state. Returns the sums of the
    step's kernel, and the scales under which the weights are stored, float32 (parameters,).
    """
    now = torch.stack([torch.stack([*scales]) for scales in current_scales])
    first, last = (
        kernels[1].table.column_count + count for count in (len(spec.rule.constants), len(spec.constant_names))
    )
    columns = torch.ones(last - first, len(rows), dtype=torch.float32, device=rows.device)
    for place, scales in zip(list_current_scale_columns(spec), now, strict=True):
        columns[place] = scales  # one by one: a list of places would be copied to the device, which waits
    rows[:, first:last] = columns.t().contiguous().view(torch.int32)
    largest = kernels[0].launch(chunks, rows).t().contiguous().view(torch.float32)
    columns = compute_scale_constants(spec, now.double(), largest.double()).float()
    rows[:, first:last] = columns.t().contiguous().view(torch.int32)
    totals = kernels[1].launch(chunks, rows)
    new_scales = columns[find_scale_column(spec, "new_scale")]
    of_states = (1 / columns[find_scale_column(spec, f"inverse_{k}")] for k in spec.scaled_codec_by_state)
    for scales, new in zip((current_scales[0], *current_scales[2:]), (new_scales, *of_states), strict=True):
        torch._foreach_copy_([*scales], [*new])
    return totals, new_scales
