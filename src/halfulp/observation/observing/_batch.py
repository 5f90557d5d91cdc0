"""Samples of the parameters that step together, and how much of the wanted changes took place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...kernels import address, plain_address, run_chunks, select_engine
from ...kernels._table import CHUNK
from ...kernels.vector._machine_function import address_of
from .._record import ParameterRecord, Realised, Role
from ..sampling._device_functions import KERNEL_DTYPES, changes_table
from ..sampling._sample_places import PLAIN_TYPES, Stored, sample_size, stored
from ..sampling._sampler import Look, Rows, compiled, look
from ._notebook import Notebook

_NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")


@dataclass(slots=True)
class Stepped:
    """One parameter around a step.

    Attributes:
        places: where parameter, gradient and states lie, in order; 0 of those that are no plain memory.
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
    places: list[int]
    weight: torch.Tensor = _NOTHING
    gradient: torch.Tensor = _NOTHING
    states: dict[str, Any] = field(default_factory=dict)
    change: torch.Tensor | None = None
    wanted_states: dict[str, torch.Tensor] = field(default_factory=dict)
    unplanned: bool = False


class Layout:
    """Where the samples of some parameters lie: a part for each of as many elements as are sampled at most.

    A tensor whose short last run is sampled leaves some of its part free, and zeros there. What is returned under a
    name is overwritten when the name is sampled again.

    Attributes:
        places: where the parts lie.
        ends: where they begin and end.
    """

    def __init__(self, book: Notebook, named: Sequence[tuple[str, str]], elements: Sequence[int]) -> None:
        self.book, self.named, self.elements = book, list(named), list(elements)
        sizes = [sample_size(count) for count in elements]
        self.places: Parts = Parts(np.cumsum([0, *sizes]))
        self.ends: np.ndarray = self.places.ends
        self._taken: list[int] = sizes
        self._rows: list[int] = [book.row_of(name) for name, _ in named]
        self._tables: dict[tuple[str, torch.dtype, int], Rows] = {}
        self._packs: dict[str, torch.Tensor] = {}

    def release(self) -> None:
        """Let go of the memory of samples until the next sampled step."""
        self._packs.clear()
        for table in self._tables.values():
            table.wide = None

    def sample(self, name: str, tensors: Sequence[torch.Tensor], places: list[int] | None = None) -> torch.Tensor:
        """Return samples of one tensor per parameter, float64.

        Args:
            tensors: one per parameter, of one dtype.
            places: where they lie, if that is known.
        """
        data = self._places(tensors, places)
        if data is None:
            found = [_numbers(tensor) for tensor in tensors]
            keys = [self.book.key(own) for own, _ in self.named]
            samples = look([Look(one.flat, key) for one, key in zip(found, keys)])
            return self._packed(samples, found)
        return self._take(name, self._table(name, tensors[0].dtype), data)

    def look(
        self, role: Role, name: str, tensors: Sequence[torch.Tensor], places: list[int] | None = None
    ) -> torch.Tensor:
        """Count one tensor per parameter under a role, and return the samples, as `sample` does."""
        data = self._places(tensors, places)
        if data is None:
            found = [_numbers(tensor) for tensor in tensors]
            samples = self.book.look_all(role, [(*named, one) for named, one in zip(self.named, found)])
            return self._packed(samples, found)
        dtype = tensors[0].dtype
        return self._take(name, self._table(name, dtype, role, [dtype] * len(tensors)), data, role)

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
            add_changes(records, before, after, values, self.places)
        else:
            values = self._pack("changes", torch.float32)
            add_changes(records, before, after, wanted, self.places, as_values=True, rounded=values)
        if wide or not self.book.by_kernel or len(set(dtypes)) > 1:
            parts = self.parts(values)
            named = [(*named, Stored(part, dtype)) for named, part, dtype in zip(self.named, parts, dtypes)]
            self.book.look_all("update", named)
            return
        data = address(values) + 4 * self.ends[:-1]
        table = self._table(f"update.{dtypes[0]}", torch.float32, "update", dtypes)
        table.point(data, self._taken, self.book.keys[self._rows])
        self._note("update", table.look(self.book.step))

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the sample of each parameter among packed ones."""
        ends = self.ends.tolist()
        return [packed[start : start + taken] for start, taken in zip(ends, self._taken)]

    def count_nonzero(self, packed: torch.Tensor) -> list[int]:
        """Return how many elements of each part are not zero."""
        counts, zeros = np.diff(self.ends), np.flatnonzero(packed.numpy() == 0)
        if len(zeros):
            counts -= np.bincount(np.searchsorted(self.ends, zeros, side="right") - 1, minlength=len(counts))
        found: list[int] = counts.tolist()
        return found

    def _places(self, tensors: Sequence[torch.Tensor], places: list[int] | None) -> list[int] | None:
        """Where plain tensors of one dtype lie; None where one is not plain."""
        dtype = tensors[0].dtype
        if not self.book.by_kernel or dtype not in KERNEL_DTYPES:
            return None
        if places is None:
            places = [plain_address(tensor) if tensor.dtype is dtype else 0 for tensor in tensors]
        return places if all(places) else None

    def _pack(self, name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Room for the samples of a name."""
        pack = self._packs.get(name)
        if pack is None:
            pack = self._packs[name] = torch.empty(int(self.ends[-1]), dtype=dtype, device="cpu")
        return pack

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
            is_wide = memory is not torch.float32 or role != "update"
            table = self._tables[key] = Rows(memory, len(self.named), self.book.counting, totals, is_wide)
        return table

    def _take(self, name: str, table: Rows, data: list[int], role: Role | None = None) -> torch.Tensor:
        packed = self._pack(name)
        if table.wide is not packed:
            table.widen(packed, self.ends)
        table.point(data, self.elements, self.book.keys[self._rows])
        if role is None:
            table.copy()
        else:
            self._note(role, table.look(self.book.step))
        self._taken = table.taken
        return packed

    def _note(self, role: Role, broken: list[int]) -> None:
        """Give the tensors their positions in the step, and note those that hold NaN or infinity."""
        first = self.book.position
        for row in broken:
            self.book.position = first + row
            self.book.note_nonfinite(self.book.totals[role, self.named[row][0]])
        self.book.position = first + len(self.named)

    def _packed(self, samples: Sequence[torch.Tensor], found: Sequence[Stored]) -> torch.Tensor:
        packed = torch.zeros(int(self.ends[-1]), dtype=torch.float64, device="cpu")
        self._taken = [len(sample) for sample in samples]
        for start, sample, one in zip(self.ends.tolist(), samples, found):
            packed[start : start + len(sample)] = sample.double() * one.scale
        return packed


def _numbers(tensor: torch.Tensor) -> Stored:
    found = stored(tensor)
    assert found is not None, "asked for located first"
    return found


def located(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's numbers lie, 0 if they are no plain memory, and how many they are, -1 if not known."""
    if tensor.dtype in KERNEL_DTYPES:
        at = plain_address(tensor)
        simple = type(tensor) in PLAIN_TYPES and tensor.is_cpu and tensor.layout is torch.strided
        if at or (simple and not tensor.is_nested):
            return at, tensor.numel()
    found = stored(tensor)
    return 0, -1 if found is None else found.flat.numel()


class Parts:
    """Where samples of some tensors lie, one tensor's behind the other's, and what a kernel compares them with.

    Args:
        ends: where the parts begin and end: one more than there are tensors.
    """

    def __init__(self, ends: Sequence[int] | np.ndarray) -> None:
        self.ends: np.ndarray = np.asarray(ends, np.int64)
        count = len(self.ends) - 1
        self._chunks = np.zeros((count, CHUNK), np.int64)
        self._chunks[:, 1], self._chunks[:, 2] = self.ends[:-1], np.diff(self.ends)
        self._pointers, self._rows = np.zeros(4, np.int64), np.zeros(count, np.int64)
        self._constants, self._sums = np.zeros(2), np.zeros((count, CHUNK))
        arrays = self._chunks, self._pointers, self._rows, self._constants
        self._given: tuple[int, ...] = (*map(address_of, arrays), 0, address_of(self._sums), 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parts:
        memo[id(self)] = made = Parts(self.ends)  # which has addresses of its own
        return made

    def count_changes(
        self, values: Sequence[torch.Tensor], rounded: torch.Tensor | None, as_values: bool, decreases: bool
    ) -> list[list[float]]:
        """Return the sums of `changes_table` of each tensor; the arguments are those of `add_changes`."""
        if select_engine("cpu") != "llvm":
            return self._count_by_numpy(values, rounded, as_values, decreases)
        self._pointers[: len(values)] = [address(one) for one in values]
        self._pointers[3] = 0 if rounded is None else address(rounded)
        self._constants[:] = as_values, 0.0 if decreases else np.inf
        run_chunks(compiled(changes_table(rounded is not None)), self._chunks[:, 2], *self._given)
        sums: list[list[float]] = self._sums.tolist()
        return sums

    def _count_by_numpy(
        self, values: Sequence[torch.Tensor], rounded: torch.Tensor | None, as_values: bool, decreases: bool
    ) -> list[list[float]]:
        """The reference."""
        found = []
        for start, end in itertools.pairwise(self.ends):
            b, a, w = (one.numpy()[start:end] for one in values)
            with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                w = w - b if as_values else w
                if rounded is not None:
                    rounded[start:end] = torch.from_numpy(w)
                w, change = np.minimum(w, 0) if decreases else w, a - b
                counts = (w != 0) & np.isfinite(w) & np.isfinite(change)
                same = counts & (b.view(np.int64) == a.view(np.int64))
                w, change = w[counts], change[counts]
                found.append([float(x.sum()) for x in (counts, same, w**2, w * change)])
        return found


def add_changes(
    records: Sequence[Realised],
    before: torch.Tensor,
    after: torch.Tensor,
    wanted: torch.Tensor,
    parts: Parts | None = None,
    *,
    known: bool = True,
    decreases: bool = False,
    as_values: bool = False,
    rounded: torch.Tensor | None = None,
) -> None:
    """Add to each record the changes of its part of three flat tensors.

    Args:
        records: one per tensor.
        before, after: sampled values, one tensor's after the other's.
        wanted: the changes that were wanted; where they are not known, the gradients, whose zeros want none.
        parts: where the tensors lie; None for a single one.
        known: whether `wanted` is what was wanted.
        decreases: whether wanted decreases alone are counted.
        as_values: whether `wanted` holds the values that were wanted, and not the changes.
        rounded: float32, to which the wanted changes are written.
    """
    values = [_as_float64(one) for one in (before, after, wanted)]
    sums = (parts or Parts([0, len(before)])).count_changes(values, rounded, as_values, decreases)
    for record, (seen, cancelled, square, kept) in zip(records, sums, strict=True):
        record.seen += int(seen)
        record.cancelled += int(cancelled)
        if not known:
            record.known = False
        elif record.known:
            # Each step's share counts by its elements, not by the size of its learning rate.
            share = kept / square if square else 0.0
            record.wanted += int(seen) if square else 0
            record.kept += int(seen) * share


def _as_float64(values: torch.Tensor) -> torch.Tensor:
    """Plain memory of float64 on the CPU."""
    if values.dtype is torch.float64 and values.is_cpu and values.is_contiguous():
        return values
    return values.detach().to("cpu", torch.float64).contiguous()
