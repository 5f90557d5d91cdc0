"""A recorded device function on the arrays of a table of pointers, any number of rows of them in one Triton launch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from .._index_map import CHUNK
from .._table import Table
from ._launch import on_device, to_device
from ._tensor_kernel import VECTOR
from ._writer import OPTIONS, element_source, load_module, module_source

TILE = 1024
PARTS = CHUNK // TILE


class TableKernel:
    """A compiled device function of elements, without constants, draws and blocks.

    Args:
        table: what is read, computed and written.
        tile: elements of a program, a power of two that divides CHUNK.
    """

    def __init__(self, table: Table, tile: int = TILE) -> None:
        self.tile = tile
        arguments = {column: f"a{column}" for column in range(table.columns)}
        given = ", ".join(arguments.values())
        lines = [
            *chunk_lines(),
            f"row = pointers + r * {table.columns}",
            *(f"{name} = tl.load(row + {column})" for column, name in arguments.items()),
            *line_lines(tile),
            f"element(i, b, {given}, lanes, aligned)",
        ]
        body = "\n".join(f"    {line}" for line in lines)
        text = f"@triton.jit\ndef run(chunks, pointers, aligned: tl.constexpr):\n{body}\n"
        functions = [element_source("element", table.trace, dict(arguments))]
        self.source = module_source(functions, text, table.trace.size())

    @functools.cached_property
    def run(self) -> Any:
        """The Triton function.

        Raises:
            ImportError: triton is not installed.
        """
        return load_module(self.source)["run"]

    def __call__(self, chunks: np.ndarray, pointers: np.ndarray, device: torch.device) -> None:
        """Run it over all chunks.

        Args:
            chunks: int64 array of shape (chunks, 4), see `kernels.chunks`.
            pointers: int64 array of shape (rows, columns); 0 for arrays that are not read.
            device: where the arrays lie.
        """
        rows = (pointers % VECTOR == 0).all(1)
        whole = rows[chunks[:, 0]] & (chunks[:, 1:3] % VECTOR == 0).all(1)
        table = to_device(pointers, device)
        for aligned in (True, False):
            some = chunks[whole == aligned]
            if len(some):
                grid = len(some), -(-int(some[:, 2].max()) // self.tile)
                with np.errstate(all="ignore"), on_device(device):  # Triton's interpreter runs by NumPy, which warns
                    self.run[grid](to_device(some, device), table, aligned, **OPTIONS)


def chunk_lines() -> list[str]:
    """Return the lines of a kernel that read its program's chunk: a tile of it, and the row of the pointers."""
    return [
        "c = tl.program_id(0).to(tl.int64)",
        "part = tl.program_id(1)",
        "begin = tl.load(chunks + 4 * c + 1)",
        "length = tl.load(chunks + 4 * c + 2)",
        "start = tl.load(chunks + 4 * c + 3)",
        "if aligned:",
        f"    begin = tl.multiple_of(begin, {VECTOR})",
        f"    length = tl.multiple_of(length, {VECTOR})",
        "r = tl.load(chunks + 4 * c)",
    ]


def line_lines(tile: int = TILE) -> list[str]:
    """Return the lines of a kernel that number the elements of a tile in a line."""
    return [
        f"offsets = (part * {tile} + tl.arange(0, {tile})).to(tl.int64)",
        "lanes = offsets < length",
        "i = begin + offsets",
        "b = i",
        "index = start + offsets",
    ]
