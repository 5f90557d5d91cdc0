"""Steps on an accelerator: the Triton source of a step specification, and one launch for all of its parameters.

The scales of scaled parameters are chosen there too, by kernels whose lanes are parameters: a step of any number of
them launches each kernel once, and nothing waits for a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels import address
from ...kernels._device_function import STREAM
from ...kernels.triton._launch import PARTS, TILE, chunk_lines, line_lines, on_device, ready, to_device
from ...kernels.triton._writer import OPTIONS, element_source, load_module, module_source, piece_source
from ..parameters._step_spec import StepSpec, pointer_count, state_pointers
from . import _scales as words
from ._kernel import record_step, table
from ._scales import reachable_scale, weight_scale

METER = ("seen", "cancelled", "wanted", "kept")


@dataclass(frozen=True)
class Columns:
    """The number of columns of each kind in the parameter table, in this order.

    Addresses, the rule's constants by their bits, the 64-bit key of whoever draws, and the addresses of the scales of
    the weight and of the gradient.
    """

    pointers: int
    constants: int
    keys: int
    scales: int

    @classmethod
    def of(cls, spec: StepSpec) -> Columns:
        """Return the columns of one specification."""
        return cls(pointer_count(spec), len(spec.rule.constants), int(spec.draws), 2 if spec.scaled else 0)

    @property
    def count(self) -> int:
        """The number of columns."""
        return self.scale_address + self.scales

    @property
    def scale_address(self) -> int:
        """The column of the address of the weight's scale; that of the gradient's is the next."""
        return self.pointers + self.constants + self.keys


def scale_columns(spec: StepSpec) -> tuple[str, ...]:
    """Return the columns of the table of scales, a row per parameter: the constants that are not the rule's."""
    return spec.constants[len(spec.rule.constants) :]


@functools.cache
def triton_source(spec: StepSpec) -> str:
    """Return the module's source: the kernel `step(chunks, parameters, meter, aligned)`, and `scales` where scaled.

    One that finds the largest magnitudes is given, in place of the meter, the words of the largest so far: int32
    (parameters, of the weight, of each scaled state, of the payload).
    """
    start = table(spec).start
    functions = [] if start is None else [piece_source("start_stream", start)]
    recorded = record_step(spec, with_payload=spec.finds_amax)
    return module_source([*functions, element_source("element", recorded, _arguments(spec))], _kernel_text(spec))


def _arguments(spec: StepSpec) -> dict[object, str]:
    columns = Columns.of(spec)
    names: dict[object, str] = {j: f"a{j}" for j in range(columns.pointers)}
    names |= {("constant", k): f"constant{k}" for k in range(len(spec.constants))}
    return names | ({name: name[0] for name in STREAM} if table(spec).start else {})


def _kernel_text(spec: StepSpec) -> str:
    """Return the source of the kernel: one program per tile of a chunk."""
    columns = Columns.of(spec)
    at = iter(range(columns.count))
    reads = [f"a{j} = tl.load(row + {next(at)})" for j in range(columns.pointers)]
    real = ".to(tl.uint32).to(tl.float32, bitcast=True)"
    reads += [f"constant{k} = tl.load(row + {next(at)}){real}" for k in range(columns.constants)]
    reads += [
        f"constant{columns.constants + j} = tl.load(scales + r * {len(scale_columns(spec))} + {j})"
        for j in range(len(scale_columns(spec)))
    ]
    draws = []
    if table(spec).start:
        reads.append(f"key = tl.load(row + {next(at)})")
        draws.append("counter, own = start_stream(key.to(tl.uint32), (key >> 32).to(tl.uint32), index)")
    call = f"element(i, b, {', '.join(_arguments(spec).values())}, lanes, aligned)"
    lines = [
        *chunk_lines(),
        f"row = parameters + r * {columns.count}",
        *reads,
        *(_block_lines(spec.block) if spec.block else line_lines()),
        *draws,
        *(_largest(spec, call) if spec.finds_amax else _meter_lines(call) if spec.metered else [call]),
    ]
    body = "\n".join(f"    {line}" for line in lines)
    given = f"chunks, parameters, meter, {'scales, ' if spec.scaled else ''}aligned: tl.constexpr"
    return f"@triton.jit\ndef step({given}):\n{body}\n"


def _block_lines(block: int) -> list[str]:
    rows = TILE // block
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
    lines = [f"{', '.join(METER)} = {call}", f"to = meter + (c * {PARTS} + part) * {len(METER)}"]
    return lines + [
        f"tl.store(to + {j}, tl.sum(tl.where(lanes, {name}, 0.0).to(tl.float64)))" for j, name in enumerate(METER)
    ]


def _largest(spec: StepSpec, call: str) -> list[str]:
    """Return the lines that raise a parameter's largest words: the order in which programs do does not show."""
    names = [f"most{j}" for j in range(largest_columns(spec))]
    lines = [f"{', '.join(names)} = {call}", f"to = meter + r * {len(names)}"]
    for j, name in enumerate(names):
        lines.append(f"{name} = tl.where(lanes, {name}, 0).to(tl.int32, bitcast=True)")
        lines.append(f"tl.atomic_max(to + {j}, tl.max({name}), sem='relaxed')")
    return lines


def largest_columns(spec: StepSpec) -> int:
    """Return how many largest magnitudes are stored per parameter: weight, each scaled state, payload."""
    return 2 + len(spec.scaled_states)


LANES = 128


@functools.cache
def scales_source(spec: StepSpec) -> str:
    """Return the whole module of a step specification.

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

    `choose` takes pointers, constants, keys, addresses of scales and words of the largest magnitudes.
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

    The present scales are read, the largest magnitudes found under the specification `amax`, the new scales chosen,
    weights and states written, and the new scales kept once all else is written.
    """

    read: Any
    largest: Any
    choose: Any
    step: Any
    keep: Any
    amax: StepSpec


def step_kernel(spec: StepSpec, device: torch.device, trial: Callable) -> Any:
    """Return a kernel, compared with the reference before its first use; None, counted, if it cannot be used.

    `trial(spec, run, device)` is what a step on fixed elements writes, by the reference without `run`.
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
    held = _place_chunks(chunks, _are_aligned(pointers), device, None)
    parameters = parameter_table(spec, device, pointers, constants[:, :own], keys)
    scales = to_device(np.ascontiguousarray(constants[:, own:]), device) if spec.scaled else None
    found = _run(spec, kernel, held, parameters, len(pointers), scales)
    return found.cpu().numpy().view(np.float32) if spec.finds_amax else None


Numbers = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def launch(
    spec: StepSpec, kernel: Any, device: torch.device, numbers: Numbers, held: DeviceChunks | None
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
    held = _place_chunks(chunks, _are_aligned(pointers), device, held)
    parameters = parameter_table(spec, device, pointers, constants, keys)
    return held, _counts(spec, _run(spec, kernel, held, parameters, len(pointers)))


def launch_scaled(
    spec: StepSpec,
    kernels: ScaledKernels,
    device: torch.device,
    numbers: Numbers,
    addresses: np.ndarray,
    held: DeviceChunks | None,
) -> tuple[DeviceChunks, np.ndarray | None, torch.Tensor]:
    """Do what `launch` does for scaled parameters, under scales that the device chooses, and write those too.

    Args:
        addresses: int64 array of shape (parameters, 2), of the scales of weights and gradients.

    Returns:
        Also the scales under which the weights are stored, float32 (parameters,) on the device.
    """
    chunks, pointers, constants, keys = numbers
    held = _place_chunks(chunks, _are_aligned(pointers), device, held)
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

    `find_largest` gives the words of the largest magnitudes under the present scales, of which it takes the table.
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
    with on_device(scales.device):
        kernels.keep[(-(-len(scales) // LANES),)](parameters, scales, len(scales), **OPTIONS)


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


def _place_chunks(
    chunks: np.ndarray, rows: np.ndarray, device: torch.device, held: DeviceChunks | None
) -> DeviceChunks:
    if held is not None and np.array_equal(held.rows, rows):
        return held
    whole = rows[chunks[:, 0]] & (chunks[:, 1:3] % VECTOR == 0).all(1)
    ordered = chunks[np.argsort(~whole, kind="stable")]
    return DeviceChunks(rows, ordered, int(whole.sum()), to_device(ordered, device))
