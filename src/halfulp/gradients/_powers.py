"""Gradients times powers of two, with their strides; Following: all exponents move with the loss's gradient."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..kernels import untraced
from ._site import Site, Sites, local_values

# Kernels choose by how far the first element, and each row, is from a multiple of this many bytes.
_ALIGNMENT = 64
# A part of a tensor that lies in more than so many times its own memory is moved together.
_SPREAD = 4


def multiply_by_power(gradient: Tensor, exponent: int) -> Tensor:
    """Return the gradient times 2^exponent, with the strides that it had.

    >>> multiply_by_power(torch.ones(1), -2)
    tensor([0.2500])
    """
    if not exponent:
        return gradient
    # Two tensors without dimensions would give the wider type.
    plain = type(gradient) is Tensor and gradient.layout is torch.strided and gradient.dim()
    return restore_strides(gradient * (power_of_two(exponent) if plain else 2.0**exponent), gradient)


@functools.cache
def power_of_two(exponent: int) -> Tensor:
    """Return 2^exponent as a 0-d tensor, by which torch multiplies twice as fast as by a Python number.

    >>> power_of_two(-2)
    tensor(0.2500, dtype=torch.float64)
    """
    return torch.tensor(2.0**exponent, dtype=torch.float64, device="cpu")


def restore_strides(values: Tensor, like: Tensor) -> Tensor:
    """Return the result of an elementwise operation with the strides of its input.

    torch makes the result of a part of a larger tensor, or of an expanded one, contiguous; a sum over it, or a product,
    is then made in another order, which may change the last bit. Tensor subclasses and sparse tensors are given back.
    """
    if like.layout is not torch.strided or type(like) is not Tensor:
        return values
    aligned = not like.storage_offset() * like.element_size() % _ALIGNMENT
    if aligned and (like.is_contiguous() or values.stride() == like.stride()):
        return values
    return _place_like(values, like) if like.numel() else values


def _place_like(values: Tensor, like: Tensor) -> Tensor:
    """Copy the values to new memory, with the strides and the misalignment of another tensor."""
    size, unit = like.shape, _ALIGNMENT // like.element_size() or 1
    # What is expanded is kept once.
    kept = [1 if s == 0 else n for n, s in zip(size, like.stride())]
    stride = list(like.stride())
    if _count_span(kept, stride) > _SPREAD * math.prod(kept):
        stride = _close_gaps(kept, stride, unit)
    offset = like.storage_offset() % unit
    memory = torch.empty(offset + _count_span(kept, stride), dtype=values.dtype, device=values.device)
    memory.as_strided(kept, stride, offset).copy_(values.as_strided(kept, values.stride(), values.storage_offset()))
    return memory.as_strided(size, stride, offset)


def _count_span(size: list[int], stride: list[int]) -> int:
    """Return how many elements of memory a tensor of this size and these strides spans."""
    return 1 + sum((n - 1) * s for n, s in zip(size, stride))


def _close_gaps(size: list[int], stride: list[int], unit: int) -> list[int]:
    """Return strides without gaps that keep each dimension's alignment, and which dimensions are contiguous."""
    found, old, new = list(stride), 1, 1
    for i in sorted((i for i, n in enumerate(size) if n > 1), key=lambda i: stride[i]):
        # The next place that is as aligned as the old one; a dimension that lay apart from the last still does.
        if stride[i] > old:
            new += 1 + (stride[i] - new - 1) % unit
        old, found[i] = stride[i] * size[i], new
        new *= size[i]
    return found


class CopyWithStrides(torch.autograd.Function):
    """Copies a tensor with its strides, where ``clone`` would make it contiguous."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        """Return a copy of the values with their strides."""
        return restore_strides(tensor.clone(), tensor)

    @staticmethod
    @untraced
    def backward(ctx, gradient: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return gradient


def is_custom(node: Any) -> bool:
    """Return whether a node is that of a custom Function, and not of a `CopyWithStrides`."""
    return isinstance(node, BackwardCFunction) and type(node) is not CopyWithStrides._backward_cls


def copy_with_strides(tensor: Tensor) -> Tensor:
    """Return a copy with the tensor's strides that autograd records, with a node of its own."""
    out = tensor.clone()
    if out.stride() == tensor.stride() or tensor.layout is not torch.strided or type(tensor) is not Tensor:
        return out
    return CopyWithStrides.apply(tensor)


# 2^127 and 2^-126 are float32's last normal powers of two.
_BIAS, _MOST = 127, 126


class Following:
    """Lifts all sites' exponents by one power of two per backward pass, so that they follow the loss's gradient.

    A model's gradients are linear in the one that enters it. Exponents are right for a loss that sends gradients of a
    certain size into the model, the reference. Where a loss sends smaller ones, all sites are lifted by as many powers
    of two as these are smaller, and lowered where they are larger:

        stored gradient = 2^(exponent + lift) g,   lift = reference - floor(log2 max |g(output)|)

    with the first output that the pass reaches; in place of the exponent the sum then is the potential, so that joins
    agree as before. The global exponent, and sites that follow it, are not lifted. The lift is as large as float32 has
    powers of two for. Nothing is copied to the host from an accelerator: there the lift is a tensor.

    Args:
        sites: whose exponents follow.
        wanted: whether they do.

    Attributes:
        wanted: Whether exponents follow losses at all; else the lift is 0.
        on: Whether they do so now.
        binades: floor(log2 max |g(output)|) of this iteration's passes, as numbers or tensors; NaN where that is 0 or
            not finite.
        read: The finite binades of this iteration, once they are on the host.
        resumes: The iteration from which exponents follow losses.
        several: Whether a pass of this iteration reached more than one output, of which the first may mislead.
    """

    def __init__(self, sites: Sites, wanted: bool) -> None:
        self._sites = sites
        self._global_site = sites.global_site
        self.wanted = self.on = wanted
        self.binades: list[float | Tensor] = []
        self.read: list[int] = []
        self.resumes = 0
        self.several = False
        # That of the pass that runs, a tensor on an accelerator; 0 until an output was reached.
        self.lift: int | Tensor = 0
        self._is_found = False
        self._entered = 0
        self._factors: dict[tuple, Tensor] = {}

    def begin(self, measuring: bool) -> None:
        """Begin a backward pass with its lift unknown; ``measuring``: read binades at its end."""
        self.lift = 0
        self._is_found = not measuring and self._global_site.loss_binade is None
        if not self._is_found:
            below = (site.exponent - self._global_site.exponent for site in self._sites)
            self._room = _MOST - max(map(abs, below))
        self._entered = 0
        self._factors.clear()

    def disable(self) -> None:
        """Stop lifting exponents by the loss from now on, as compiled graphs cannot."""
        self.wanted = self.on = False

    def take_binades(self, device: torch.device) -> list[Tensor]:
        """Return this iteration's binades, as tensors on their devices."""
        binades, self.binades = self.binades, []
        return [torch.as_tensor(binade, dtype=torch.float32, device=device) for binade in binades]

    def decide(self, iteration: int) -> None:
        """Begin an iteration: decide whether exponents follow the loss in it."""
        self.on = self.wanted and iteration >= self.resumes
        self.several = False

    @property
    def measured_lift(self) -> int:
        """The lift of the measured iteration, from the binades that were read."""
        binade = self._global_site.loss_binade
        return binade - max(self.read) if self.read and binade is not None and self.on else 0

    def update_reference(self, narrow: bool, floor: int, ceiling: int) -> None:
        """Make this iteration's largest loss gradient the reference, as far as exponents allow.

        Args:
            narrow: whether a narrow format was measured; without one there is nothing to follow for.
            floor: the least exponent.
            ceiling: the greatest one.
        """
        known = self._global_site.loss_binade
        if not (self.read and self.wanted and (narrow or known is not None)):
            return
        largest = max(self.read)
        if known is None:
            self._sites.set_reference(largest)
        elif self.on or largest > known:
            own = [site.exponent for site in self._sites if not site.follows_global]
            most, least = max(0, min(own) - floor), min(0, max(own) - ceiling)
            self._sites.set_reference(known + max(least, min(most, largest - known)))

    def move(self, gradient: Tensor, source: Site, target: Site) -> Tensor:
        """Return a gradient stored at ``target``'s exponent, multiplied to ``source``'s; strides are kept."""
        return self.move_by(gradient, source.exponent - target.exponent, self.find_sign(source, target))

    def find_sign(self, source: Site, target: Site) -> int:
        """Return how often the lift counts from ``target`` to ``source``: 1 into sites that follow, -1 out of them."""
        return target.follows_global - source.follows_global if self.wanted else 0

    def move_by(self, gradient: Tensor, exponent: int, sign: int) -> Tensor:
        """Return a gradient times 2^(exponent + sign lift); strides are kept."""
        if sign > 0:
            self._entered += 1
            self.several = self.several or self._entered > 1
        if not sign or not self.on:
            return multiply_by_power(gradient, exponent)
        if not self._is_found:
            # Before an output was reached there is nothing to follow: what is a parameter's alone, say.
            self.lift, self._is_found = self._find_lift(gradient) if sign > 0 else 0, True
        if isinstance(self.lift, int):
            return multiply_by_power(gradient, exponent + sign * self.lift)
        factor = self._make_factor(self.lift, exponent, sign, gradient.device)
        # A number in memory takes the gradient's dtype first, which float16 may not hold.
        wide = gradient.float() if gradient.dtype == torch.float16 else gradient
        return restore_strides((wide * factor).to(gradient.dtype), gradient)

    def _find_lift(self, gradient: Tensor) -> int | Tensor:
        """Return the lift for a gradient that enters the model at the global exponent."""
        values = local_values(gradient)
        if not values.numel():
            return 0
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high).float()
        reference = self._global_site.loss_binade
        if is_on_host(largest):
            size = float(largest)
            if not 0 < size < math.inf:
                self.binades.append(math.nan)
                return 0
            here = math.frexp(size)[1] - 1 - self._global_site.exponent
            self.binades.append(here)
            return 0 if reference is None else max(-self._room, min(self._room, reference - here))
        known = torch.isfinite(largest) & (largest > 0)
        binade = torch.frexp(largest).exponent - 1 - self._global_site.exponent
        self.binades.append(torch.where(known, binade.float(), math.nan))
        if reference is None:
            return 0
        return torch.where(known, reference - binade, 0).clamp(-self._room, self._room).int()

    def _make_factor(self, lift: Tensor, exponent: int, sign: int, device: torch.device) -> Tensor:
        """Return 2^(exponent + sign lift) as a float32 tensor, made exactly from its bits."""
        key = exponent, sign, device
        if key not in self._factors:
            self._factors[key] = (
                ((exponent + sign * lift + _BIAS) << 23).view(torch.float32).to(device, non_blocking=True)
            )
        return self._factors[key]


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a number can be read without a device synchronisation."""
    return tensor.device.type == "cpu"
