"""The Triton source of one step specification: its recorded device function, on blocks of elements."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...kernels import CHUNK
from ...kernels.triton._writer import element_source, module_source, piece_source
from ._kernel import record_step, table
from ._spec import StepSpec, draws_of, pointer_count

TILE = 1024
PARTS = CHUNK // TILE
METER = ("seen", "cancelled", "wanted", "kept")


@dataclass(frozen=True)
class Columns:
    """The columns of the parameter table: addresses, constants by their bits, 64-bit keys.

    Attributes:
        pointers: how many addresses come first.
        constants: of the rule, behind them.
        keys: behind those.
    """

    pointers: int
    constants: int
    keys: int

    @classmethod
    def of(cls, spec: StepSpec) -> Columns:
        """Return the columns of one specification."""
        return cls(pointer_count(spec), len(spec.rule.constants), draws_of(spec)[2])

    @property
    def count(self) -> int:
        """The number of columns."""
        return self.pointers + self.constants + self.keys


@functools.cache
def triton_source(spec: StepSpec) -> str:
    """The whole module, with the kernel `step(chunks, parameters, meter, aligned)`."""
    start = table(spec).start
    functions = [] if start is None else [piece_source("start_stream", start)]
    return module_source(
        [*functions, element_source("element", record_step(spec), _arguments(spec))], _kernel_text(spec)
    )


def _arguments(spec: StepSpec) -> dict[object, str]:
    columns = Columns.of(spec)
    names: dict[object, str] = {j: f"a{j}" for j in range(columns.pointers)}
    names |= {("constant", k): f"constant{k}" for k in range(columns.constants)}
    return names | {("counter", k): f"counter{k}" for k in range(columns.keys)}


def _kernel_text(spec: StepSpec) -> str:
    """Return the source of the kernel: one program per tile of a chunk."""
    columns = Columns.of(spec)
    at = iter(range(columns.count))
    reads = [f"a{j} = tl.load(row + {next(at)})" for j in range(columns.pointers)]
    real = ".to(tl.uint32).to(tl.float32, bitcast=True)"
    reads += [f"constant{k} = tl.load(row + {next(at)}){real}" for k in range(columns.constants)]
    reads += [f"key{k} = tl.load(row + {next(at)})" for k in range(columns.keys)]
    halves = [f"key{k}.to(tl.uint32), (key{k} >> 32).to(tl.uint32)" for k in range(columns.keys)]
    counters = [f"counter{k} = start_stream({half}, index)" for k, half in enumerate(halves)]
    call = f"element(i, b, {', '.join(_arguments(spec).values())}, lanes, aligned)"
    lines = [
        "c = tl.program_id(0).to(tl.int64)",
        "part = tl.program_id(1)",
        "begin = tl.load(chunks + 4 * c + 1)",
        "length = tl.load(chunks + 4 * c + 2)",
        "start = tl.load(chunks + 4 * c + 3)",
        "if aligned:",
        "    begin = tl.multiple_of(begin, 16)",
        "    length = tl.multiple_of(length, 16)",
        f"row = parameters + tl.load(chunks + 4 * c) * {columns.count}",
        *reads,
        *(_rows(spec.block) if spec.block else _line()),
        *counters,
        *(_metered(call) if spec.metered else [call]),
    ]
    body = "\n".join(f"    {line}" for line in lines)
    return f"@triton.jit\ndef step(chunks, parameters, meter, aligned: tl.constexpr):\n{body}\n"


def _line() -> list[str]:
    return [
        f"offsets = (part * {TILE} + tl.arange(0, {TILE})).to(tl.int64)",
        "lanes = offsets < length",
        "i = begin + offsets",
        "b = i",
        "index = start + offsets",
    ]


def _rows(block: int) -> list[str]:
    rows = TILE // block
    return [
        f"blocks = (part * {rows} + tl.arange(0, {rows})).to(tl.int64)[:, None]",
        f"offsets = blocks * {block} + tl.arange(0, {block})[None, :]",
        f"lanes = blocks * {block} < length",
        "i = begin + offsets",
        f"b = begin // {block} + blocks",
        "index = start + offsets",
    ]


def _metered(call: str) -> list[str]:
    lines = [f"{', '.join(METER)} = {call}", f"to = meter + (c * {PARTS} + part) * {len(METER)}"]
    return lines + [
        f"tl.store(to + {j}, tl.sum(tl.where(lanes, {name}, 0.0).to(tl.float64)))" for j, name in enumerate(METER)
    ]
