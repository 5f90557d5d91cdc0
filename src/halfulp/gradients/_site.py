"""Site: one gradient exponent, and the measurements where it holds; Sites: all of a model's."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import Format, fp16

GLOBAL = "global"
# Differences of two exponents must be powers of two that float32 holds.
LOWEST, HIGHEST = -60, 60
HISTORY = 64
# Why a site is merged where its policy has no other exponent than the global one.
UNIFORM = "one scale for all"


@dataclasses.dataclass
class Reading:
    """The last measurement of one kind of gradient tensor of a site.

    Attributes:
        amax: Largest magnitude of the true gradient, the stored one times 2^-exponent; infinite or NaN if stored so.
        zero, subnormal: Share of elements that a narrow format stores as zero, and as subnormals; 0 of a wide one.
        elements: How many elements were looked at.
        format: What stores them; None where that is as wide as float32.
    """

    amax: float
    zero: float
    subnormal: float
    elements: int
    format: Format | None

    @property
    def finite(self) -> bool:
        """Whether every element was finite."""
        return math.isfinite(self.amax)

    def combine(self, other: Reading) -> Reading:
        """Return the measurement of both tensors together."""
        total = self.elements + other.elements
        mine, theirs = self.elements / total, other.elements / total
        return Reading(
            # max() would drop a NaN that comes second.
            amax=max(self.amax, other.amax) if self.finite and other.finite else math.inf,
            zero=mine * self.zero + theirs * other.zero,
            subnormal=mine * self.subnormal + theirs * other.subnormal,
            elements=total,
            format=self.format or other.format,
        )


@dataclasses.dataclass
class Memory:
    """Remembers the lowest exponent at which a site lately overflowed, and for how long.

    Attributes:
        exponent: That one; None where nothing is remembered.
        until: The iteration at which it is forgotten.
        suspected: The exponent at which it may have overflowed, in an iteration that was not measured, until one is.
    """

    exponent: int | None = None
    until: int = 0
    suspected: int | None = None

    def note(self, exponent: int, until: int) -> None:
        """Remember an overflow at an exponent."""
        self.exponent = exponent if self.exponent is None else min(self.exponent, exponent)
        self.until = until

    def move(self, difference: int) -> None:
        """Convert the exponents to another reference binade."""
        for name, exponent in (("exponent", self.exponent), ("suspected", self.suspected)):
            if exponent is not None:
                setattr(self, name, max(LOWEST, min(HIGHEST, exponent + difference)))

    def at(self, iteration: int) -> int | None:
        """Return the exponent, or None once it is older than it is to be remembered."""
        if iteration >= self.until:
            self.exponent = None
        return self.exponent


class Proposal(NamedTuple):
    """Bounds of an exponent: the least one without underflow and the largest one without overflow, which wins."""

    least: int
    most: int


class Site:
    """A group of gradients with one exponent: they are stored as 2^exponent times the true ones.

    Attributes:
        key: Qualified name of the module, operator where it is no layer, and call index: stable from step to step.
        merged: Whether it follows the global exponent for good, and why; None where it does not.
        readings: The last measurement by kind: "received" (the gradient that arrives), "passed" (what its product
            passes on), "weight" (of its parameters).
        proposals: The least and the most exponent that a policy made of each product's operands, in this iteration.
        stored: The narrow format that its product computes in, whatever its operands were cast from; None if wide.
        history: Largest magnitudes by kind, of the latest measurements, in units of 2^reference.
        format: The narrowest format that its gradients are stored in, as last measured; None where none is narrow.
        measured: Whether they ever were.
        overflows: How often it was the one that overflowed.
        memory: Remembers its overflows.
        loss_binade: Of the global site, floor(log2) of the largest gradient that losses send into the model for which
            sites' exponents are meant, which move with it from pass to pass (`Following`); None where it is not known.
        global_site: The global site of the scaler; None where it is that.
    """

    def __init__(self, key: str, global_site: Site | None, exponent: int) -> None:
        self.key = key
        self.merged: str | None = None
        self.readings: dict[str, Reading] = {}
        self.proposals: list[Proposal] = []
        self.history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self.format: Format | None = None
        self.measured: bool = False
        self.overflows: int = 0
        self.memory = Memory()
        self.stored: Format | None = None
        self.loss_binade: int | None = None
        self.global_site = global_site
        self._exponent = exponent

    @property
    def exponent(self) -> int:
        """The exponent: the gradient is stored as 2^exponent times the true one."""
        return self.global_site._exponent if self.merged and self.global_site else self._exponent

    @exponent.setter
    def exponent(self, value: int) -> None:
        self._exponent = max(LOWEST, min(HIGHEST, int(value)))

    @property
    def follows_global(self) -> bool:
        """Whether its exponent is the global one."""
        return self.global_site is None or self.merged is not None

    @property
    def reference(self) -> int:
        """The power of two in whose units gradients are remembered; 0 where losses are not followed."""
        if self.global_site is None or self.merged is not None:
            return 0
        return self.global_site.loss_binade or 0

    def remember(self, readings: dict[str, Reading]) -> None:
        """Store a measurement; only gradients in narrow formats enter the history, as others limit nothing."""
        self.readings = readings
        self.measured = True
        self.format = next((reading.format for reading in readings.values() if reading.format), None)
        narrow = {kind: reading.amax for kind, reading in readings.items() if reading.format and reading.finite}
        entry = {kind: math.ldexp(amax, -self.reference) for kind, amax in narrow.items()}
        if entry:
            self.history.append(entry)

    @property
    def is_wide(self) -> bool:
        """Whether it was measured and all its gradients have float32's range."""
        return self.measured and self.format is None

    def change_reference(self, before: int | None, binade: int | None) -> None:
        """Convert a site's exponent and history to another reference binade (`Sites.set_reference`)."""
        if before is None or binade is None:
            factor = (before or 0) - (binade or 0)
            for entry in self.history:
                entry.update((kind, math.ldexp(amax, factor)) for kind, amax in entry.items())
            return
        self.exponent = self._exponent + before - binade
        self.memory.move(before - binade)
        for reading in self.readings.values():
            reading.amax = math.ldexp(reading.amax, binade - before)

    def __repr__(self) -> str:
        return f"Site({self.key!r}, exponent={self.exponent})"


class Sites:
    """The sites of a scaler's models, where gradients share one exponent: by key, in order of first use, global first.

    Args:
        exponent: Where all start.
        uniform: Whether all follow the global one.
    """

    def __init__(self, exponent: int, uniform: bool = False) -> None:
        self.global_site: Site = Site(GLOBAL, None, exponent)
        self._sites = {GLOBAL: self.global_site}
        self.start = exponent
        # The least exponent of a site that was measured, or overflowed; None where none was.
        self.lowest: int | None = None
        self._uniform = uniform

    def open(self, key: str) -> Site:
        """Return the site of a key, created at its first use with the previous call's exponent or the lowest in use."""
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(key, self.global_site, self._first_exponent(key))
            site.merged = UNIFORM if self._uniform else None
        return site

    def _first_exponent(self, key: str) -> int:
        place, _, call = key.rpartition("#")
        if call.isdecimal():
            before = self._sites.get(f"{place}#{int(call) - 1}" if call != "1" else place)
            if before is not None:
                return before._exponent
        return self.start if self.lowest is None else self.lowest

    def set_reference(self, binade: int | None) -> None:
        """Set the binade of the loss gradients for which exponents are meant.

        What is known of sites is put in these units; None leaves exponents as they are, whatever losses send.
        """
        before, self.global_site.loss_binade = self.global_site.loss_binade, binade
        if before == binade:
            return
        for site in self:
            if not site.follows_global:
                site.change_reference(before, binade)

    def note_lowest(self) -> None:
        """Note the lowest exponent in use, at which new sites start."""
        fallen = [site for site in self if site.memory.exponent is not None and not site.follows_global]
        measured = [site for site in self if site.format is not None]
        self.lowest = min((site.exponent for site in measured + fallen), default=None)

    def suspects(self) -> dict[Site, int]:
        """Return the sites that may have overflowed, each with the exponent that it had."""
        return {site: e for site in self if (e := site.memory.suspected) is not None}

    def merge(self, keys: Iterable[str], reason: str) -> None:
        """Let sites follow the global exponent from now on; before the first forward pass any key is taken."""
        keys = list(keys)
        unknown = [key for key in keys if key == GLOBAL or (key not in self._sites and len(self) > 1)]
        if unknown:
            raise ValueError(f"no sites {', '.join(unknown)} to merge; the sites are {', '.join(self._sites)}")
        for key in keys:
            self.open(key).merged = reason

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites.values())

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, key: str) -> bool:
        return key in self._sites

    def __getitem__(self, key: str) -> Site:
        return self._sites[key]


def parse_exponent(field: str, scale: float) -> int:
    """Return the exponent of a scale that is a power of two.

    Raises:
        ValueError: it is none, or out of bounds.

    >>> parse_exponent("init_scale", 1024.0)
    10
    """
    fraction, exponent = math.frexp(scale) if math.isfinite(scale) else (0.0, 0)
    if fraction != 0.5 or not LOWEST <= exponent - 1 <= HIGHEST:
        near = max(LOWEST, min(HIGHEST, exponent - 1)) if fraction > 0 else 16
        raise ValueError(
            f"{field} is a power of two from 2^{LOWEST} to 2^{HIGHEST}, got {scale!r}: take 2.0**{near}, say"
        )
    return exponent - 1


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
    """The statistics of one gradient tensor, measured at a site."""

    site: Site
    kind: str
    reading: Reading


def group_by_site(measured: list[Measurement]) -> dict[Site, dict[str, Reading]]:
    """Return the readings of each site by kind; several tensors of a kind count as one."""
    found: dict[Site, dict[str, Reading]] = {}
    for one in measured:
        kinds = found.setdefault(one.site, {})
        kinds[one.kind] = kinds[one.kind].combine(one.reading) if one.kind in kinds else one.reading
    return found


def recover_sizes(
    edges: Iterable[tuple[Site, Site]], readings: dict[Site, dict[str, Reading]], lift: int = 0
) -> set[Site]:
    """Return the sites where all received gradients underflowed to zero; their size before the move is filled in.

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
    """Return [amax, count of zeros, count of subnormals] on the device; counts are 0 for a wide gradient."""
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
    """Return the elements that this process holds, dense."""
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def to_host(rows: list[Tensor]) -> list[Any]:
    """Copy small tensors of one shape to Python lists or numbers, in order, by one copy per device."""
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
