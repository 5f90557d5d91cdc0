"""Rows of the kernel's table that stay from step to step: what changes are pointers, keys and whether a step begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels import address, run_chunks
from ._candidates import Candidates
from ._kernel import (
    BINS,
    BROKEN,
    COLUMNS,
    COUNT,
    DATA,
    FRESH,
    INFINITE_WORD,
    INTEGERS,
    KEY,
    LARGEST_WORD,
    NONZERO,
    REALS_AT,
    ROOM,
    SAMPLE,
    TAKEN,
    WIDE,
    copy_kernel,
)
from ._sample_places import MOST
from ._sampler import checked_kernel, constants, rooms
from ._totals import Totals


class Rows:
    """Tensors of one dtype on the CPU, whose samples are taken together at every sampled step.

    Args:
        dtype: of their memory, one that kernels are made for.
        totals: what their counts are added to, and the dtypes whose largest number is counted; empty where samples are
            only copied.
        count: how many tensors.

    Attributes:
        written: float64, to which the samples are written; None where they are not.
    """

    def __init__(self, dtype: torch.dtype, count: int, totals: Sequence[tuple[Totals, torch.dtype]] = ()) -> None:
        self.dtype, self._totals = dtype, [one for one, _ in totals]
        self.written: torch.Tensor | None = None
        self._room: np.ndarray | None = None
        self._threads: int = 0
        self._table: np.ndarray = np.zeros((count, COLUMNS), np.int64)
        self._at: int = self._table.ctypes.data
        for row, (one, storage) in enumerate(totals):
            self._table[row, [INTEGERS, REALS_AT, LARGEST_WORD, INFINITE_WORD]] = constants(one, storage, dtype)

    def point(self, data: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray, keys: np.ndarray) -> None:
        """Say where the tensors lie, how many elements they have, and the keys of their places."""
        table = self._table
        table[:, DATA], table[:, COUNT], table[:, KEY] = data, counts, keys

    def widen(self, packed: torch.Tensor, ends: np.ndarray) -> None:
        """Write the samples to float64 too, from the ends of parts that hold as many as are sampled at most."""
        self.written = packed
        self._table[:, WIDE] = address(packed) + 8 * ends[:-1]

    def look(self, candidates: Candidates, step: int) -> np.ndarray:
        """Count the tensors, and return how many elements of each are sampled."""
        table = self._table
        table[:, FRESH] = [one.opens(step) for one in self._totals]
        self._place_samples()
        run_chunks(checked_kernel(self.dtype), table[:, COUNT], self._at, *candidates.arguments)
        return table[:, TAKEN]

    def copy(self) -> np.ndarray:
        """Copy the samples alone, and return how many elements of each are sampled."""
        self._place_samples()
        copy_kernel(self.dtype)(0, len(self._table), self._at)
        return self._table[:, TAKEN]

    @property
    def nonzero(self) -> list[int]:
        """How many elements of each sample that was made float64 are not zero."""
        return self._table[:, NONZERO].tolist()

    @property
    def broken(self) -> list[int]:
        """Rows whose tensors hold NaN or infinity in this step."""
        return [row for row, count in enumerate(self._table[:, BROKEN].tolist()) if count]

    def _place_samples(self) -> None:
        """Make room for the samples in float32 and the counts of their exponents."""
        threads = torch.get_num_threads()
        if self._threads != threads:
            self._threads = threads
            self._room, places = rooms(len(self._table), ROOM)
            self._table[:, SAMPLE], self._table[:, BINS] = places, places + 4 * MOST
