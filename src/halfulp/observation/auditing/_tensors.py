"""The tensors of two checkpoints side by side: how they differ, in counts and in ulps by size."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ... import formats
from ..._messages import quote
from ..._torch_versions import find_torch_dtype
from ...formats import Format
from .._record import to_plain_data
from .._text import holds_signed_floats
from ..checkpoints._checkpoint import RUNNING_STATISTICS_NAMES, Checkpoint

TensorStatus = Literal["nonfinite", "dtype-changed", "unchanged", "constant", "changed"]
TensorRole = Literal["parameter", "average", "buffer", "unknown"]
WORDS_BY_TENSOR_STATUS: dict[TensorStatus, str] = {
    "nonfinite": "has NaN or infinity",
    "dtype-changed": "another dtype",
    "unchanged": "did not move",
    "constant": "constant",
    "changed": "moved",
}


@dataclass(slots=True)
class TensorStatistics:
    """One checkpoint's statistics of a tensor.

    Attributes:
        dtype: of the stored tensor.
        nan, infinite, zeros: counts of elements.
        constant: the value of all elements where it is one, else None.
    """

    dtype: torch.dtype
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    constant: float | None = None

    @property
    def nonfinite_count(self) -> int:
        """NaN and infinities."""
        return self.nan + self.infinite

    def count_and_check_finite(self, values: Tensor) -> bool:
        """Count a part, and return whether it is finite; `constant` is the first element until another differs."""
        least, largest = map(float, values.aminmax())  # NaN where one is NaN
        if not least == largest == self.constant:
            self.constant = None
        self.zeros += len(values) - int(values.count_nonzero())
        if -math.inf < least <= largest < math.inf:
            return True
        self.nan += int(values.isnan().sum())
        self.infinite += int(values.isinf().sum())
        return False


@dataclass(frozen=True, slots=True)
class TensorAudit:
    """One tensor of both checkpoints. Changes are in ulps: spacings of the coarser dtype at the element of A.

    Attributes:
        name: qualified.
        shape, numel: of the tensor; a complex element counts as two, its real and its imaginary part.
        role: "parameter" where an optimizer holds it, "average" for running statistics, "buffer" for
            integers, "unknown" else.
        a, b: what each checkpoint holds.
        unchanged: elements with the same value (NaN equals NaN, and -0 equals +0).
        median, largest: of |change in ulps| over the elements that are finite in both, those that stayed counting
            as 0. The median is exact for whole ulps below 64 and within 1/32 of itself else. NaN without any.
        status: the first that holds of: it has NaN or infinity that A did not have, the dtype changed, nothing moved,
            B is constant and A is not, it moved.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    role: TensorRole
    a: TensorStatistics
    b: TensorStatistics
    unchanged: int
    median: float
    largest: float
    status: TensorStatus

    @property
    def share_unchanged(self) -> float:
        """Share of elements with the same value; 1 of an empty tensor."""
        return self.unchanged / self.numel if self.numel else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data that JSON can hold."""
        both = ("nan", "infinite", "zeros", "constant")
        return {
            "name": self.name,
            "dtypes": to_plain_data([self.a.dtype, self.b.dtype]),
            "shape": list(self.shape),
            "role": self.role,
            "status": self.status,
            "share_unchanged": self.share_unchanged,
            **{f"{key}_change_ulps": to_plain_data(getattr(self, key)) for key in ("largest", "median")},
            **{key: to_plain_data([getattr(self.a, key), getattr(self.b, key)]) for key in both},
        }


# Changes in ulps by binade, from 2^BUCKETS_MIN_EXPONENT on, and by the first BUCKET_BITS bits of their fraction.
BUCKET_BITS, BUCKETS_MIN_EXPONENT, BUCKET_BINADES = 5, -1023, 2112
# Elements that are compared one after another, so that temporary numbers stay in the processor's caches.
COMPARED_CHUNK_SIZE = 1 << 16


@dataclass(slots=True)
class TensorDifferences:
    """The differences of two floating-point tensors, summed over the parts that were compared."""

    a: TensorStatistics
    b: TensorStatistics
    equal_count: int = 0  # NaN being equal to NaN and -0 to +0
    finite_count: int = 0  # in both
    largest_ulps: float = 0.0
    # Finite elements by binade and first bits of the fraction of their change in ulps; unchanged ones first.
    count_by_bucket: Tensor = field(
        default_factory=lambda: torch.zeros(BUCKET_BINADES << BUCKET_BITS, dtype=torch.int64, device="cpu")
    )

    def compute_median(self) -> float:
        """Return the lower median of |change in ulps| over finite elements, unchanged ones as 0; NaN without any."""
        if not self.finite_count:
            return math.nan
        slot = int(torch.searchsorted(self.count_by_bucket.cumsum(0), (self.finite_count - 1) // 2, right=True))
        binade = min((slot >> BUCKET_BITS) + BUCKETS_MIN_EXPONENT, 1023)
        return math.ldexp(1 + (slot % (1 << BUCKET_BITS)) / (1 << BUCKET_BITS), binade) if slot else 0.0


def split_tensors_into_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the elements of tensors of one size in parts, side by side."""
    yield from zip(*(one.reshape(-1).split(COMPARED_CHUNK_SIZE) for one in tensors), strict=True)


def add_difference_counts(found: TensorDifferences, a: Tensor, b: Tensor) -> None:
    """Count how two tensors of one shape differ, in float32 unless one of the two is float64."""
    both = formats.get(a.dtype), formats.get(b.dtype)
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    for parts in split_tensors_into_chunks(a, b):
        if not parts[0].numel():
            return
        x, y = (part.to("cpu", dtype) for part in parts)
        if not found.a.count_and_check_finite(x) & found.b.count_and_check_finite(y):
            finite = x.isfinite() & y.isfinite()
            found.equal_count += int((x.isnan() & y.isnan() | (x == y) & ~finite).sum())
            x, y = x[finite], y[finite]
        if len(x):
            found.finite_count += len(x)
            _add_finite_difference_counts(found, x, y, both)


def _add_finite_difference_counts(
    found: TensorDifferences, x: Tensor, y: Tensor, formats_ab: tuple[Format, Format]
) -> None:
    """Count |y - x| by the spacings of the coarser of two formats at x, all float32 or float64.

    Comparisons of elements cost several times what arithmetic on them and on their words does.
    """
    words, bits, bias = (torch.int64, 52, 1023) if x.dtype == torch.float64 else (torch.int32, 23, 127)
    precision = min(format.mantissa_bits for format in formats_ab)
    # The binade of which a number has this spacing in the less precise format, where the exponent stands in a word.
    binades = x.view(words) & (2 * bias + 1 << bits)
    spaced = [
        binades.clamp_min(format.emin + bias << bits).sub_(format.mantissa_bits - precision << bits)
        for format in dict.fromkeys(formats_ab)
    ]
    binade = functools.reduce(torch.maximum, spaced)
    # |y - x| in units of 2^(precision - 1) ulps: the inverse of every binade of x is a normal number then.
    change = (y - x).abs_().mul_(binade.neg_().add_(2 * bias + 1 << bits).view(x.dtype))
    largest = float(change.amax())
    if largest == math.inf and x.dtype == torch.float32:
        return _add_finite_difference_counts(found, x.double(), y.double(), formats_ab)
    found.equal_count += len(x) - int(change.count_nonzero())
    found.largest_ulps = max(found.largest_ulps, largest * 2.0 ** (precision - 1))
    sizes = (change.view(words) >> (bits - BUCKET_BITS)).bincount(minlength=2 * bias + 2 << BUCKET_BITS)
    found.count_by_bucket[0] += sizes[0]
    first = -bias + precision - 1 - BUCKETS_MIN_EXPONENT << BUCKET_BITS
    found.count_by_bucket[first + 1 : first + len(sizes)] += sizes[1:]


def compare_tensors(a: Checkpoint, b: Checkpoint, parameters: set[str]) -> dict[str, TensorAudit]:
    """Return how each tensor of A differs from that of its name in B."""
    _refuse_unrelated_checkpoints(a, b)
    return {
        name: _compare_tensor(name, (stored, b.tensors[name]), parameters)
        for name, stored in a.tensors.items()
        if name in b.tensors
    }


def _refuse_unrelated_checkpoints(a: Checkpoint, b: Checkpoint) -> None:
    ours, theirs = a.tensors, b.tensors
    missing = [name for name in ours if name not in theirs]
    foreign = [name for name in theirs if name not in ours]
    shapes = [name for name in ours if name in theirs and ours[name].shape != theirs[name].shape]
    said = [f"only {which} has {quote(names)}" for which, names in (("A", missing), ("B", foreign)) if names]
    if shapes:
        first = f"{shapes[0]}: {tuple(ours[shapes[0]].shape)} in A, {tuple(theirs[shapes[0]].shape)} in B"
        said.append(f"{quote(shapes)} have other shapes ({first})")
    if said:
        raise ValueError(
            f"the checkpoints are of different models: {' and '.join(said)}; give two checkpoints of one run "
            f"(A = {a.path}, B = {b.path})"
        )


def _compare_tensor(name: str, pair: tuple[Tensor, Tensor], parameters: set[str]) -> TensorAudit:
    is_complex = all(one.is_complex() for one in pair)
    a, b = (torch.view_as_real(one.resolve_conj()) if is_complex else one for one in pair)
    numbers = all(holds_signed_floats(one.dtype) for one in (a, b))
    firsts = [float(one[(0,) * one.dim()]) if numbers and one.numel() else None for one in (a, b)]
    before, after = (TensorStatistics(one.dtype, constant=first) for one, first in zip(pair, firsts))
    found = TensorDifferences(before, after)
    if numbers:
        add_difference_counts(found, a, b)
    unchanged = found.equal_count if numbers else count_equal_elements(a, b)
    is_average = name.rpartition(".")[2] in RUNNING_STATISTICS_NAMES
    role: TensorRole = "buffer" if not numbers else "average" if is_average else "unknown"
    role = "parameter" if name in parameters else role
    status: TensorStatus = "changed"
    if after.nonfinite_count > before.nonfinite_count:
        status = "nonfinite"
    elif after.dtype != before.dtype:
        status = "dtype-changed"
    elif unchanged == a.numel():
        status = "unchanged"
    elif after.constant is not None and before.constant is None:
        status = "constant"
    shape, largest = tuple(pair[0].shape), found.largest_ulps if found.finite_count else math.nan
    median = found.compute_median()
    return TensorAudit(name, shape, a.numel(), role, before, after, unchanged, median, largest, status)


def count_equal_elements(a: Tensor, b: Tensor) -> int:
    """Return how many elements of two tensors of one shape are equal; one-byte floats of one code are, NaN too.

    A packed pair of numbers is one element, equal to none of another dtype.
    """
    packed = find_torch_dtype("float4_e2m1fn_x2")
    if a.shape != b.shape or (a.dtype != b.dtype and packed in (a.dtype, b.dtype)):
        return 0
    convert = _convert_to_comparable if a.dtype == b.dtype else _convert_to_float64
    return sum(int((convert(x) == convert(y)).sum()) for x, y in split_tensors_into_chunks(a, b))


def _convert_to_comparable(x: Tensor) -> Tensor:
    """Return what torch compares of a dtype: codes of one-byte floats, values else."""
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    return x.long() if x.dtype in (torch.uint16, torch.uint32) else x


def _convert_to_float64(x: Tensor) -> Tensor:
    """Return values that torch compares with those of any other dtype, complex ones as they are."""
    return x if x.is_complex() else x.double()
