"""Positions that were counted in 16 bits: codes of neighbours that are one, as the format rounds whole numbers."""

from __future__ import annotations

from typing import Any

import torch

from ..._record import PositionsRecord
from .._notebook import Notebook

# The whole numbers up to which each format has all.
COUNTED = {torch.bfloat16: 256, torch.float16: 2048}
WINDOW = 8
# As many pairs of equal neighbours chance does not place where rounding does.
FEWEST = 16
# Two positions may have one sine in 8 bits.
CHANCE = 0.2


class Positions:
    """Looks for outputs, one row per position, in which a column repeats just where rounded positions do."""

    def __init__(self, book: Notebook) -> None:
        self.book = book

    def note(self, name: str, output: Any) -> None:
        """Note what a module returned."""
        for one in output if isinstance(output, tuple) else (output,):
            if type(one) is torch.Tensor and one.dim() > 1 and one.shape[-2] > min(COUNTED.values()) + WINDOW:
                self._look(name, one)

    def _look(self, name: str, output: torch.Tensor) -> None:
        if name in self.book.record.positions or not output.is_floating_point() or not output.numel():
            return
        rows = output.detach()[(0,) * (output.dim() - 2)]
        for dtype, start in COUNTED.items():
            if len(rows) <= start + WINDOW:
                continue
            expected = _repeats(len(rows), dtype, rows.device)
            end = start + WINDOW
            columns = _like(rows[start : end + 1], expected[start:end])
            if not bool(columns.any()) or int(expected.sum()) < FEWEST:
                continue
            if bool(_like(rows[:, columns], expected).any()):
                self.book.record.positions[name] = PositionsRecord(name, dtype, len(rows))
                return


def _repeats(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return which of the positions from 0 are the next one in a dtype too."""
    positions = torch.arange(count, device=device, dtype=torch.float32).to(dtype)
    return positions[1:] == positions[:-1]


def _like(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the columns whose elements repeat wherever they are expected to, and hardly anywhere else."""
    repeats = rows[1:] == rows[:-1]
    return repeats[expected].all(0) & (repeats[~expected].double().mean(0) < CHANCE)
