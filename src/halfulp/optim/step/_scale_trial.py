"""The comparison of the kernels on scales with the CPU's choice of scales, before their first use on a device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...kernels import address
from ._scales import reachable_scale, weight_scale
from ._spec import StepSpec, pointer_count, state_pointers
from ._triton_kernel import largest_columns

_EXPONENTS = (-149, -127, -126, -60, -13, 0, 1, 15, 16, 60, 119, 127)


def expected_scales(spec: StepSpec) -> list[torch.Tensor]:
    """Return the tables that `try_scales` must return: of all scales, and what their tensors then hold."""
    held, largest = _rows(spec)
    table, tensors = [], []
    for (present, gradient, *states), (weight, *new, stored) in zip(held.T.tolist(), largest.tolist(), strict=True):
        scale, factor = weight_scale(spec.store.dtype, present, weight), 1.0
        if scale != present:
            scale, factor = reachable_scale(spec.store.dtype, present, scale, stored)
        fitted = [codec.fitting(value) for codec, value in zip(spec.scaled_states.values(), new, strict=True)]
        pairs = [number for before, after in zip(states, fitted) for number in (before, 1 / after)]
        table.append([present, 1 / scale, gradient, factor, scale, *pairs])
        tensors.append([scale, gradient, *fitted])
    return [torch.from_numpy(np.array(rows, np.float32)) for rows in (table, np.transpose(tensors))]


def try_scales(spec: StepSpec, device: torch.device, choose: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Return the table of scales and the scales' tensors after a choice among fixed magnitudes.

    Args:
        spec: the step specification.
        device: where the tensors lie.
        choose: (pointers, constants, keys, addresses of scales, words of the largest magnitudes) -> table of scales.
    """
    held, largest = _rows(spec)
    tensors, count = torch.from_numpy(held).to(device), len(largest)
    addresses = address(tensors) + 4 * np.arange(held.size).reshape(held.shape)
    pointers = np.zeros((count, pointer_count(spec)), np.int64)
    for k, row in zip(spec.scaled_states, addresses[2:]):
        pointers[:, state_pointers(spec)[k] + 1] = row
    constants = np.zeros((count, len(spec.rule.constants)), np.float32)
    keys = np.zeros((count, int(spec.draws)), np.uint64)
    words = torch.from_numpy(largest.view(np.int32)).to(device)
    table = choose(pointers, constants, keys, np.ascontiguousarray(addresses[:2].T), words)
    return [table.cpu(), tensors.cpu()]


def _rows(spec: StepSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return scales (a row each, of as many parameters) and the largest magnitudes of each parameter, fixed ones."""
    ends = [0.0, *(f * 2.0**k for k in _EXPONENTS for f in (1.0, 1.5)), float(np.finfo(np.float32).max)]
    scales = [2.0**k for k in (-126, -125, -20, 0, 1, 63, 127)]
    payloads = [x for x in ends if x <= torch.finfo(spec.store.dtype).max]
    rows = [
        (scale, largest, stored) for scale in scales for largest in ends for stored in payloads[:: len(payloads) // 5]
    ]
    present = np.array([row[0] for row in rows], np.float32)
    held = np.stack([np.roll(present, shift) for shift in range(2 + len(spec.scaled_states))])
    found = np.array([row[1] for row in rows], np.float32)
    largest = np.stack([np.roll(found, 3 * shift) for shift in range(largest_columns(spec))], 1)
    largest[:, -1] = [row[2] for row in rows]
    return held, largest
