"""Batches: parameters that one step of a shadow serves, whose samples lie one after another in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....kernels import address, plain_address
from ...record._record import ParameterRecord, Realised, Role
from ...sampling._kernel import KERNEL_DTYPES
from ...sampling._plain import PLAIN_TYPES, Stored, stored
from ...sampling._sample_places import sample_size
from ...sampling._sampler import sampled_all
from ...sampling._table import Rows
from .._notebook import Notebook
from ._realised import add_changes


@dataclass(slots=True)
class Stepped:
    """One parameter around a step.

    Attributes:
        record: its record.
        parameter: itself.
        options: its group.
        elements: of its memory.
        weight, gradient: float64 samples before the step.
        states: of halfulp's optimizers: samples of its states before the step.
        change: the wanted change where the optimizer computes it in a way of its own.
        wanted_states: samples of the states that it wants then.
        unplanned: whether the optimizer has yet to lay out this parameter's states, so that nothing is known.
    """

    record: ParameterRecord
    parameter: torch.Tensor
    options: dict[str, Any]
    elements: int
    weight: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64, device="cpu"))
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64, device="cpu"))
    states: dict[str, Any] = field(default_factory=dict)
    change: torch.Tensor | None = None
    wanted_states: dict[str, torch.Tensor] = field(default_factory=dict)
    unplanned: bool = False


class Layout:
    """Where the samples of some parameters lie: a part for each of as many elements as are sampled at most.

    A tensor whose short last run is sampled leaves some of its part free, and zeros there.

    Args:
        book: what is written to.
        named: name and kind of each parameter.
        elements: how many elements each has.
    """

    def __init__(self, book: Notebook, named: Sequence[tuple[str, str]], elements: Sequence[int]) -> None:
        self.book, self.named, self.elements = book, list(named), list(elements)
        sizes = [sample_size(count) for count in elements]
        self.ends: np.ndarray = np.cumsum([0, *sizes], dtype=np.int64)
        self.taken: list[int] = sizes
        self._rows: np.ndarray = np.array([book.row_of(name) for name, _ in named], np.int64)
        self._tables: dict[tuple[str, torch.dtype, int], Rows] = {}

    def sample(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return samples of one tensor per parameter, float64."""
        data = self._addresses(tensors)
        if data is None:
            found = [_numbers(tensor) for tensor in tensors]
            keys = [self.book.key(name) for name, _ in self.named]
            samples = sampled_all([(one.flat, key) for one, key in zip(found, keys)])
            return self._packed(samples, found)
        return self._take(self._table("", tensors[0].dtype), data)

    def look(self, role: Role, state: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Count one tensor per parameter under a role, and return the samples, float64.

        Args:
            role: of the tensors.
            state: the name of a state; several of them may have one role.
            tensors: one per parameter.
        """
        data = self._addresses(tensors)
        if data is None:
            found = [_numbers(tensor) for tensor in tensors]
            samples = self.book.look_all(role, [(*named, one) for named, one in zip(self.named, found)])
            return self._packed(samples, found)
        dtype = tensors[0].dtype
        return self._take(self._table(f"{role}.{state}", dtype, role, [dtype] * len(tensors)), data, role)

    def look_at_changes(
        self,
        records: Sequence[Realised],
        before: torch.Tensor,
        after: torch.Tensor,
        wanted: torch.Tensor,
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """Count what became of wanted values, and the changes to them under the role of updates.

        Args:
            records: one per parameter.
            before, after, wanted: float64, in this layout.
            dtypes: of the parameters that are changed.
        """
        wide = any(dtype == torch.float64 for dtype in dtypes)
        if wide:
            values = wanted - before
            add_changes(records, before, after, values, self.ends)
        else:
            values = torch.empty(len(wanted), dtype=torch.float32, device="cpu")
            add_changes(records, before, after, wanted, self.ends, as_values=True, rounded=values)
        if wide or not self.book.by_kernel or len(set(dtypes)) > 1:
            parts = self.parts(values)
            named = [(*named, Stored(part, dtype)) for named, part, dtype in zip(self.named, parts, dtypes)]
            self.book.look_all("update", named)
            return
        data = address(values) + 4 * self.ends[:-1]
        table = self._table(f"update.{dtypes[0]}", torch.float32, "update", dtypes)
        table.point(data, self.taken, self.book.keys[self._rows])
        table.look(self.book.candidates, self.book.step)
        self._note("update", table)

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the sample of each parameter among packed ones."""
        ends = self.ends.tolist()
        return [packed[start : start + taken] for start, taken in zip(ends, self.taken)]

    def _addresses(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """Where plain tensors of one dtype lie; None where one is not plain."""
        dtype = tensors[0].dtype
        if not self.book.by_kernel or dtype not in KERNEL_DTYPES:
            return None
        data = [plain_address(tensor) if tensor.dtype is dtype else 0 for tensor in tensors]
        return data if all(data) else None

    def _table(self, name: str, memory: torch.dtype, role: Role | None = None, dtypes: Sequence = ()) -> Rows:
        """Rows for tensors of a dtype, under a role with storage of some dtypes."""
        key = name, memory, self.book.renewed
        table = self._tables.get(key)
        if table is None:
            flat = torch.empty(0, dtype=memory, device="cpu")
            totals = []
            for (own, kind), dtype in zip(self.named, dtypes):
                assert role is not None
                totals.append((self.book.totals_of(role, own, kind, Stored(flat, dtype)), dtype))
            table = self._tables[key] = Rows(memory, len(self.named), totals)
        return table

    def _take(self, table: Rows, data: list[int], role: Role | None = None) -> torch.Tensor:
        packed = torch.empty(int(self.ends[-1]), dtype=torch.float64, device="cpu")
        table.point(data, self.elements, self.book.keys[self._rows])
        table.widen(address(packed) + 8 * self.ends[:-1])
        taken = table.copy() if role is None else table.look(self.book.candidates, self.book.step)
        self.taken = taken.tolist()
        if role is not None:
            self._note(role, table)
        return packed

    def _note(self, role: Role, table: Rows) -> None:
        """Give the tensors their positions in the step, and note those that hold NaN or infinity."""
        first = self.book.position
        for row in table.broken:
            self.book.position = first + row
            self.book.note_nonfinite(self.book.totals[role, self.named[row][0]])
        self.book.position = first + len(self.named)

    def _packed(self, samples: Sequence[torch.Tensor], found: Sequence[Stored]) -> torch.Tensor:
        packed = torch.zeros(int(self.ends[-1]), dtype=torch.float64, device="cpu")
        self.taken = [len(sample) for sample in samples]
        for start, sample, one in zip(self.ends.tolist(), samples, found):
            packed[start : start + len(sample)] = sample.double() * one.scale
        return packed


def _numbers(tensor: torch.Tensor) -> Stored:
    found = stored(tensor)
    assert found is not None, "asked for numbers_in first"
    return found


def numbers_in(tensor: torch.Tensor) -> int | None:
    """Return how many numbers a tensor's memory holds; None where they cannot be read."""
    simple = type(tensor) in PLAIN_TYPES and tensor.dtype in KERNEL_DTYPES and tensor.is_cpu
    if simple and tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.numel()
    found = stored(tensor)
    return None if found is None else found.flat.numel()
