"""Sites: gradient exponents, what is measured at them, and the powers of two by which gradients move between them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import Format, fp16
from ..kernels import hide_own_frames_from_compiler

GLOBAL_SITE_KEY = "global"
# Differences of two exponents must be powers of two that float32 holds.
MIN_EXPONENT, MAX_EXPONENT = -60, 60
AMAX_HISTORY_LENGTH = 64
# Why a site is merged where its policy has no other exponent than the global one.
UNIFORM_SCALE_REASON = "one scale for all"


@dataclasses.dataclass
class GradientReading:
    """The last measurement of one kind of gradient tensor of a site."""

    # Of the true gradient, the stored one times 2^-exponent; infinite or NaN if stored so.
    amax: float
    # Shares of elements that a narrow format stores as zero, and as subnormals; 0 of a wide one.
    zero_share: float
    subnormal_share: float
    element_count: int
    # What stores them; None where that is as wide as float32.
    format: Format | None

    @property
    def is_finite(self) -> bool:
        """Whether every element was finite."""
        return math.isfinite(self.amax)

    def merge_reading(self, other: GradientReading) -> GradientReading:
        """Return the measurement of both tensors together."""
        total = self.element_count + other.element_count
        mine, theirs = self.element_count / total, other.element_count / total
        return GradientReading(
            # max() would drop a NaN that comes second.
            amax=max(self.amax, other.amax) if self.is_finite and other.is_finite else math.inf,
            zero_share=mine * self.zero_share + theirs * other.zero_share,
            subnormal_share=mine * self.subnormal_share + theirs * other.subnormal_share,
            element_count=total,
            format=self.format or other.format,
        )


@dataclasses.dataclass
class OverflowMemory:
    """Remembers the lowest exponent at which a site lately overflowed, and the iteration at which it is forgotten."""

    exponent: int | None = None
    until_iteration: int = 0

    def note_overflow(self, exponent: int, until_iteration: int) -> None:
        """Remember an overflow at an exponent."""
        self.exponent = exponent if self.exponent is None else min(self.exponent, exponent)
        self.until_iteration = until_iteration

    def recall_overflow_exponent(self, iteration: int) -> int | None:
        """Return the remembered exponent, or None once the overflow is too old."""
        if iteration >= self.until_iteration:
            self.exponent = None
        return self.exponent


class Site:
    """A group of gradients with one exponent: they are stored as 2^exponent times the true ones."""

    def __init__(self, key: str, global_site: Site | None, exponent: int) -> None:
        # Qualified name of the module, operator where it is no layer, and call index: stable from step to step.
        self.key = key
        # Why it follows the global exponent for good; None where it does not.
        self.merge_reason: str | None = None
        # By kind: "received" (the gradient that arrives), "passed" (what its product passes on), "weight".
        self.readings: dict[str, GradientReading] = {}
        # What a policy made of each product's operands in this iteration: the least exponent without underflow and the
        # largest one without overflow, which wins.
        self.proposed_bounds: list[tuple[int, int]] = []
        # Largest magnitudes by kind, of the latest measurements, in units of 2^history_unit_exponent.
        self.amax_history: deque[dict[str, float]] = deque(maxlen=AMAX_HISTORY_LENGTH)
        # The narrowest format that its gradients are stored in, as last measured; None where none is narrow.
        self.format: Format | None = None
        self.is_measured: bool = False
        self.overflow_count: int = 0
        self.memory: OverflowMemory = OverflowMemory()
        # The narrow format that its product computes in, whatever its operands were cast from; None if wide.
        self.product_format: Format | None = None
        # Of the global site, floor(log2) of the largest gradient that losses send into the model for which sites'
        # exponents are meant, which move with it from pass to pass (`LossGradientFollower`); None if it is not known.
        self.reference_binade: int | None = None
        # None of the global site itself.
        self.global_site = global_site
        self._exponent = exponent

    @property
    def exponent(self) -> int:
        """The exponent: the gradient is stored as 2^exponent times the true one."""
        return self.global_site._exponent if self.merge_reason and self.global_site else self._exponent

    @exponent.setter
    def exponent(self, value: int) -> None:
        self._exponent = max(MIN_EXPONENT, min(MAX_EXPONENT, int(value)))

    @property
    def follows_global(self) -> bool:
        """Whether its exponent is the global one."""
        return self.global_site is None or self.merge_reason is not None

    @property
    def history_unit_exponent(self) -> int:
        """The power of two in whose units gradients are remembered; 0 where losses are not followed."""
        return 0 if self.global_site is None or self.follows_global else self.global_site.reference_binade or 0

    def store_readings(self, readings: dict[str, GradientReading]) -> None:
        """Store a measurement; only gradients in narrow formats enter the history, as others limit nothing."""
        self.readings = readings
        self.is_measured = True
        self.format = next((reading.format for reading in readings.values() if reading.format), None)
        narrow = {kind: reading.amax for kind, reading in readings.items() if reading.format and reading.is_finite}
        entry = {kind: math.ldexp(amax, -self.history_unit_exponent) for kind, amax in narrow.items()}
        if entry:
            self.amax_history.append(entry)

    def __repr__(self) -> str:
        return f"Site({self.key!r}, exponent={self.exponent})"


class Sites(dict[str, Site]):
    """The sites of a scaler's models by key, in order of first use, the global one first; if uniform, all follow it."""

    def __init__(self, exponent: int, uniform: bool = False) -> None:
        self.global_site: Site = Site(GLOBAL_SITE_KEY, None, exponent)
        super().__init__({GLOBAL_SITE_KEY: self.global_site})
        self.start_exponent = exponent
        # The least exponent of a site that was measured, or overflowed; None where none was.
        self.lowest_exponent: int | None = None
        self._is_uniform = uniform

    def get_or_create_site(self, key: str) -> Site:
        """Return the site of a key, created at its first use with the previous call's exponent or the lowest in use."""
        site = self.get(key)
        if site is None:
            place, _, call = key.rpartition("#")
            before = f"{place}#{int(call) - 1}" if call.isdecimal() and call != "1" else place
            first = self.start_exponent if self.lowest_exponent is None else self.lowest_exponent
            if call.isdecimal() and before in self:
                first = self[before]._exponent
            site = self[key] = Site(key, self.global_site, first)
            site.merge_reason = UNIFORM_SCALE_REASON if self._is_uniform else None
        return site

    def set_reference_binade(self, binade: int | None) -> None:
        """Set the binade of the loss gradients for which exponents are meant; None leaves exponents as they are."""
        before, self.global_site.reference_binade = self.global_site.reference_binade, binade
        if before == binade:
            return
        for site in (site for site in self.values() if not site.follows_global):
            if before is None or binade is None:
                factor = (before or 0) - (binade or 0)
                for entry in site.amax_history:
                    entry.update((kind, math.ldexp(amax, factor)) for kind, amax in entry.items())
                continue
            site.exponent += before - binade
            if site.memory.exponent is not None:
                site.memory.exponent = max(MIN_EXPONENT, min(MAX_EXPONENT, site.memory.exponent + before - binade))
            for reading in site.readings.values():
                reading.amax = math.ldexp(reading.amax, binade - before)

    def update_lowest_exponent(self) -> None:
        """Note the lowest exponent in use, at which new sites start."""
        fallen = [site for site in self.values() if site.memory.exponent is not None and not site.follows_global]
        measured = [site for site in self.values() if site.format is not None]
        self.lowest_exponent = min((site.exponent for site in measured + fallen), default=None)

    def merge_into_global_site(self, keys: Iterable[str], reason: str) -> None:
        """Let sites follow the global exponent from now on; before the first forward pass any key is taken."""
        keys = list(keys)
        unknown = [key for key in keys if key == GLOBAL_SITE_KEY or (key not in self and len(self) > 1)]
        if unknown:
            raise ValueError(f"no sites {', '.join(unknown)} to merge; the sites are {', '.join(self)}")
        for key in keys:
            self.get_or_create_site(key).merge_reason = reason


def get_exponent_of_power_of_two_scale(field: str, scale: float) -> int:
    """Return the exponent of a scale that is a power of two."""
    fraction, exponent = math.frexp(scale) if math.isfinite(scale) else (0.0, 0)
    if fraction != 0.5 or not MIN_EXPONENT <= exponent - 1 <= MAX_EXPONENT:
        near = max(MIN_EXPONENT, min(MAX_EXPONENT, exponent - 1)) if fraction > 0 else 16
        raise ValueError(
            f"{field} is a power of two from 2^{MIN_EXPONENT} to 2^{MAX_EXPONENT}, got {scale!r}: take 2.0**{near}, say"
        )
    return exponent - 1


def find_narrow_format(dtype: torch.dtype) -> Format | None:
    """Return the format of a dtype with a narrower range than float32's; None for other dtypes."""
    return fp16 if dtype == torch.float16 else None


class Measurement(NamedTuple):
    """The statistics of one gradient tensor, measured at a site."""

    site: Site
    kind: str
    reading: GradientReading


class PendingMeasurements:
    """Statistics of the gradients of one iteration, on their devices until `read_flags_and_measurements`."""

    def __init__(self) -> None:
        # Each with its site, kind, narrow format, count of elements, and statistics.
        self.unread_statistics: list[tuple[Site, str, Format | None, int, Tensor]] = []

    def measure_gradient_on_device(self, site: Site, kind: str, gradient: Tensor, format: Format | None) -> None:
        """Measure a gradient that is stored at the site's exponent."""
        if gradient.numel():
            stored = format or find_narrow_format(gradient.dtype)
            statistics = _measure_amax_and_underflow(gradient, stored)
            self.unread_statistics.append((site, kind, stored, gradient.numel(), statistics))

    def read_flags_and_measurements(self, flags: list[Tensor]) -> tuple[list[float], list[Measurement]]:
        """Return the values of ``flags`` and all measurements, in order, by one copy per device."""
        rows, self.unread_statistics = self.unread_statistics, []
        lines = [torch.stack([flag.float()] * 3) for flag in flags]
        values = copy_to_host([*lines, *(row[-1] for row in rows)])
        found = []
        for (site, kind, stored, count, _), (amax, zero, subnormal) in zip(rows, values[len(flags) :]):
            reading = GradientReading(math.ldexp(amax, -site.exponent), zero / count, subnormal / count, count, stored)
            found.append(Measurement(site, kind, reading))
        return [numbers[0] for numbers in values[: len(flags)]], found


def group_readings_by_site(measured: list[Measurement]) -> dict[Site, dict[str, GradientReading]]:
    """Return the readings of each site by kind; several tensors of a kind count as one."""
    found: dict[Site, dict[str, GradientReading]] = {}
    for site, kind, reading in measured:
        kinds = found.setdefault(site, {})
        kinds[kind] = kinds[kind].merge_reading(reading) if kind in kinds else reading
    return found


def restore_amax_lost_in_moves(
    edges: Iterable[tuple[Site, Site]], readings: dict[Site, dict[str, GradientReading]], lift_exponent: int
) -> set[Site]:
    """Return the sites where all received gradients underflowed to zero; their size before the move is filled in.

    ``lift_exponent``: how far sites were above their exponents, from the global one (`LossGradientFollower`).
    """
    found = set()
    for receiver, sender in edges:
        arrived = readings.get(receiver, {}).get("received")
        passed = readings.get(sender, {}).get("passed")
        if arrived is not None and arrived.amax == 0 and passed is not None and passed.is_finite and passed.amax:
            power = lift_exponent * (sender.follows_global - receiver.follows_global)
            readings[receiver]["received"] = dataclasses.replace(arrived, amax=math.ldexp(passed.amax, power))
            found.add(receiver)
    return found


@torch.no_grad()
def _measure_amax_and_underflow(gradient: Tensor, stored: Format | None) -> Tensor:
    """Return [amax, count of zeros, count of subnormals] on the device; counts are 0 for a wide gradient."""
    gradient = get_local_values(gradient)
    if stored is None:
        low, high = torch.aminmax(gradient)
        amax = torch.maximum(-low, high).float()
        return torch.stack([amax, torch.zeros_like(amax), torch.zeros_like(amax)])
    size = gradient.abs()
    zero = size.numel() - torch.count_nonzero(size)
    below = size.lt(stored.smallest_normal).sum()
    return torch.stack([size.amax().float(), zero.float(), (below - zero).float()])


def get_local_values(gradient: Tensor) -> Tensor:
    """Return the elements that this process holds, dense."""
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = (gradient.coalesce() if gradient.is_sparse else gradient).values()
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def copy_to_host(rows: list[Tensor]) -> list[Any]:
    """Copy small tensors of one shape to Python lists or numbers, in order, by one copy per device."""
    values: list[Any] = [None] * len(rows)
    for device in dict.fromkeys(row.device for row in rows):
        places = [i for i, row in enumerate(rows) if row.device == device]
        for place, numbers in zip(places, torch.stack([rows[i] for i in places]).tolist()):
            values[place] = numbers
    return values


# Kernels choose by how far the first element, and each row, is from a multiple of this many bytes.
_KERNEL_ALIGNMENT_BYTES = 64


def multiply_by_power_of_two(gradient: Tensor, exponent: int) -> Tensor:
    """Return the gradient times 2^exponent, with the strides that it had."""
    if not exponent:
        return gradient
    # Two tensors without dimensions would give the wider type.
    plain = type(gradient) is Tensor and gradient.layout is torch.strided and gradient.dim()
    return restore_strides(gradient * (make_power_of_two(exponent) if plain else 2.0**exponent), gradient)


@functools.cache
def make_power_of_two(exponent: int) -> Tensor:
    """Return 2^exponent as a 0-d tensor, by which torch multiplies twice as fast as by a Python number."""
    return torch.tensor(2.0**exponent, dtype=torch.float64, device="cpu")


def restore_strides(values: Tensor, like: Tensor) -> Tensor:
    """Return the result of an elementwise operation with the strides and the misalignment of its input.

    torch makes the result of a part of a larger tensor, or of an expanded one, contiguous; a sum over it, or a product,
    is then made in another order, which may change the last bit. Tensor subclasses and sparse tensors are given back.
    """
    if like.layout is not torch.strided or type(like) is not Tensor:
        return values
    size, stride = like.shape, like.stride()
    aligned = not like.storage_offset() * like.element_size() % _KERNEL_ALIGNMENT_BYTES
    if (aligned and (like.is_contiguous() or values.stride() == stride)) or not like.numel():
        return values
    offset = like.storage_offset() % (_KERNEL_ALIGNMENT_BYTES // like.element_size() or 1)
    # What is expanded is kept once.
    kept = [1 if s == 0 else n for n, s in zip(size, stride)]
    spanned = 1 + sum((n - 1) * s for n, s in zip(kept, stride))
    memory = torch.empty(offset + spanned, dtype=values.dtype, device=values.device)
    memory.as_strided(kept, stride, offset).copy_(values.as_strided(kept, values.stride(), values.storage_offset()))
    return memory.as_strided(size, stride, offset)


class CopyWithStrides(torch.autograd.Function):
    """Copies a tensor with its strides, where ``clone`` would make it contiguous."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        """Return a copy of the values with their strides."""
        return restore_strides(tensor.clone(), tensor)

    @staticmethod
    @hide_own_frames_from_compiler
    def backward(ctx, gradient: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return gradient


def copy_keeping_strides(tensor: Tensor) -> Tensor:
    """Return a copy with the tensor's strides that autograd records, with a node of its own."""
    out = tensor.clone()
    if out.stride() == tensor.stride() or tensor.layout is not torch.strided or type(tensor) is not Tensor:
        return out
    return CopyWithStrides.apply(tensor)


# 2^127 and 2^-126 are float32's last normal powers of two.
_FLOAT32_BIAS, _MAX_SYMMETRIC_FLOAT32_EXPONENT = 127, 126


class LossGradientFollower:
    """Lifts all sites' exponents by one power of two per backward pass, so that they follow the loss's gradient.

    Exponents are right for a loss that sends gradients of a certain size into the model, the reference. Gradients are
    linear in what enters: where a loss sends smaller or larger ones, all sites but those at the global exponent have

        stored gradient = 2^(exponent + lift) g,   lift = reference - floor(log2 max |g(output)|)

    with the first output that the pass reaches, as far as float32 has powers of two. Nothing is copied to the host from
    an accelerator: there the lift is a tensor.
    """

    def __init__(self, sites: Sites, is_enabled: bool) -> None:
        self._sites = sites
        self._global_site = sites.global_site
        # Whether exponents follow losses at all, and whether they do so now; else the lift is 0.
        self.is_enabled = self.is_active = is_enabled
        # floor(log2 max |g(output)|) of this iteration's passes; NaN where that is 0 or not finite.
        self.loss_gradient_binades: list[float | Tensor] = []
        # The finite ones of this iteration, once they are on the host.
        self.host_binades: list[int] = []
        # The iteration from which exponents follow losses.
        self.resume_iteration = 0
        # Whether a pass of this iteration reached more than one output, of which the first may mislead.
        self.has_several_outputs = False
        # That of the pass that runs, a tensor on an accelerator; 0 until an output was reached.
        self.lift_exponent: int | Tensor = 0
        self._is_lift_found = False
        self._reached_output_count = 0
        self._factors: dict[tuple, Tensor] = {}

    def reset_lift_for_backward_pass(self, measuring: bool) -> None:
        """Begin a backward pass with its lift unknown; ``measuring``: read binades at its end."""
        self.lift_exponent = 0
        self._is_lift_found = not measuring and self._global_site.reference_binade is None
        if not self._is_lift_found:
            below = (site.exponent - self._global_site.exponent for site in self._sites.values())
            self._largest_lift = _MAX_SYMMETRIC_FLOAT32_EXPONENT - max(map(abs, below))
        self._reached_output_count = 0
        self._factors.clear()

    def begin_iteration(self, iteration: int) -> None:
        """Begin an iteration: decide whether exponents follow the loss in it."""
        self.is_active = self.is_enabled and iteration >= self.resume_iteration
        self.has_several_outputs = False

    @property
    def lift_of_measured_iteration(self) -> int:
        """The lift of the measured iteration, from the binades that were read."""
        binade = self._global_site.reference_binade
        return binade - max(self.host_binades) if self.host_binades and binade is not None and self.is_active else 0

    def update_reference_binade(self, has_narrow_gradients: bool, min_exponent: int, max_exponent: int) -> None:
        """Make this iteration's largest loss gradient the reference, as far as exponents allow."""
        known = self._global_site.reference_binade
        if not (self.host_binades and self.is_enabled and (has_narrow_gradients or known is not None)):
            return
        largest = max(self.host_binades)
        if known is None:
            self._sites.set_reference_binade(largest)
        elif self.is_active or largest > known:
            own = [site.exponent for site in self._sites.values() if not site.follows_global]
            most, least = max(0, min(own) - min_exponent), min(0, max(own) - max_exponent)
            self._sites.set_reference_binade(known + max(least, min(most, largest - known)))

    def rescale_gradient_between_sites(self, gradient: Tensor, receiver: Site, sender: Site) -> Tensor:
        """Return a gradient stored at ``sender``'s exponent, multiplied to ``receiver``'s; strides are kept."""
        return self.multiply_by_power_with_lift(gradient, *self.find_move_exponent_and_lift_sign(receiver, sender))

    def find_move_exponent_and_lift_sign(self, receiver: Site, sender: Site) -> tuple[int, int]:
        """Return the power of two from ``sender`` to ``receiver``, and how often the lift counts: 1, 0 or -1."""
        sign = sender.follows_global - receiver.follows_global if self.is_enabled else 0
        return receiver.exponent - sender.exponent, sign

    def multiply_by_power_with_lift(self, gradient: Tensor, exponent: int, sign: int) -> Tensor:
        """Return a gradient times 2^(exponent + sign lift); strides are kept."""
        if sign > 0:
            self._reached_output_count += 1
            self.has_several_outputs = self.has_several_outputs or self._reached_output_count > 1
        if not sign or not self.is_active:
            return multiply_by_power_of_two(gradient, exponent)
        if not self._is_lift_found:
            # Before an output was reached there is nothing to follow: what is a parameter's alone, say.
            self.lift_exponent, self._is_lift_found = self._find_lift_exponent(gradient) if sign > 0 else 0, True
        if isinstance(self.lift_exponent, int):
            return multiply_by_power_of_two(gradient, exponent + sign * self.lift_exponent)
        key = exponent, sign, gradient.device
        if key not in self._factors:
            # 2^(exponent + sign lift) as a float32 tensor, made exactly from its bits.
            bits = (exponent + sign * self.lift_exponent + _FLOAT32_BIAS) << 23
            self._factors[key] = bits.view(torch.float32).to(gradient.device, non_blocking=True)
        factor = self._factors[key]
        # A number in memory takes the gradient's dtype first, which float16 may not hold.
        wide = gradient.float() if gradient.dtype == torch.float16 else gradient
        return restore_strides((wide * factor).to(gradient.dtype), gradient)

    def _find_lift_exponent(self, gradient: Tensor) -> int | Tensor:
        """Return the lift for a gradient that enters the model at the global exponent."""
        values = get_local_values(gradient)
        if not values.numel():
            return 0
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high).float()
        reference = self._global_site.reference_binade
        if is_on_host(largest):
            size = float(largest)
            if not 0 < size < math.inf:
                self.loss_gradient_binades.append(math.nan)
                return 0
            here = math.frexp(size)[1] - 1 - self._global_site.exponent
            self.loss_gradient_binades.append(here)
            return 0 if reference is None else max(-self._largest_lift, min(self._largest_lift, reference - here))
        known = torch.isfinite(largest) & (largest > 0)
        binade = torch.frexp(largest).exponent - 1 - self._global_site.exponent
        self.loss_gradient_binades.append(torch.where(known, binade.float(), math.nan))
        if reference is None:
            return 0
        return torch.where(known, reference - binade, 0).clamp(-self._largest_lift, self._largest_lift).int()


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a number can be read without a device synchronisation."""
    return tensor.device.type == "cpu"
