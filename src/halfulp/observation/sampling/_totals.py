"""The running counts of one tensor role at one name, as arrays that kernels add to."""

from __future__ import annotations

import math

import numpy as np
import torch

from .._record import FormatCounts, TensorRecord
from ._candidates import Candidates

# Columns of the integers, then of the reals; counts of formats and the histogram follow the integers.
ELEMENTS, ZEROS, NONFINITE, LARGEST, SAMPLED, STEP_NONFINITE, FIXED = range(7)
AMAX, AMIN, LAST_AMAX, SQUARES, LAST_FINITE, REALS = range(6)
SINGLE_COLUMNS, BLOCK_COLUMNS = 3, 4
# Exponents of the smallest subnormals, and how many exponents there are to the largest numbers.
NARROW, WIDE = (-149, 277), (-1074, 2098)


class Totals:
    """Counts of a tensor role; `finish` makes the record of them.

    Attributes:
        record: with what is no count: role, name, kind, dtype, order, steps.
        step: the last sampled step in which the tensor was seen; -1 before.
        integers: int64: six fixed columns, three per format (underflow, subnormal, overflow), four per block format
            (elements, underflow, subnormal, hidden), then the histogram.
        reals: float64: largest and smallest nonzero magnitude; of the last sample: largest magnitude of the whole
            tensor, sum of squares and number of finite elements.
        lowest: the exponent of the histogram's first bin.
    """

    __slots__ = ("addresses", "integers", "lowest", "offsets", "reals", "record", "step")

    def __init__(self, record: TensorRecord, candidates: Candidates, wide: bool = False) -> None:
        self.record: TensorRecord = record
        self.step: int = -1
        self.lowest: int
        self.lowest, bins = WIDE if wide else NARROW
        blocks_at = FIXED + SINGLE_COLUMNS * len(candidates.single)
        histogram_at = blocks_at + BLOCK_COLUMNS * len(candidates.blocks)
        self.offsets: tuple[int, int] = (blocks_at, histogram_at)
        self.integers: np.ndarray = np.zeros(histogram_at + bins, np.int64)
        self.reals: np.ndarray = np.array([0.0, math.inf, 0.0, 0.0, 0.0])
        self.addresses: tuple[int, int] = (self.integers.ctypes.data, self.reals.ctypes.data)

    def opens(self, step: int) -> bool:
        """Return whether a step is the tensor's first sight in it, and count it."""
        if self.step == step:
            return False
        self.step = step
        self.record.steps += 1
        return True

    def all_zero(self) -> bool:
        """Return whether tensors were seen, and had no element but zeros."""
        return bool(0 < self.integers[ELEMENTS] == self.integers[ZEROS])

    def begin_step(self) -> None:
        """Forget what only the last sampled step counts."""
        self.reals[LAST_AMAX] = self.reals[SQUARES] = self.reals[LAST_FINITE] = 0.0
        self.integers[STEP_NONFINITE] = 0

    def finish(self, candidates: Candidates) -> TensorRecord:
        """Return the record with all that was counted so far."""
        record, integers, reals = self.record, self.integers.tolist(), self.reals.tolist()
        record.elements, record.zeros, record.nonfinite, record.largest, record.sampled = integers[:5]
        record.amax, record.amin, record.last_amax = reals[AMAX], reals[AMIN], reals[LAST_AMAX]
        record.rms = math.sqrt(reals[SQUARES] / reals[LAST_FINITE]) if reals[LAST_FINITE] else 0.0
        blocks_at, histogram_at = self.offsets
        record.formats, record.block_hidden = {}, {}
        for k, single in enumerate(candidates.single):
            under, subnormal, over = integers[FIXED + 3 * k : FIXED + 3 * k + 3]
            record.formats[single.name] = FormatCounts(record.sampled, under, subnormal, over)
        for k, block in enumerate(candidates.blocks):
            elements, under, subnormal, hidden = integers[blocks_at + 4 * k : blocks_at + 4 * k + 4]
            record.formats[block.name] = FormatCounts(elements, under, subnormal, 0)
            record.block_hidden[block.name] = hidden
        bins = integers[histogram_at:]
        record.histogram = {self.lowest + k: count for k, count in enumerate(bins) if count}
        return record


def is_wide(dtype: torch.dtype) -> bool:
    """Return whether samples of a dtype are kept in float64."""
    return dtype == torch.float64
