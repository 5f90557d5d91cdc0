"""The tensors of two checkpoints side by side: how they differ, in counts and in ulps by size."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ... import formats
from ..._messages import listed
from ...formats import Format
from .._text import holds_signed_floats
from ..checkpoints._names import RUNNING_STATISTICS, Checkpoint
from ._audit import TensorAudit, TensorRole, TensorStatistics, TensorStatus

# Changes in ulps by binade, from 2^LOWEST on, and by the first FINE bits of their fraction.
FINE, LOWEST, BINADES = 5, -192, 512
# Elements that are compared one after another, so that temporary float64 stays in the processor's caches.
ELEMENTS_AT_ONCE = 1 << 15


@dataclass(slots=True)
class ValueCounts:
    """Counts of one tensor's elements, summed over its parts; `first` is its first element."""

    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    varies: bool = False
    first: float | None = None

    def add_values(self, values: Tensor) -> None:
        """Count a part, as float64."""
        self.first = float(values[0]) if self.first is None else self.first
        nan = int(values.isnan().sum())
        self.nan += nan
        self.infinite += int(values.isinf().sum())
        self.zeros += values.numel() - int(values.count_nonzero())
        self.varies = self.varies or nan > 0 or bool((values != self.first).any())


@dataclass(slots=True)
class TensorDifferences:
    """The differences of two floating-point tensors, summed over the parts that were compared.

    Attributes:
        a, b: counts of each.
        same: elements of the same value, NaN being equal to NaN and -0 to +0.
        finite: elements that are finite in both.
        largest: of the changes in ulps.
        table: finite elements by binade and first bits of the fraction of their change in ulps; unchanged ones first.
    """

    a: ValueCounts = field(default_factory=ValueCounts)
    b: ValueCounts = field(default_factory=ValueCounts)
    same: int = 0
    finite: int = 0
    largest: float = 0.0
    table: Tensor = field(default_factory=lambda: torch.zeros(BINADES << FINE, dtype=torch.int64, device="cpu"))

    def compute_median(self) -> float:
        """Return the lower median of |change in ulps| over finite elements, unchanged ones as 0; NaN without any."""
        if not self.finite:
            return math.nan
        slot = int(torch.searchsorted(self.table.cumsum(0), (self.finite - 1) // 2, right=True))
        return math.ldexp(1 + (slot % (1 << FINE)) / (1 << FINE), (slot >> FINE) + LOWEST) if slot else 0.0


def split_tensors(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the elements of tensors of one size in parts, side by side."""
    yield from zip(*(one.reshape(-1).split(ELEMENTS_AT_ONCE) for one in tensors), strict=True)


def add_differences(found: TensorDifferences, a: Tensor, b: Tensor) -> None:
    """Compare a part of A with the same part of B, both of one shape and floating-point.

    A change is measured in the spacing, at the element of A, of that dtype of the two which is coarser there.
    """
    forms = formats.get(a.dtype), formats.get(b.dtype)
    for parts in split_tensors(a, b):
        if not parts[0].numel():
            return
        x, y = (part.to("cpu", torch.float64) for part in parts)
        found.a.add_values(x)
        found.b.add_values(y)
        finite = x.isfinite() & y.isfinite()
        if not finite.all():
            found.same += int((x.isnan() & y.isnan() | (x == y) & ~finite).sum())
            x, y = x[finite], y[finite]
        if not len(x):
            continue
        ulps = _measure_changes_in_ulps(x, y, forms)
        found.finite += len(x)
        found.same += len(x) - int(ulps.count_nonzero())
        found.largest = max(found.largest, float(ulps.max()))
        slots = (ulps.view(torch.int64) >> (52 - FINE)) - (1023 + LOWEST << FINE)
        found.table += slots.clamp_(0, len(found.table) - 1).bincount(minlength=len(found.table))


def _measure_changes_in_ulps(x: Tensor, y: Tensor, forms: tuple[Format, Format]) -> Tensor:
    """Return |y - x| in the spacings of the coarser of two formats at x, all float64."""
    binade = (x.view(torch.int64) >> 52 & 0x7FF) - 1023
    spacings = [binade.clamp_min(form.emin) - form.mantissa_bits for form in dict.fromkeys(forms)]
    spacing = functools.reduce(torch.maximum, spacings)
    # Two factors, as the inverse of float64's smallest number is none.
    half = spacing >> 1
    first, second = ((1023 - power << 52).view(torch.float64) for power in (half, spacing - half))
    return (y * first - x * first).abs_() * second


def compare_tensors(a: Checkpoint, b: Checkpoint, parameters: set[str]) -> dict[str, TensorAudit]:
    """Return how each tensor of A differs from that of its name in B."""
    _check_names(a, b)
    return {
        name: _compare_tensor(name, (stored, b.tensors[name]), parameters)
        for name, stored in a.tensors.items()
        if name in b.tensors
    }


def _check_names(a: Checkpoint, b: Checkpoint) -> None:
    ours, theirs = a.tensors, b.tensors
    missing = [name for name in ours if name not in theirs]
    foreign = [name for name in theirs if name not in ours]
    shapes = [name for name in ours if name in theirs and ours[name].shape != theirs[name].shape]
    said = [f"only {which} has {listed(names)}" for which, names in (("A", missing), ("B", foreign)) if names]
    if shapes:
        first = f"{shapes[0]}: {tuple(ours[shapes[0]].shape)} in A, {tuple(theirs[shapes[0]].shape)} in B"
        said.append(f"{listed(shapes)} have other shapes ({first})")
    if said:
        raise ValueError(
            f"the checkpoints are of different models: {' and '.join(said)}; give two checkpoints of one run "
            f"(A = {a.path}, B = {b.path})"
        )


def _compare_tensor(name: str, pair: tuple[Tensor, Tensor], parameters: set[str]) -> TensorAudit:
    is_complex = all(one.is_complex() for one in pair)
    a, b = (torch.view_as_real(one.resolve_conj()) if is_complex else one for one in pair)
    numbers = all(holds_signed_floats(one.dtype) for one in (a, b))
    found = TensorDifferences()
    if numbers:
        add_differences(found, a, b)
    unchanged = found.same if numbers else count_same_elements(a, b)
    before, after = (_make_statistics(one.dtype, counts) for one, counts in zip(pair, (found.a, found.b)))
    is_average = name.rpartition(".")[2] in RUNNING_STATISTICS
    role: TensorRole = "buffer" if not numbers else "average" if is_average else "unknown"
    role = "parameter" if name in parameters else role
    return TensorAudit(
        name,
        tuple(pair[0].shape),
        a.numel(),
        role,
        before,
        after,
        unchanged,
        found.compute_median(),
        found.largest if found.finite else math.nan,
        _choose_status(before, after, unchanged == a.numel()),
    )


def _choose_status(a: TensorStatistics, b: TensorStatistics, still: bool) -> TensorStatus:
    if b.nonfinite > a.nonfinite:
        return "nonfinite"
    if a.dtype != b.dtype:
        return "dtype-changed"
    if still:
        return "unchanged"
    return "constant" if b.constant is not None and a.constant is None else "changed"


def _make_statistics(dtype: torch.dtype, counts: ValueCounts) -> TensorStatistics:
    constant = None if counts.varies else counts.first
    return TensorStatistics(dtype, counts.nan, counts.infinite, counts.zeros, constant)


def count_same_elements(a: Tensor, b: Tensor) -> int:
    """Return how many elements of two tensors of one shape are equal, NaN being equal to none."""
    if a.shape != b.shape:
        return 0
    return sum(int((_make_comparable(x) == _make_comparable(y)).sum()) for x, y in split_tensors(a, b))


def _make_comparable(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    return x.float() if x.dtype in (torch.uint16, torch.uint32) else x
