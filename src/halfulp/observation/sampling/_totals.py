"""The running counts of one tensor role at one name."""

from __future__ import annotations

import math

import numpy as np
import torch

from .._record import FormatCounts, TensorRecord
from ._candidates import Candidates

SINGLE_COLUMNS, BLOCK_COLUMNS = 3, 4
# Exponents of the smallest subnormals, and how many exponents there are to the largest numbers.
NARROW, WIDE = (-149, 277), (-1074, 2098)


class Totals:
    """Counts of a tensor role; `finish` makes the record of them.

    Attributes:
        record: with what is no count: role, name, kind, dtype, order, steps.
        step: the last sampled step in which the tensor was seen; -1 before.
        elements, zeros, nonfinite, largest: of whole tensors: all, zeros, infinities and NaN, those at the dtype's
            largest magnitude.
        amax, amin: largest and smallest nonzero finite magnitude.
        step_nonfinite, last_amax: of the last sampled step.
        sampled: elements of samples.
        squares, finite: of the last sampled step: the sum of squares of finite sampled elements, and how many they are.
        counts: int64: what follows, one behind the other.
        singles: (formats of single elements, 3): underflow, subnormal, overflow.
        blocks: (block formats, 4): elements, underflow, subnormal, hidden.
        histogram: sampled nonzero finite elements by exponent.
        lowest: the exponent of the histogram's first bin.
    """

    __slots__ = (
        "amax",
        "amin",
        "blocks",
        "counts",
        "elements",
        "finite",
        "histogram",
        "largest",
        "last_amax",
        "lowest",
    )
    __slots__ += ("nonfinite", "record", "sampled", "singles", "squares", "step", "step_nonfinite", "zeros")

    def __init__(self, record: TensorRecord, candidates: Candidates, wide: bool = False) -> None:
        self.record: TensorRecord = record
        self.step: int = -1
        self.elements: int = 0
        self.zeros: int = 0
        self.nonfinite: int = 0
        self.largest: int = 0
        self.amax: float = 0.0
        self.amin: float = math.inf
        self.step_nonfinite: int = 0
        self.last_amax: float = 0.0
        self.sampled: int = 0
        self.squares: float = 0.0
        self.finite: float = 0.0
        self.lowest: int
        self.lowest, bins = WIDE if wide else NARROW
        blocks_at = SINGLE_COLUMNS * len(candidates.single)
        histogram_at = blocks_at + BLOCK_COLUMNS * len(candidates.blocks)
        self.counts: np.ndarray = np.zeros(histogram_at + bins, np.int64)
        self.singles: np.ndarray = self.counts[:blocks_at].reshape(-1, SINGLE_COLUMNS)
        self.blocks: np.ndarray = self.counts[blocks_at:histogram_at].reshape(-1, BLOCK_COLUMNS)
        self.histogram: np.ndarray = self.counts[histogram_at:]

    def open(self, step: int) -> None:
        """Count a step at the tensor's first sight in it, and forget what only the last sampled step counts."""
        if self.step != step:
            self.step = step
            self.record.steps += 1
            self.step_nonfinite, self.last_amax, self.squares, self.finite = 0, 0.0, 0.0, 0.0

    def add_extremes(self, elements: int, zeros: int, nonfinite: int, largest: int, amax: float, amin: float) -> None:
        """Add what a whole tensor has."""
        self.elements += elements
        self.zeros += zeros
        if nonfinite:
            self.nonfinite += nonfinite
            self.step_nonfinite += nonfinite
        self.largest += largest
        if amax > self.last_amax:
            self.last_amax = amax
            self.amax = max(self.amax, amax)
        if amin < self.amin:
            self.amin = amin

    def all_zero(self) -> bool:
        """Return whether tensors were seen, and had no element but zeros."""
        return 0 < self.elements == self.zeros

    def finish(self, candidates: Candidates) -> TensorRecord:
        """Return the record with all that was counted so far."""
        record = self.record
        record.elements, record.zeros, record.nonfinite = self.elements, self.zeros, self.nonfinite
        record.largest, record.sampled = self.largest, self.sampled
        record.amax, record.amin, record.last_amax = self.amax, self.amin, self.last_amax
        record.rms = math.sqrt(self.squares / self.finite) if self.finite else 0.0
        record.formats, record.block_hidden = {}, {}
        for single, (under, subnormal, over) in zip(candidates.single, self.singles.tolist()):
            record.formats[single.name] = FormatCounts(record.sampled, under, subnormal, over)
        for block, (elements, under, subnormal, hidden) in zip(candidates.blocks, self.blocks.tolist()):
            record.formats[block.name] = FormatCounts(elements, under, subnormal, 0)
            record.block_hidden[block.name] = hidden
        record.histogram = {self.lowest + k: count for k, count in enumerate(self.histogram.tolist()) if count}
        return record


def is_wide(dtype: torch.dtype) -> bool:
    """Return whether samples of a dtype are kept in float64."""
    return dtype == torch.float64
