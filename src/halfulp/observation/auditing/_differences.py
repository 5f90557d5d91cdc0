"""How two tensors differ: counts, and changes in ulps by size, gathered part by part."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ... import formats
from ...formats import Format
from ...kernels import address, address_of, plain, run_chunks, select_engine
from . import _device_functions as d

_NATIVE = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# Where whole changes of 1 to SMALL - 1 ulps stand in the table.
_SMALL_SLOTS = [
    ((power - d.LOWEST) << d.FINE) + ((steps << d.FINE) >> power) - (1 << d.FINE)
    for steps in range(1, d.SMALL)
    for power in (steps.bit_length() - 1,)
]
# Elements of the parts that are converted, or read, one after another.
AT_ONCE = 1 << 21


@dataclass(slots=True)
class Differences:
    """What is known of the parts of two tensors of floating-point numbers that were compared.

    Attributes:
        counts: by the names of `_device_functions`.
        table: changed elements by binade and first bits of the fraction of their change in ulps.
        total, largest: sum and largest of the changes in ulps.
        first: the first element of A and B.
    """

    counts: np.ndarray
    table: np.ndarray
    total: float = 0.0
    largest: float = 0.0
    first: tuple[float, float] | None = None

    def histogram(self) -> dict[int, int]:
        """Return the changed elements by floor(log2 |change in ulps|)."""
        binades = self.table.reshape(d.BINADES, -1).sum(1)
        return {int(k) + d.LOWEST: int(binades[k]) for k in np.flatnonzero(binades)}

    def median(self) -> float:
        """Return the lower median of |change in ulps| over finite elements, unchanged ones as 0; NaN without any."""
        finite = int(self.counts[d.FINITE])
        if not finite:
            return math.nan
        still = finite - int(self.table.sum())
        rank = (finite - 1) // 2
        if rank < still:
            return 0.0
        slot = int(np.searchsorted(np.cumsum(self.table), rank - still, side="right"))
        return math.ldexp(1 + (slot % (1 << d.FINE)) / (1 << d.FINE), (slot >> d.FINE) + d.LOWEST)

    def mean(self) -> float:
        """Return the mean of |change in ulps| over finite elements; NaN without any."""
        finite = int(self.counts[d.FINITE])
        return self.total / finite if finite else math.nan


def empty_differences() -> Differences:
    """Return what is known before the first part."""
    return Differences(np.zeros(d.COUNTS, np.int64), np.zeros(d.BINADES << d.FINE, np.int64))


def add_differences(found: Differences, a: Tensor, b: Tensor) -> None:
    """Compare a part of A with the same part of B, both of one shape and floating-point.

    A change is measured in the spacing, at the element of A, of that dtype of the two which is coarser there.
    """
    if not a.numel():
        return
    spacings = formats.get(a.dtype), formats.get(b.dtype)
    tops = _top(a.dtype), _top(b.dtype)
    a, b = _native(a), _native(b)
    first = float(a[0].double()), float(b[0].double())
    if found.first is None:
        found.first = first
    # NaN is no number that a tensor can be constant at.
    for which, before, now in ((d.A_VARIES, found.first[0], first[0]), (d.B_VARIES, found.first[1], first[1])):
        found.counts[which] |= int(before != now)
    run = _run_compiled if select_engine("cpu") == "llvm" else _run_reference
    for low in range(0, len(a), 1 << 30):
        run(found, a[low : low + (1 << 30)], b[low : low + (1 << 30)], spacings, tops)


def _native(x: Tensor) -> Tensor:
    """Return the elements in a row, in a dtype whose codes the kernel reads."""
    x = plain(x.detach()).reshape(-1).contiguous()
    return x if x.dtype in _NATIVE else x.float()


def _top(dtype: torch.dtype) -> float:
    return formats.get(dtype).max


def _run_compiled(
    found: Differences, a: Tensor, b: Tensor, spacings: tuple[Format, Format], tops: tuple[float, float]
) -> None:
    threads = max(1, torch.get_num_threads())
    share = max(d.BLOCK, -(-len(a) // threads))
    shares = -(-len(a) // share)
    setup = np.zeros(d.SETUP, np.int64)
    counting = all(one.torch_dtype == a.dtype for one in spacings)
    setup[: d.A] = len(a), share, (1 + counting) * (a.dtype == b.dtype)
    for place, dtype, top in ((d.A, a.dtype, tops[0]), (d.B, b.dtype, tops[1])):
        setup[place : place + 6] = _layout(dtype, top)
    setup[d.ULP :] = [word for one in spacings for word in (one.mantissa_bits, one.emin)]
    counts = np.zeros((shares, d.COUNTS), np.int64)
    table = np.zeros((shares, d.BINADES << d.FINE), np.int64)
    small = np.zeros((shares, d.SMALL), np.int64)
    sums = np.zeros((shares, 2), np.float64)
    kernel = d.comparison_kernel(a.element_size(), b.element_size())
    places = *map(address, (a, b)), *map(address_of, (setup, counts, table, small, sums))
    run_chunks(kernel, np.full(shares, share, np.int64), *places)
    for which in (d.A_VARIES, d.B_VARIES):
        # Each share compares with the first of all.
        counts[0, which] = counts[:, which].max()
        counts[1:, which] = 0
    merged = table.sum(0)
    merged[_SMALL_SLOTS] += small.sum(0)[1:]
    _add(found, counts.sum(0), merged, float(sums[:, 0].sum()), float(sums[:, 1].max()))


def _add(found: Differences, counts: np.ndarray, table: np.ndarray, total: float, largest: float) -> None:
    varies = [max(found.counts[which], counts[which]) for which in (d.A_VARIES, d.B_VARIES)]
    found.counts += counts
    found.counts[[d.A_VARIES, d.B_VARIES]] = varies
    found.table += table
    found.total += total
    found.largest = max(found.largest, largest)


@functools.cache
def _layout(dtype: torch.dtype, top: float) -> tuple[int, ...]:
    form, bits = formats.get(dtype), 8 * dtype.itemsize
    integers = getattr(torch, f"int{bits}")
    largest, top_code = (
        torch.tensor(x, dtype=torch.float64, device="cpu").to(dtype).view(integers).item() for x in (form.max, top)
    )
    infinity = largest + 1 if form.infinities else -1
    return form.mantissa_bits, form.bias, (1 << (bits - 1)) - 1, int(largest) + 1, int(infinity), int(top_code)


def _run_reference(
    found: Differences, a: Tensor, b: Tensor, spacings: tuple[Format, Format], tops: tuple[float, float]
) -> None:
    for x, y in zip(a.split(AT_ONCE), b.split(AT_ONCE), strict=True):
        _add(found, *_reference(x.double(), y.double(), spacings, tops, found.first or (0.0, 0.0)))


def _reference(
    a: Tensor, b: Tensor, spacings: tuple[Format, Format], tops: tuple[float, float], first: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray, float, float]:
    counts = np.zeros(d.COUNTS, np.int64)
    for place, x, top, start in ((d.A_NAN, a, tops[0], first[0]), (d.B_NAN, b, tops[1], first[1])):
        bits = torch.tensor(start, dtype=torch.float64, device="cpu").view(torch.int64)
        masks = x.isnan(), x.isinf(), x == 0, x.abs() == top
        counts[place : place + 4] = [int(mask.sum()) for mask in masks]
        counts[place + 4] = int((x.view(torch.int64) != bits).any())
    counts[d.SAME] = int(((a == b) | (a.isnan() & b.isnan())).sum())
    finite = a.isfinite() & b.isfinite()
    counts[d.FINITE] = int(finite.sum())
    changed = finite & (a != b)
    a, b = a[changed], b[changed]
    change = b - a
    halved = change.isinf()
    a, b = torch.where(halved, a / 2, a), torch.where(halved, b / 2, b)
    change = b - a
    back = change - b
    rest = (b - (change - back)) + (-a - back)
    size = change.abs()
    beyond = (rest != 0) & ((rest < 0) != (change < 0))
    size = torch.where(beyond, torch.nextafter(size, torch.zeros_like(size)), size)
    fraction, power = torch.frexp(size)
    binade = torch.where(a == 0, -5000, torch.frexp(a)[1] - 1 + halved.int())
    spacing = torch.stack([binade.clamp(min=one.emin) - one.mantissa_bits for one in spacings]).amax(0)
    power = power - 1 + halved.int() - spacing
    slot = (power - d.LOWEST).clamp(0, d.BINADES - 1).long()
    fine = ((2 * fraction - 1) * (1 << d.FINE)).long()
    table = torch.bincount((slot << d.FINE) + fine, minlength=d.BINADES << d.FINE)
    ulps = 2 * fraction * torch.exp2(power.clamp(-1022, 1023).double())
    return counts, table.numpy(), float(ulps.sum()), float(ulps.max()) if len(ulps) else 0.0
