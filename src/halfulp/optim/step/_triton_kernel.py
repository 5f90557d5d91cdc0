"""The Triton source of one step specification: the device functions that Numba compiles, on blocks of elements."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...kernels import CHUNK
from ...kernels.triton._source import module_source
from . import _triton_functions as _triton_pieces
from ._kernel import bindings, codec_name, element_update
from ._spec import StepSpec, bits_of, draws_of, pointer_count, state_pointers

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
    return module_source(element_text(spec), bindings(spec) | _blocks(), _kernel_text(spec))


def element_text(spec: StepSpec) -> str:
    """The function of the elements i, of blocks b, whose global indices are `index`."""
    words = range(draws_of(spec)[2])
    drawn, pointers = draws_of(spec)[1], state_pointers(spec)

    def tensors(k: int) -> str:
        return f"a{pointers[k]}, a{pointers[k] + 1}, i, b"

    blocked = spec.blocked_states
    body = [f"{name} = 0.0" for name in METER] if spec.metered else []
    body += [f"counter{word} = stream_start(low{word}, high{word}, index)" for word in words]
    body += element_update(
        spec,
        words,
        lambda k: f"decode_{codec_name(blocked[k])}({tensors(k)})",
        lambda k, value: f"encode_{codec_name(blocked[k])}({tensors(k)}, {value}, {bits_of(drawn[k])})",
    )
    body += [f"return {', '.join(METER)}"] if spec.metered else []
    lines = "\n".join(f"    {line}" for line in body)
    return f"def element({', '.join(_arguments(spec))}):\n{lines}\n"


def _blocks() -> dict[str, object]:
    names = ("decode_signed", "decode_squared", "encode_signed", "encode_squared")
    return {name: getattr(_triton_pieces, name) for name in names}


def _arguments(spec: StepSpec) -> list[str]:
    columns = Columns.of(spec)
    keys = [f"{half}{word}" for word in range(columns.keys) for half in ("low", "high")]
    return ["i", "b", "index", *(f"a{j}" for j in range(columns.pointers)), *spec.rule_constants, *keys]


def _kernel_text(spec: StepSpec) -> str:
    """Return the source of the kernel: one program per tile of a chunk."""
    columns = Columns.of(spec)
    at = iter(range(columns.count))
    reads = [f"a{j} = tl.load(row + {next(at)})" for j in range(columns.pointers)]
    real = ".to(tl.uint32).to(tl.float32, bitcast=True)"
    reads += [f"{name} = tl.load(row + {next(at)}){real}" for name in spec.rule_constants]
    for word in range(columns.keys):
        reads += [f"low{word} = tl.load(row + {(column := next(at))}).to(tl.uint32)"]
        reads += [f"high{word} = (tl.load(row + {column}) >> 32).to(tl.uint32)"]
    call = f"element({', '.join(_arguments(spec))}, lanes, aligned)"
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
