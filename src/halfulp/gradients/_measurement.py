"""Statistics of gradients in the format that stores them, kept on their device until all are read at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..formats import Format, fp16
from ._site import Reading, Site

_NARROW = {torch.float16: fp16}


def narrow(dtype: torch.dtype) -> Format | None:
    """Return the format of a dtype with a narrower range than float32's; None for other dtypes."""
    return _NARROW.get(dtype)


class Measurements:
    """Statistics of the gradients of one iteration; each stays on its device, and ``read`` copies all of them once."""

    def __init__(self) -> None:
        self._rows: list[tuple[Site, str, Format | None, int, Tensor]] = []

    def clear(self) -> None:
        """Discard measurements that were not read."""
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, site: Site, kind: str, gradient: Tensor, format: Format | None) -> None:
        """Measure a gradient that is stored at the site's exponent."""
        if gradient.numel():
            stored = format or narrow(gradient.dtype)
            self._rows.append((site, kind, stored, gradient.numel(), _statistics(gradient, stored)))

    def read(self, flags: list[Tensor]) -> tuple[list[float], list[Measurement]]:
        """Return the values of ``flags`` and all measurements, in order, by one copy per device."""
        rows, self._rows = self._rows, []
        lines = [torch.stack([flag.float()] * 3) for flag in flags]
        values = to_host([*lines, *(row[-1] for row in rows)])
        found = [
            Measurement(site, kind, _reading(numbers, site.exponent, count, stored))
            for (site, kind, stored, count, _), numbers in zip(rows, values[len(flags) :])
        ]
        return [numbers[0] for numbers in values[: len(flags)]], found


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One gradient tensor that was measured at a site."""

    site: Site
    kind: str
    reading: Reading


def by_site(measured: list[Measurement]) -> dict[Site, dict[str, Reading]]:
    """The readings of each site by kind; several tensors of a kind count as one."""
    found: dict[Site, dict[str, Reading]] = {}
    for one in measured:
        kinds = found.setdefault(one.site, {})
        kinds[one.kind] = kinds[one.kind].combined(one.reading) if one.kind in kinds else one.reading
    return found


def recovered(edges: Iterable[tuple[Site, Site]], readings: dict[Site, dict[str, Reading]], lift: int = 0) -> set[Site]:
    """The sites where all received gradients underflowed to zero; their size before the move is filled in.

    ``lift``: how far sites were above their exponents, from the global one.
    """
    found = set()
    for source, target in edges:
        arrived = readings.get(source, {}).get("received")
        passed = readings.get(target, {}).get("passed")
        if arrived is not None and arrived.amax == 0 and passed is not None and passed.finite and passed.amax:
            power = lift * (target.follows_global - source.follows_global)
            readings[source]["received"] = dataclasses.replace(arrived, amax=math.ldexp(passed.amax, power))
            found.add(source)
    return found


@torch.no_grad()
def _statistics(gradient: Tensor, stored: Format | None) -> Tensor:
    """[amax, zeros, subnormals] in float32, on the gradient's device; of a wide gradient amax alone."""
    gradient = local_values(gradient)
    if stored is None:
        low, high = torch.aminmax(gradient)
        amax = torch.maximum(-low, high).float()
        return torch.stack([amax, torch.zeros_like(amax), torch.zeros_like(amax)])
    size = gradient.abs()
    zero = size.numel() - torch.count_nonzero(size)
    below = size.lt(stored.smallest_normal).sum()
    return torch.stack([size.amax().float(), zero.float(), (below - zero).float()])


def local_values(gradient: Tensor) -> Tensor:
    """The elements that this process holds, dense."""
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def to_host(rows: list[Tensor]) -> list[Any]:
    """Small tensors of one shape as Python lists or numbers, in order, by one copy per device."""
    values: list[Any] = [None] * len(rows)
    for device in dict.fromkeys(row.device for row in rows):
        places = [i for i, row in enumerate(rows) if row.device == device]
        for place, numbers in zip(places, torch.stack([rows[i] for i in places]).tolist()):
            values[place] = numbers
    return values


def _reading(values: list[float], exponent: int, count: int, stored: Format | None) -> Reading:
    amax, zero, subnormal = values
    return Reading(
        amax=math.ldexp(amax, -exponent),
        zero=zero / count,
        subnormal=subnormal / count,
        elements=count,
        format=stored,
    )
