"""The Triton source of one step specification: its recorded device function, on blocks of elements."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...kernels._device_function import STREAM
from ...kernels.triton._table_kernel import PARTS, TILE, chunk_lines, line_lines
from ...kernels.triton._writer import element_source, module_source, piece_source
from ..parameters._step_spec import StepSpec, pointer_count
from ._kernel import record_step, table

METER = ("seen", "cancelled", "wanted", "kept")


@dataclass(frozen=True)
class Columns:
    """The columns of the parameter table: addresses, constants by their bits, the 64-bit key of whoever draws.

    Attributes:
        pointers: how many addresses come first.
        constants: of the rule, behind them.
        keys: behind those.
        scales: addresses of scales, behind those: of the weight's and of the gradient's.
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
    """The whole module, with the kernel `step(chunks, parameters, meter, aligned)`; of scaled parameters also `scales`.

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
        *(_rows(spec.block) if spec.block else line_lines()),
        *draws,
        *(_largest(spec, call) if spec.finds_amax else _metered(call) if spec.metered else [call]),
    ]
    body = "\n".join(f"    {line}" for line in lines)
    given = f"chunks, parameters, meter, {'scales, ' if spec.scaled else ''}aligned: tl.constexpr"
    return f"@triton.jit\ndef step({given}):\n{body}\n"


def _rows(block: int) -> list[str]:
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


def _metered(call: str) -> list[str]:
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
    """Return how many largest magnitudes a parameter has: of its weight, its scaled states and its payload."""
    return 2 + len(spec.scaled_states)
