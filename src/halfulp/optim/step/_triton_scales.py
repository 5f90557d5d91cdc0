"""The Triton source of the kernels on scales: one reads those of all parameters into a table, one chooses the new ones.

Parameters are lanes: a step of any number of them launches each kernel once, and nothing waits for a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np
import torch

from ...kernels import address
from ...kernels.triton._writer import module_source, piece_source
from ..parameters._step_spec import StepSpec, pointer_count, state_pointers
from . import _scales as words
from ._scales import reachable_scale, weight_scale
from ._triton_kernel import Columns, largest_columns, scale_columns

LANES = 128


@functools.cache
def scales_source(spec: StepSpec) -> str:
    """The whole module of a step specification.

    Its kernels are `read_scales(parameters, scales, count)`, `choose_scales(parameters, largest, scales, count)`, and
    `keep_scales(parameters, scales, count)`, which writes the new scales where the parameters and their states keep
    them. The tables are those of `triton_source`, count their rows.
    """
    pieces = [
        piece_source("weight_scale", words.recorded(words.weight_scale_function(spec.store.dtype), 3)),
        piece_source("ratio", words.recorded(words.ratio, 3)),
        piece_source("inverse", words.recorded(words.inverse, 1)),
    ]
    for k, codec in spec.scaled_states.items():
        pieces.append(piece_source(f"state_scale_{k}", words.recorded(words.state_scale_function(codec), 1)))
    return module_source(pieces, "\n\n\n".join((_read_text(spec), _choose_text(spec), _keep_text(spec))))


def _read_text(spec: StepSpec) -> str:
    """Return the source of the kernel that fills the table with the present scales, and with 1 for those to come."""
    addresses = _addresses(spec)
    lines = [f"one = tl.full([{LANES}], 1.0, tl.float32)"]
    for column, name in enumerate(scale_columns(spec)):
        value = "one"
        if name in addresses:
            lines += [_address(name, addresses[name]), f"{name} = tl.load({name}_at, mask=lanes, other=1.0)"]
            value = name
        lines.append(f"tl.store(to + {column}, {value}, mask=lanes)")
    return _kernel("read_scales", "parameters, scales, count", spec, lines)


def _choose_text(spec: StepSpec) -> str:
    """Return the source of the kernel that chooses the new scales from the largest magnitudes."""
    columns, count = scale_columns(spec), largest_columns(spec)
    most = [f"tl.load(found + {j}, mask=lanes, other=0).to(tl.uint32, bitcast=True)" for j in range(count)]
    lines = [
        f"found = largest + row * {count}",
        f"present = tl.load(to + {columns.index('weight_scale')}, mask=lanes, other=1.0).to(tl.uint32, bitcast=True)",
        f"stored = {most[-1]}",
        f"new_scale = weight_scale(present, {most[0]}, stored)",
        "weight_inverse = inverse(new_scale)",
        "weight_ratio = ratio(present, new_scale, stored)",
        *_stores({name: columns.index(name) for name in ("new_scale", "weight_inverse", "weight_ratio")}),
    ]
    for j, k in enumerate(spec.scaled_states, 1):
        lines += [
            f"scale_{k} = state_scale_{k}({most[j]})",
            f"inverse_{k} = inverse(scale_{k})",
            *_stores({f"inverse_{k}": columns.index(f"inverse_{k}")}),
        ]
    return _kernel("choose_scales", "parameters, largest, scales, count", spec, lines)


def _keep_text(spec: StepSpec) -> str:
    """Return the source of the kernel that writes the new scales where parameters and states keep them."""
    addresses, columns = _addresses(spec), scale_columns(spec)
    lines = []
    for name, chosen in (("weight_scale", "new_scale"), *((f"scale_{k}", f"inverse_{k}") for k in spec.scaled_states)):
        word = f"tl.load(to + {columns.index(chosen)}, mask=lanes, other=1.0).to(tl.uint32, bitcast=True)"
        word = word if name == "weight_scale" else f"inverse({word})"
        lines += [
            _address(name, addresses[name]),
            f"tl.store({name}_at, {word}.to(tl.float32, bitcast=True), mask=lanes)",
        ]
    return _kernel("keep_scales", "parameters, scales, count", spec, lines)


def _kernel(name: str, arguments: str, spec: StepSpec, lines: Iterable[str]) -> str:
    """Return the source of a kernel on lanes of parameters."""
    first = [
        f"row = (tl.program_id(0) * {LANES} + tl.arange(0, {LANES})).to(tl.int64)",
        "lanes = row < count",
        f"own = parameters + row * {Columns.of(spec).count}",
        f"to = scales + row * {len(scale_columns(spec))}",
    ]
    body = "\n".join(f"    {line}" for line in [*first, *lines])
    return f"@triton.jit\ndef {name}({arguments}):\n{body}"


def _addresses(spec: StepSpec) -> dict[str, int]:
    """Return the columns of the parameter table that hold the addresses of present scales, by their names."""
    first = Columns.of(spec).scale_address
    states = state_pointers(spec)
    found = {"weight_scale": first, "gradient_scale": first + 1}
    return found | {f"scale_{k}": states[k] + 1 for k in spec.scaled_states}


def _address(name: str, column: int) -> str:
    return f"{name}_at = tl.load(own + {column}, mask=lanes, other=0).to(tl.pointer_type(tl.float32))"


def _stores(columns: dict[str, int]) -> list[str]:
    return [f"tl.store(to + {j}, {name}.to(tl.float32, bitcast=True), mask=lanes)" for name, j in columns.items()]


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
