"""Rows of the kernel's table that stay from step to step: what changes are pointers, keys and whether a step begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels import run_chunks
from ._candidates import Candidates
from ._kernel import (
    BROKEN,
    COLUMNS,
    COUNT,
    DATA,
    FRESH,
    INFINITE_WORD,
    INTEGERS,
    KEY,
    LARGEST_WORD,
    REALS_AT,
    SAMPLE,
    TAKEN,
    WIDE,
    copy_kernel,
)
from ._sample_places import MOST
from ._sampler import checked_kernel, constants
from ._totals import Totals


class Rows:
    """Tensors of one dtype on the CPU, whose samples are taken together at every sampled step.

    Args:
        dtype: of their memory, one that kernels are made for.
        totals: what their counts are added to, and the dtypes whose largest number is counted; empty where samples are
            only copied.
        count: how many tensors.
    """

    def __init__(self, dtype: torch.dtype, count: int, totals: Sequence[tuple[Totals, torch.dtype]] = ()) -> None:
        self.dtype, self._totals = dtype, [one for one, _ in totals]
        self._room: np.ndarray | None = None
        self._table: np.ndarray = np.zeros((count, COLUMNS), np.int64)
        for row, (one, storage) in enumerate(totals):
            self._table[row, [INTEGERS, REALS_AT, LARGEST_WORD, INFINITE_WORD]] = constants(one, storage, dtype)

    def point(self, data: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray, keys: np.ndarray) -> None:
        """Say where the tensors lie, how many elements they have, and the keys of their places."""
        table = self._table
        table[:, DATA], table[:, COUNT], table[:, KEY], table[:, WIDE] = data, counts, keys, 0

    def widen(self, places: np.ndarray) -> None:
        """Say where the samples go in float64, with room for as many elements as are sampled at most."""
        self._table[:, WIDE] = places

    def look(self, candidates: Candidates, step: int) -> np.ndarray:
        """Count the tensors, and return how many elements of each are sampled."""
        table = self._table
        table[:, FRESH] = [one.opens(step) for one in self._totals]
        self._place_samples()
        arrays = table, candidates.thresholds, candidates.block_numbers
        run_chunks(checked_kernel(self.dtype), table[:, COUNT], *arrays)
        return table[:, TAKEN]

    def copy(self) -> np.ndarray:
        """Copy the samples alone, and return how many elements of each are sampled."""
        self._place_samples()
        copy_kernel(self.dtype)(0, len(self._table), self._table)
        return self._table[:, TAKEN]

    @property
    def broken(self) -> list[int]:
        """Rows whose tensors hold NaN or infinity in this step."""
        return np.flatnonzero(self._table[:, BROKEN]).tolist()

    def _place_samples(self) -> None:
        """Make room for the samples in float32: one for all rows, and one for each where threads share the rows."""
        rooms = len(self._table) if torch.get_num_threads() > 1 else 1
        if self._room is None or len(self._room) != rooms:
            self._room = np.empty((rooms, MOST), np.float32)
            self._table[:, SAMPLE] = self._room.ctypes.data + np.arange(len(self._table)) * (MOST * 4 * (rooms > 1))
