"""Steps on an accelerator: the Triton source of a step specification, and one launch for all of its parameters.

The scales of scaled parameters are chosen there too, by a kernel whose elements are parameters: a step of any number of
them launches each kernel once, and nothing waits for a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels import address, run_on_tensors
from ...kernels._device_function import STREAM_INPUTS, Recording, Table
from ...kernels._operations import load32, store32
from ...kernels.triton._launch import (
    TILE_ELEMENTS,
    TILES_PER_CHUNK,
    TableKernel,
    TensorKernel,
    chunk_lines,
    element_lines,
    find_checked_kernel,
    on_device,
    to_device,
)
from ...kernels.triton._writer import COMPILE_OPTIONS, element_source, load_module, module_source, word_function_source
from ..parameters._step_spec import StepSpec, count_pointers, list_state_pointers
from ._kernel import make_step_table, record_step
from ._scales import (
    fill_fixed_columns,
    make_fixed_scales,
    make_unit_columns,
    present_columns,
    scale_columns,
    scale_table,
)

METER_NAMES = ("seen", "cancelled", "wanted", "kept")


@dataclass(frozen=True)
class ParameterColumns:
    """The number of columns of each kind in the parameter table, in this order.

    Addresses, the rule's constants by their bits, and the 64-bit key of whoever draws.
    """

    pointers: int
    constants: int
    keys: int

    @classmethod
    def of_spec(cls, spec: StepSpec) -> ParameterColumns:
        """Return the columns of one specification."""
        return cls(count_pointers(spec), len(spec.rule.constants), int(spec.draws))

    @property
    def count(self) -> int:
        """The number of columns."""
        return self.pointers + self.constants + self.keys


@functools.cache
def triton_source(spec: StepSpec) -> str:
    """Return the module's source: the kernel `step(chunks, parameters, meter, aligned)`.

    Where parameters are scaled it takes `scales` too, a row of `scale_columns` for each, before `aligned`.

    One that finds the largest magnitudes is given, in place of the meter, the words of the largest so far: int32
    (parameters, of the weight, of each scaled state, of the payload).
    """
    start = make_step_table(spec).stream_start
    functions = [] if start is None else [word_function_source("start_stream", start)]
    recorded = record_step(spec, with_payload=spec.finds_amax)
    return module_source([*functions, element_source("element", recorded, _name_arguments(spec))], _kernel_text(spec))


def _name_arguments(spec: StepSpec) -> dict[object, str]:
    columns = ParameterColumns.of_spec(spec)
    names: dict[object, str] = {j: f"a{j}" for j in range(columns.pointers)}
    names |= {("constant", k): f"constant{k}" for k in range(len(spec.constants))}
    return names | ({name: name[0] for name in STREAM_INPUTS} if make_step_table(spec).stream_start else {})


def _kernel_text(spec: StepSpec) -> str:
    """Return the source of the kernel: one program per tile of a chunk."""
    columns = ParameterColumns.of_spec(spec)
    at = iter(range(columns.count))
    reads = [f"a{j} = tl.load(row + {next(at)})" for j in range(columns.pointers)]
    real = ".to(tl.uint32).to(tl.float32, bitcast=True)"
    reads += [f"constant{k} = tl.load(row + {next(at)}){real}" for k in range(columns.constants)]
    reads += [
        f"constant{columns.constants + j} = tl.load(scales + r * {len(scale_columns(spec))} + {j})"
        for j in range(len(scale_columns(spec)))
    ]
    draws = []
    if make_step_table(spec).stream_start:
        reads.append(f"key = tl.load(row + {next(at)})")
        draws.append("counter, own = start_stream(key.to(tl.uint32), (key >> 32).to(tl.uint32), index)")
    call = f"element(i, b, {', '.join(_name_arguments(spec).values())}, lanes, aligned)"
    lines = [
        *chunk_lines(),
        f"row = parameters + r * {columns.count}",
        *reads,
        *(_block_lines(spec.block) if spec.block else element_lines()),
        *draws,
        *(_largest_lines(spec, call) if spec.finds_amax else _meter_lines(call) if spec.metered else [call]),
    ]
    body = "\n".join(f"    {line}" for line in lines)
    given = f"chunks, parameters, meter, {'scales, ' if spec.scaled else ''}aligned: tl.constexpr"
    return f"@triton.jit\ndef step({given}):\n{body}\n"


def _block_lines(block: int) -> list[str]:
    rows = TILE_ELEMENTS // block
    return [
        f"row_of_tile = (part * {rows} + tl.arange(0, {rows})).to(tl.int64)",
        "blocks = row_of_tile[:, None]",
        f"offsets = blocks * {block} + tl.arange(0, {block})[None, :]",
        f"lanes = blocks * {block} < length",
        "i = begin + offsets",
        # Rows that do not exist read the first one's scale.
        f"b = begin // {block} + tl.where(row_of_tile * {block} < length, row_of_tile, 0)",
        "index = start + offsets",
    ]


def _meter_lines(call: str) -> list[str]:
    lines = [f"{', '.join(METER_NAMES)} = {call}", f"to = meter + (c * {TILES_PER_CHUNK} + part) * {len(METER_NAMES)}"]
    return lines + [
        f"tl.store(to + {j}, tl.sum(tl.where(lanes, {name}, 0.0).to(tl.float64)))" for j, name in enumerate(METER_NAMES)
    ]


def _largest_lines(spec: StepSpec, call: str) -> list[str]:
    """Return the lines that raise a parameter's largest words: the order in which programs do does not show."""
    names = [f"most{j}" for j in range(count_largest_columns(spec))]
    lines = [f"{', '.join(names)} = {call}", f"to = meter + r * {len(names)}"]
    for j, name in enumerate(names):
        lines.append(f"{name} = tl.where(lanes, {name}, 0).to(tl.int32, bitcast=True)")
        lines.append(f"tl.atomic_max(to + {j}, tl.max({name}), sem='relaxed')")
    return lines


def count_largest_columns(spec: StepSpec) -> int:
    """Return how many largest magnitudes are stored per parameter: weight, each scaled state, payload."""
    return 2 + len(spec.scaled_states)


@functools.cache
def _copy_kernel() -> TableKernel:
    """Return the kernel that copies words from the addresses in one column to those in the other."""
    element = Recording(2)
    store32(element.arrays[1], element.index, load32(element.arrays[0], element.index))
    return TableKernel(Table(element.trace, 2), _COPY_TILE)


def copy_words(sources: np.ndarray, targets: np.ndarray, device: torch.device) -> None:
    """Copy single words of 32 bits on a device, between int64 arrays of addresses of one shape."""
    pointers = np.stack([sources.ravel(), targets.ravel()], 1)
    chunks = np.zeros((len(pointers), 4), np.int64)
    chunks[:, 0], chunks[:, 2] = np.arange(len(pointers)), 1
    _copy_kernel()(chunks, pointers, device)


@dataclass
class ScaleColumns:
    """The scales of a step of scaled parameters on a device, before and after it.

    Attributes:
        kept_addresses: int64 array of shape (scales, parameters): of the scales of weights, of gradients, and of each
            scaled state.
        columns: float32 tensor, the columns of `scale_table` but for the largest magnitudes.
    """

    spec: StepSpec
    kept_addresses: np.ndarray
    columns: torch.Tensor

    @classmethod
    def read(cls, spec: StepSpec, held: np.ndarray, device: torch.device) -> ScaleColumns:
        """Copy the present scales into the columns."""
        scales = cls(spec, held, make_unit_columns(spec, held.shape[1], device))
        copy_words(held, scales._addresses(present_columns(spec)), device)
        return scales

    def choose(self, kernel: TensorKernel, largest: torch.Tensor) -> None:
        """Choose the new scales from the words of the largest magnitudes, (parameters, magnitudes)."""
        every = [*self._addresses(range(len(self.columns)))[:, 0].tolist()]
        by_column = largest.t().contiguous()
        every += [address(row) for row in by_column]
        kernel.launch(self.columns.device, every, len(largest))

    def keep(self) -> None:
        """Copy the new scales to where the parameters and their states keep them."""
        first, names = len(scale_columns(self.spec)), scale_columns(self.spec)
        rows = [names.index("new_scale"), *range(first, len(self.columns))]
        copy_words(self._addresses(rows), np.delete(self.kept_addresses, 1, axis=0), self.columns.device)

    @property
    def new_scales(self) -> torch.Tensor:
        """The scales under which the weights are stored, float32 (parameters,)."""
        return self.columns[scale_columns(self.spec).index("new_scale")]

    @property
    def constant_rows(self) -> torch.Tensor:
        """The constants of each parameter that are scales, float32 (parameters, scales)."""
        return self.columns[: len(scale_columns(self.spec))].t().contiguous()

    def _addresses(self, columns: Iterable[int]) -> np.ndarray:
        places = np.arange(self.columns.numel(), dtype=np.int64).reshape(self.columns.shape)
        return address(self.columns) + 4 * places[list(columns)]


_COPY_TILE = 32


def _choose_fixed_scales(spec: StepSpec, kernel: TensorKernel, device: torch.device) -> list[torch.Tensor]:
    """Return the columns of scales and the tensors of the new ones after a choice among fixed magnitudes."""
    held, largest = (torch.from_numpy(rows).to(device) for rows in make_fixed_scales(spec))
    addresses = address(held) + 4 * np.arange(held.numel(), dtype=np.int64).reshape(held.shape)
    scales = ScaleColumns.read(spec, addresses, device)
    scales.choose(kernel, largest)
    scales.keep()
    return [scales.columns.cpu(), held.cpu()]


def _expect_fixed_scales(spec: StepSpec) -> list[torch.Tensor]:
    """Return what `_choose_fixed_scales` must return, by plain torch."""
    columns = fill_fixed_columns(spec, functools.partial(run_on_tensors, scale_table(spec).trace))
    names, gradient = scale_columns(spec), present_columns(spec)[1]
    return [columns, torch.stack([columns[names.index("new_scale")], columns[gradient], *columns[len(names) :]])]


VECTOR_BYTES = 16


@dataclass
class DeviceChunks:
    """The chunks of a batch on its device, those first that hold whole vectors at aligned addresses.

    Attributes:
        aligned_rows: bool array of shape (parameters,): whose addresses are aligned.
        chunks: int64 array of shape (chunks, 4), in the order in which they lie there.
        aligned_count: how many come first.
        device_tensor: the same on the device.
    """

    aligned_rows: np.ndarray
    chunks: np.ndarray
    aligned_count: int
    device_tensor: torch.Tensor


@dataclass(frozen=True)
class ScaledKernels:
    """The kernels of a step of scaled parameters.

    The largest magnitudes are found under the specification `amax_spec`, the new scales chosen, then weights and states
    written.
    """

    amax_kernel: Any
    scale_kernel: TensorKernel
    step_kernel: Any
    amax_spec: StepSpec


def step_kernel(spec: StepSpec, device: torch.device, trial: Callable) -> Any:
    """Return a kernel, compared with the reference before its first use; None, counted, if it cannot be used.

    `trial(spec, run, device)` is what a step on fixed elements writes, by the reference without `run`.
    """
    return find_checked_kernel(
        spec,
        f"optimizer step {spec.name}",
        device,
        lambda: load_module(triton_source(spec))["step"],
        lambda kernel, device: trial(spec, functools.partial(_run_triton_trial, spec, kernel, device), device),
        lambda: trial(spec),
    )


def scaled_kernels(spec: StepSpec, amax: StepSpec, device: torch.device, trial: Callable) -> ScaledKernels | None:
    """Do what `step_kernel` does for a step of scaled parameters; `amax` finds the largest magnitudes."""
    largest, step = step_kernel(amax, device, trial), step_kernel(spec, device, trial)
    if largest is None or step is None:
        return None

    choose: TensorKernel | None = find_checked_kernel(
        (spec, "scales"),
        f"the scales of optimizer step {spec.name}",
        device,
        lambda: TensorKernel(scale_table(spec)),
        functools.partial(_choose_fixed_scales, spec),
        lambda: _expect_fixed_scales(spec),
    )
    return None if choose is None else ScaledKernels(largest, choose, step, amax)


def _run_triton_trial(spec: StepSpec, kernel: Any, device: torch.device, chunks, pointers, constants, keys) -> Any:
    """Run a kernel under constants that hold the scales too; return the largest magnitudes if it finds them."""
    own = len(spec.rule.constants)
    held = _place_chunks(chunks, _find_aligned_rows(pointers), device, None)
    parameters = make_parameter_table(device, pointers, constants[:, :own], keys)
    scales = to_device(np.ascontiguousarray(constants[:, own:]), device) if spec.scaled else None
    found = _run_step_kernel(spec, kernel, held, parameters, len(pointers), scales)
    return found.cpu().numpy().view(np.float32) if spec.finds_amax else None


LaunchArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def launch_step(
    spec: StepSpec, kernel: Any, device: torch.device, numbers: LaunchArrays, held: DeviceChunks | None
) -> tuple[DeviceChunks, np.ndarray | None]:
    """Make one step of every parameter of a batch.

    Args:
        numbers: int64 chunks (chunks, 4) and pointers (parameters, pointers), float32 constants of the rule, a row per
            parameter, and uint64 keys (parameters, 1), or (parameters, 0) without draws.
        held: what an earlier call with the same chunks returned.

    Returns:
        What to give to the next call, and for a metered step a float64 array of shape (chunks, 4) in its order.
    """
    chunks, pointers, constants, keys = numbers
    held = _place_chunks(chunks, _find_aligned_rows(pointers), device, held)
    parameters = make_parameter_table(device, pointers, constants, keys)
    return held, _sum_meter(spec, _run_step_kernel(spec, kernel, held, parameters, len(pointers)))


def launch_scaled_step(
    spec: StepSpec,
    kernels: ScaledKernels,
    device: torch.device,
    numbers: LaunchArrays,
    addresses: np.ndarray,
    held: DeviceChunks | None,
) -> tuple[DeviceChunks, np.ndarray | None, torch.Tensor]:
    """Do what `launch_step` does for scaled parameters, under scales that the device chooses, and write those too.

    Args:
        addresses: int64 array of shape (parameters, 2), of the scales of weights and gradients.

    Returns:
        Also the scales under which the weights are stored, float32 (parameters,) on the device.
    """
    chunks, pointers, constants, keys = numbers
    held = _place_chunks(chunks, _find_aligned_rows(pointers), device, held)
    parameters = make_parameter_table(device, pointers, constants, keys)
    count, states = len(pointers), list_state_pointers(spec)
    of_states = [pointers[:, states[k] + 1] for k in spec.scaled_states]
    scales = ScaleColumns.read(spec, np.stack([*addresses.T, *of_states]), device)
    scales.choose(
        kernels.scale_kernel,
        _run_step_kernel(kernels.amax_spec, kernels.amax_kernel, held, parameters, count, scales.constant_rows),
    )
    written = _run_step_kernel(spec, kernels.step_kernel, held, parameters, count, scales.constant_rows)
    scales.keep()
    return held, _sum_meter(spec, written), scales.new_scales


def make_parameter_table(
    device: torch.device, pointers: np.ndarray, constants: np.ndarray, keys: np.ndarray
) -> torch.Tensor:
    """Return the parameter table of `ParameterColumns` on a device."""
    bits = np.ascontiguousarray(constants).view(np.uint32).astype(np.int64)
    return to_device(np.concatenate([pointers, bits, keys.view(np.int64)], 1), device)


def _run_step_kernel(
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
        meter = torch.zeros(count, count_largest_columns(spec), dtype=torch.int32, device=device)
    else:
        meter = torch.zeros(
            chunks if spec.metered else 0, TILES_PER_CHUNK, len(METER_NAMES), dtype=torch.float64, device=device
        )
    parts = -(-int(held.chunks[:, 2].max(initial=0)) // TILE_ELEMENTS)
    more = () if scales is None else (scales,)
    with on_device(device):
        for first, last, aligned in ((0, held.aligned_count, True), (held.aligned_count, chunks, False)):
            if first < last:
                to = meter if spec.finds_amax else meter[first:]
                kernel[last - first, parts](
                    held.device_tensor[first:last], parameters, to, *more, aligned, **COMPILE_OPTIONS
                )
    return meter


def _sum_meter(spec: StepSpec, meter: torch.Tensor) -> np.ndarray | None:
    return meter.sum(1).cpu().numpy() if spec.metered else None


def _find_aligned_rows(pointers: np.ndarray) -> np.ndarray:
    return (pointers % VECTOR_BYTES == 0).all(1)


def _place_chunks(
    chunks: np.ndarray, rows: np.ndarray, device: torch.device, held: DeviceChunks | None
) -> DeviceChunks:
    if held is not None and np.array_equal(held.aligned_rows, rows):
        return held
    whole = rows[chunks[:, 0]] & (chunks[:, 1:3] % VECTOR_BYTES == 0).all(1)
    ordered = chunks[np.argsort(~whole, kind="stable")]
    return DeviceChunks(rows, ordered, int(whole.sum()), to_device(ordered, device))
