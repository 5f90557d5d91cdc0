"""The tensors of two checkpoints side by side: how they differ, in counts and in ulps by size."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import formats
from ..._messages import listed
from ...kernels import (
    CHUNK_ELEMENTS,
    IndexMap,
    address,
    address_of,
    cut_into_chunks,
    run_chunks,
    run_on_tensors,
    select,
    select_engine,
    to_plain_memory,
)
from ...kernels import _operations as o
from ...kernels._device_function import Recording, Table
from ...kernels._tensor_writer import to_signed_integer
from ...kernels._trace import COUNTER_COPIES
from ...kernels.vector._machine_function import Kernel
from ...kernels.vector._table_loop import compile_table
from .._text import holds_signed_floats
from ..checkpoints._files import Checkpoint, StoredTensor, split_tensors
from ..checkpoints._names import RUNNING_STATISTICS
from ._audit import TensorAudit, TensorRole, TensorStatistics, TensorStatus

# What is counted; from A_NAN on first of A, then of B.
SAME, FINITE, A_NAN, A_INFINITE, A_ZEROS, A_TOP, A_VARIES, B_NAN, B_INFINITE, B_ZEROS, B_TOP, B_VARIES = range(12)
NUMBER_OF_COUNTS = 12
# Changes in ulps by binade, from 2^LOWEST on, and by the first FINE bits of their fraction.
FINE, LOWEST, BINADES = 5, -192, 512
HISTOGRAM_SLOTS = BINADES << FINE
# By the dtype of memory: the first code that is no finite number, and that of infinity.
NONFINITE_CODES = {
    torch.float8_e4m3fn: (0x7F, None),
    torch.float8_e5m2: (0x7C, 0x7C),
    torch.float16: (0x7C00, 0x7C00),
    torch.bfloat16: (0x7F80, 0x7F80),
    torch.float32: (0x7F800000, 0x7F800000),
    torch.float64: (0x7FF << 52, 0x7FF << 52),
}
_LOAD_OPERATIONS: dict[int, Any] = {1: o.load8, 2: o.load16, 4: o.load32, 8: o.load64}


@dataclass(frozen=True)
class _CodeParts:
    """A code, its part without the sign, and whether it is no finite number, or infinite."""

    code: Any
    size: Any
    is_special: Any
    infinite: Any

    @classmethod
    def read(cls, element: Recording, which: int, dtype: torch.dtype) -> _CodeParts:
        """Return the code of an element of one of the tensors."""
        code = _LOAD_OPERATIONS[dtype.itemsize](element.arrays[which], element.index)
        size = o.bit_and(code, (1 << (8 * dtype.itemsize - 1)) - 1)
        first, infinity = NONFINITE_CODES[dtype]
        return cls(code, size, size >= first, size != size if infinity is None else size == infinity)


@functools.cache
def record_changes_table(a: torch.dtype, b: torch.dtype) -> Table:
    """Return the kernel that measures changes in spacings of the coarser of two formats, at the element of A.

    Columns: A, B, and int64 (SLOTS,), what changed by the size of its change. Constants: the codes of the first
    elements, and of the largest numbers; then of each format the biased exponent of its smallest normal number and the
    bits of its mantissa. Sums: the counts, then the sum of changes in ulps and the largest.
    """
    element = Recording(3, 8, "w64")
    count = functools.partial(element.trace.gather_sum, "count")
    x, y = (_CodeParts.read(element, which, dtype) for which, dtype in enumerate((a, b)))
    finite = ~(x.is_special | y.is_special)
    u, v = (_decode_code(element, dtype, one, finite) for one, dtype in ((x, a), (y, b)))
    both_nan = x.is_special & ~x.infinite & y.is_special & ~y.infinite
    plus = [one.code == one.size for one in (x, y)]
    same_signs = (plus[0] & plus[1]) | ~(plus[0] | plus[1])
    count((finite & (u == v)) | both_nan | (x.infinite & y.infinite & same_signs))
    count(finite)
    for which, (one, dtype) in enumerate(((x, a), (y, b))):
        words = element.constants[which:4:2]
        first, top = words if dtype.itemsize == 8 else map(o.low_word, words)
        for mask in (one.is_special & ~one.infinite, one.infinite, one.size == 0, one.size == top, one.code != first):
            count(mask)
    field, fraction = _measure_change_in_ulps(element, u, v, wide=8 in (a.itemsize, b.itemsize))
    changed, zero = finite & (u != v), np.uint64(0)
    # Fields are biased: that of a size in ulps by 1023 and 4096.
    slot = _clamp_word(o.sub(field, 4096 + 1023 + LOWEST), BINADES - 1)
    fine = o.low_word(o.shr(fraction, 52 - FINE))
    place = o.bit_or(o.shl(slot, FINE), fine)
    o.deposit64(
        element.arrays[2], select(changed, place, np.uint32(0)), select(changed, np.uint64(1), zero), HISTOGRAM_SLOTS
    )
    exponent = o.add(_clamp_word(o.sub(field, 4096 + 1), 2045), 1)
    ulps: Any = o.real(select(changed, o.bit_or(fraction, o.shl(o.widen(exponent), 52)), zero))
    element.trace.gather_sum("sum", ulps)
    element.trace.gather_sum("max", ulps)
    return Table(element.trace, 3, constants=8)


def _clamp_word(word: Any, most: int) -> Any:
    """Return a signed word within [0, most]."""
    above = select(word > most, np.uint32(most), word)
    return select(word >= 1 << 31, np.uint32(0), above)


def _decode_code(element: Recording, dtype: torch.dtype, one: _CodeParts, finite: Any) -> Any:
    """Return a code's number as a float64; 0 where one of the two is not finite."""
    if dtype == torch.float64:
        return o.real(select(finite, one.code, np.uint64(0)))
    word, width = one.code, 8 * dtype.itemsize
    if dtype == torch.bfloat16:
        word = o.shl(word, 16)
    elif width < 32:
        form = formats.get(dtype)
        mantissa, least = form.mantissa_bits, 1 << form.mantissa_bits
        # Codes below the smallest normal number's are multiples of the smallest subnormal.
        small = o.word(o.to_real(one.size) * np.float32(form.smallest_subnormal))
        normal = o.add(o.shl(one.size, 23 - mantissa), 127 - form.bias << 23)
        sign = o.shl(o.bit_and(one.code, 1 << (width - 1)), 32 - width)
        word = o.bit_or(select(one.size < least, small, normal), sign)
    real = o.real(select(finite, word, np.uint32(0)))
    return element.trace.emit("to_float64", (real,), None, "f64")


def _measure_change_in_ulps(element: Recording, u: Any, v: Any, wide: bool) -> tuple[Any, Any]:
    """Return the exponent field, biased by 1023 + 4096, and the fraction, of |v - u| in ulps."""
    zero, halved = np.float64(0.0), np.uint32(0)
    if wide:
        beyond = abs(v - u) > np.float64(1.7976931348623157e308)
        halved = select(beyond, np.uint32(1), halved)
        half = select(beyond, np.float64(0.5), np.float64(1.0))
        u, v = u * half, v * half
    change = v - u
    # What rounding the difference took away (Knuth's two-sum): the binade is that of the exact change.
    back = change - v
    rest = (v - (change - back)) - (u + back)
    away = (rest != zero) & (((rest < zero) & (change > zero)) | ((rest > zero) & (change < zero)))
    bits = o.sub(o.word(abs(change)), select(away, np.uint64(1), np.uint64(0)))
    raised = np.uint32(0)
    if wide:
        small = bits < 1 << 52
        raised = select(small, np.uint32(54), raised)
        bits = select(small, o.word(o.real(bits) * np.float64(2.0**54)), bits)
    binade = o.add(o.shr(o.high_word(o.word(abs(u))), 20), halved)
    spacings = []
    for lowest, mantissa in zip(*[map(o.low_word, element.constants[4:])] * 2):
        spacings.append(o.sub(select(binade > lowest, binade, lowest), mantissa))
    # Fields below 0 are compared as if 64 higher.
    higher = [o.add(spacing, 64) for spacing in spacings]
    spacing = select(higher[0] > higher[1], *spacings)
    field = o.add(o.sub(o.add(o.shr(o.high_word(bits), 20), halved), raised), 4096)
    return o.add(o.sub(field, spacing), 1023), o.bit_and(bits, (1 << 52) - 1)


# Elements of the parts that are converted, or read, one after another.
ELEMENTS_AT_ONCE = 1 << 21


@dataclass(slots=True)
class TensorDifferences:
    """The differences of two floating-point tensors, summed over the parts that were compared.

    Attributes:
        counts: by the names SAME to B_VARIES.
        table: changed elements by binade and first bits of the fraction of their change in ulps.
        total, largest: sum and largest of the changes in ulps.
        first: the first element of A and B.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(NUMBER_OF_COUNTS, np.int64))
    table: np.ndarray = field(default_factory=lambda: np.zeros(HISTOGRAM_SLOTS, np.int64))
    total: float = 0.0
    largest: float = 0.0
    first: tuple[float, float] | None = None

    def median(self) -> float:
        """Return the lower median of |change in ulps| over finite elements, unchanged ones as 0; NaN without any."""
        finite = int(self.counts[FINITE])
        if not finite:
            return math.nan
        still = finite - int(self.table.sum())
        rank = (finite - 1) // 2
        if rank < still:
            return 0.0
        slot = int(np.searchsorted(np.cumsum(self.table), rank - still, side="right"))
        return math.ldexp(1 + (slot % (1 << FINE)) / (1 << FINE), (slot >> FINE) + LOWEST)


def add_differences(found: TensorDifferences, a: Tensor, b: Tensor) -> None:
    """Compare a part of A with the same part of B, both of one shape and floating-point.

    A change is measured in the spacing, at the element of A, of that dtype of the two which is coarser there.
    """
    if not a.numel():
        return
    forms = formats.get(a.dtype), formats.get(b.dtype)
    a, b = (to_plain_memory(x.detach()).reshape(-1) for x in (a, b))
    if found.first is None:
        found.first = float(a[0].double()), float(b[0].double())
    kinds = [x.dtype if x.dtype in NONFINITE_CODES else torch.float32 for x in (a, b)]
    numbers = (*found.first, *(form.max for form in forms))
    constants = [_find_code_of_number(kind, value) for kind, value in zip(kinds * 2, numbers)]
    constants += [word for form in forms for word in (form.emin + 1023, form.mantissa_bits)]
    measure = _measure_by_kernel if select_engine("cpu") == "llvm" else _measure_by_reference
    for parts in zip(a.split(ELEMENTS_AT_ONCE), b.split(ELEMENTS_AT_ONCE), strict=True):
        natives = [part.to("cpu", kind).contiguous() for part, kind in zip(parts, kinds)]
        sums, table = measure(record_changes_table(*kinds), natives, constants)
        found.counts += sums[:, :NUMBER_OF_COUNTS].sum(0).astype(np.int64)
        found.table += table
        found.total += float(sums[:, -2].sum())
        found.largest = max(found.largest, float(sums[:, -1].max()))


@functools.cache
def _find_code_of_number(dtype: torch.dtype, value: float) -> int:
    """Return a number's code, as a word."""
    code = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)
    return int(code.view(getattr(torch, f"int{8 * dtype.itemsize}"))) & ((1 << 8 * dtype.itemsize) - 1)


@functools.cache
def _compile_table_once(table: Table) -> Kernel:
    return compile_table("audit", table)


def _measure_by_kernel(table: Table, parts: list[Tensor], constants: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of each chunk, and the changes by size; each thread counts those in a table of its own."""
    cut = cut_into_chunks(IndexMap.whole((parts[0].numel(),)), 0)
    groups = torch.get_num_threads()
    counters = np.zeros((groups, COUNTER_COPIES, HISTOGRAM_SLOTS), np.int64)
    edges = np.linspace(0, len(cut), groups + 1).astype(np.int64)
    lengths = np.diff(edges)
    cut[:, 0] = np.repeat(np.arange(groups), lengths)
    pointers = np.array([[*map(address, parts), address_of(own)] for own in counters], np.int64)
    words, sums = np.array([constants], np.uint64), np.empty((len(cut), table.sums))
    kernel = _compile_table_once(table)
    given = cut, pointers, np.zeros(groups, np.int64), words, np.zeros(0, np.int64), sums
    run_chunks(
        lambda first, last, *places: kernel(int(edges[first]), int(edges[last]), *places),
        lengths * CHUNK_ELEMENTS,
        *map(address_of, given),
    )
    return sums, counters.sum((0, 1))


def _measure_by_reference(table: Table, parts: list[Tensor], constants: list[int]) -> tuple[np.ndarray, np.ndarray]:
    slots = torch.zeros(1, HISTOGRAM_SLOTS, dtype=torch.int64, device="cpu")
    inputs = {("constant", k): to_signed_integer(word, 64) for k, word in enumerate(constants)}
    return np.array([run_on_tensors(table.trace, [*parts, slots], inputs)[1]]), slots[0].numpy()


def compare_tensors(a: Checkpoint, b: Checkpoint, parameters: set[str], share: float) -> dict[str, TensorAudit]:
    """Return how each tensor of A differs from that of its name in B."""
    _check_names(a, b)
    return {
        name: _compare_tensor(name, (stored, b.tensors[name]), parameters, share)
        for name, stored in a.tensors.items()
        if name in b.tensors
    }


def _check_names(a: Checkpoint, b: Checkpoint) -> None:
    ours, theirs = a.tensors, b.tensors
    missing = _leave_out_tied_names(a, [name for name in ours if name not in theirs])
    foreign = _leave_out_tied_names(b, [name for name in theirs if name not in ours])
    # Averages are kept from some step on, by some runs.
    for which, names in (("A", missing), ("B", foreign)):
        averages = [name for name in names if name.startswith("ema.")]
        if averages:
            b.unseen.append(f"{listed(averages)} are averages that only {which} holds, and were not compared")
            names[:] = [name for name in names if not name.startswith("ema.")]
    shapes = [name for name in ours if name in theirs and ours[name].shape != theirs[name].shape]
    said = [f"only {which} has {listed(names)}" for which, names in (("A", missing), ("B", foreign)) if names]
    if shapes:
        first = f"{shapes[0]}: {ours[shapes[0]].shape} in A, {theirs[shapes[0]].shape} in B"
        said.append(f"{listed(shapes)} have other shapes ({first})")
    if said:
        raise ValueError(
            f"the checkpoints are of different models: {' and '.join(said)}; give two checkpoints of one run "
            f"(A = {a.path}, B = {b.path})"
        )


def find_tied_names(checkpoint: Checkpoint, held: set[str]) -> dict[str, str]:
    """Return the further names of tensors that an optimizer holds under one name, with that name."""
    places: dict[object, str] = {
        place: name for name in held & checkpoint.tensors.keys() if (place := checkpoint.find_memory_place(name))
    }
    found = {name: places.get(checkpoint.find_memory_place(name)) for name in checkpoint.tensors if name not in held}
    return {name: other for name, other in found.items() if other is not None}


def _leave_out_tied_names(checkpoint: Checkpoint, names: list[str]) -> list[str]:
    """Return the names whose memory has no other name: files may leave out the further names of tied tensors."""
    places = {name: checkpoint.find_memory_place(name) for name in checkpoint.tensors} if names else {}
    times = Counter(places.values())
    return [name for name in names if places[name] is None or times[places[name]] == 1]


def _compare_tensor(
    name: str, pair: tuple[StoredTensor, StoredTensor], parameters: set[str], share: float
) -> TensorAudit:
    if all(one.dtype.is_complex for one in pair):
        a, b = (_view_as_real_parts(one) for one in pair)
    else:
        a, b = pair
    numbers = all(holds_signed_floats(one.dtype) for one in (a, b))
    found = TensorDifferences()
    if numbers:
        add_differences(found, a.read(), b.read())
    unchanged = int(found.counts[SAME]) if numbers else count_same_elements(a, b)
    before = _make_statistics(pair[0].dtype, a, found, A_NAN, 0, numbers)
    after = _make_statistics(pair[1].dtype, b, found, B_NAN, 1, numbers)
    finite = int(found.counts[FINITE])
    mean = found.total / finite if finite else math.nan
    is_average = name.startswith("ema.") or name.rpartition(".")[2] in RUNNING_STATISTICS
    role: TensorRole = "buffer" if not numbers else "average" if is_average else "unknown"
    role = "parameter" if name in parameters else role
    return TensorAudit(
        name,
        pair[0].shape,
        a.numel,
        role,
        before,
        after,
        unchanged,
        mean,
        found.median(),
        found.largest if finite else math.nan,
        _choose_status(before, after, unchanged == a.numel, mean < share),
    )


def _choose_status(a: TensorStatistics, b: TensorStatistics, still: bool, little: bool) -> TensorStatus:
    if b.nonfinite > a.nonfinite:
        return "nonfinite"
    if a.dtype != b.dtype:
        return "dtype-changed"
    if still:
        return "unchanged"
    if little:
        return "barely-moved"
    return "constant" if b.constant is not None and a.constant is None else "changed"


def _view_as_real_parts(stored: StoredTensor) -> StoredTensor:
    """Return a complex tensor as its real and imaginary parts, in one more dimension."""
    return StoredTensor(
        stored.dtype.to_real(),
        (*stored.shape, 2),
        lambda: torch.view_as_real(stored.read().resolve_conj()),
        stored.mapped,
    )


def _make_statistics(
    dtype: torch.dtype, stored: StoredTensor, found: TensorDifferences, place: int, which: int, numbers: bool
) -> TensorStatistics:
    if not numbers or not stored.numel:
        return TensorStatistics(dtype)
    nan, infinite, zeros, top, varies = (int(count) for count in found.counts[place : place + 5])
    constant = None
    if stored.numel > 1 and found.first is not None and not nan:
        constant = 0.0 if zeros == stored.numel else None if varies else found.first[which]
    return TensorStatistics(dtype, nan, infinite, zeros, top, constant)


def count_same_elements(a: StoredTensor, b: StoredTensor) -> int:
    """Return how many elements of two stored tensors of one shape are equal, NaN being equal to none."""
    if a.shape != b.shape:
        return 0
    return sum(
        int((_make_comparable(x) == _make_comparable(y)).sum()) for x, y in split_tensors((a, b), ELEMENTS_AT_ONCE)
    )


def _make_comparable(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    return x.float() if x.dtype in (torch.uint16, torch.uint32) else x
