"""The running counts of one tensor role at one name."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from .._record import FormatCounts, TensorRecord
from ._candidates import Candidates

SINGLE_COLUMNS, BLOCK_COLUMNS = 3, 4
# Exponents of the smallest subnormals, and how many exponents there are to the largest numbers.
NARROW, WIDE = (-149, 277), (-1074, 2098)
OF_STEP = 2


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
        singles: int64 (formats of single elements, 3): underflow, subnormal, overflow.
        blocks: int64 (block formats, 4): elements, underflow, subnormal, hidden.
        histogram: int64: sampled nonzero finite elements by exponent.
        sums, counters: what kernels have counted and `take` moves to these; None where none has. The first OF_STEP sums
            are of the last sampled step.
        lowest: the exponent of the histogram's first bin.
    """

    __slots__ = (
        "amax",
        "amin",
        "blocks",
        "counters",
        "elements",
        "finite",
        "histogram",
        "largest",
        "last_amax",
        "lowest",
        "nonfinite",
        "record",
        "sampled",
        "singles",
        "squares",
        "step",
        "step_nonfinite",
        "sums",
        "take",
        "zeros",
    )

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
        self.singles: np.ndarray = np.zeros((len(candidates.single), SINGLE_COLUMNS), np.int64)
        self.blocks: np.ndarray = np.zeros((len(candidates.blocks), BLOCK_COLUMNS), np.int64)
        self.histogram: np.ndarray = np.zeros(bins, np.int64)
        self.sums: np.ndarray | None = None
        self.counters: np.ndarray | None = None
        self.take: Callable[[Totals], None] = lambda _: None

    def open(self, step: int) -> None:
        """Count a step at the tensor's first sight in it, and forget what only the last sampled step counts."""
        if self.step != step:
            self.step = step
            self.record.steps += 1
            self.step_nonfinite, self.last_amax, self.squares, self.finite = 0, 0.0, 0.0, 0.0
            if self.sums is not None:
                self.sums[:OF_STEP] = 0.0

    def add_extremes(self, elements: int, zeros: int, nonfinite: int, largest: int, amax: float, amin: float) -> None:
        """Add what a whole tensor has."""
        self.elements += elements
        self.zeros += zeros
        if nonfinite:
            self.nonfinite += nonfinite
            self.step_nonfinite += nonfinite
        self.largest += largest
        if amax > self.last_amax:
            self.note_amax(amax)
        if amin < self.amin:
            self.amin = amin

    def note_amax(self, amax: float) -> None:
        """Take the largest magnitude of the last sampled step so far."""
        self.last_amax = amax
        self.amax = max(self.amax, amax)

    def all_zero(self) -> bool:
        """Return whether tensors were seen, and had no element but zeros."""
        return 0 < self.elements == self.zeros

    def finish(self, candidates: Candidates) -> TensorRecord:
        """Return the record with all that was counted so far."""
        self.take(self)
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
