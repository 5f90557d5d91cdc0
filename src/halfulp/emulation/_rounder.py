"""The rounding unit of the emulated hardware: a format and a rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format
from ..formats._catalog import get_signed
from ..kernels import to_plain_memory
from ..rounding import Nearest, Rounding, Stochastic, get_rounding, mix64
from ..rounding._kernels import round_into as run_kernel
from ..rounding._modes import draw_random_key
from ..rounding._quantize import encode_target, find_target
from ..rounding._target import Target

WIDE_DTYPES = (torch.float32, torch.float64)
_PLAIN_TENSOR_CLASSES = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))


class Rounder:
    """Rounds tensors of float32 and float64 to a format, by the settings that `emulate` was given."""

    def __init__(self, format: Format | str | torch.dtype, rounding: Rounding | str, overflow: str | None) -> None:
        self.format: Format = get_signed(format)
        self.rounding: Rounding = get_rounding(rounding)
        if isinstance(self.rounding, Stochastic) and self.rounding.seed is not None:
            raise ValueError(
                f"emulate draws from torch's generator, got {self.rounding!r}: take 'stochastic' and "
                "torch.manual_seed, which lets checkpoints draw the same bits again"
            )
        self.overflow = overflow
        for dtype in WIDE_DTYPES:
            encode_target(self.format, self.rounding, overflow, dtype)  # which a compiler may trace

    @property
    def settings(self) -> tuple[Format, Rounding, str | None]:
        """The settings by which two rounders give the same results."""
        return self.format, self.rounding, self.overflow

    def check_tensor(self, x: Tensor, source: str) -> None:
        """Raise for a floating tensor that cannot be rounded."""
        if torch.nn.parameter.is_lazy(x):
            raise ValueError(f"{source} has no shape yet: run one batch through the model first")
        if (x.is_floating_point() or x.is_complex()) and not x.is_meta:
            self._find_rounding_target(self._view_as_real(x.detach(), source).dtype, source)

    def round_in_place(self, x: Tensor, source: str) -> None:
        """Round the floating numbers of x in place."""
        # A zero tensor holds zeros that torch has not written out, which every format has.
        if not (x.is_floating_point() or x.is_complex()) or x.is_meta or x._is_zerotensor():
            return
        if x.is_neg() or x.is_conj():  # its memory holds other numbers: torch writes through the bit
            x.detach().copy_(self.round_copy(x, source))
            return
        real = self._view_as_real(x, source)
        target = self._find_rounding_target(real.dtype, source)
        if target is not None:
            self._round_into(real, target, real)

    def round_copy(self, x: Tensor, source: str) -> Tensor:
        """Return a rounded copy of x; x itself where it holds no floating numbers."""
        if not (x.is_floating_point() or x.is_complex()) or x.is_meta:
            return x
        real = self._view_as_real(x.detach(), source)
        target = self._find_rounding_target(real.dtype, source)
        if target is None:
            return x
        out = torch.empty_like(real)
        self._round_into(real, target, out)
        return torch.view_as_complex(out) if x.is_complex() else out

    def has_numbers_outside_format(self, x: Tensor) -> bool:
        """Return whether a tensor holds numbers that the format lacks."""
        if not x.is_floating_point() or x.is_meta:
            return False
        exact = Rounder(self.format, Nearest(), self.overflow).round_copy(x, "a parameter")
        return bool(((exact != x) & ~(exact.isnan() & x.isnan())).any())

    def _round_into(self, x: Tensor, target: Target, out: Tensor) -> None:
        """Round x into out, which may be x, by the kernel itself: callers are below autograd or without gradients."""
        key = mix64(draw_random_key(), 0) if isinstance(self.rounding, Stochastic) else 0
        if x.is_contiguous() and out.is_contiguous():
            run_kernel(x, target, key, out)
            return
        if x is out:  # an expanded tensor, such as a buffer, holds each number once
            x = out = x[tuple(slice(None if step else 1) for step in x.stride())]
        ordered = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        run_kernel(ordered, target, key, ordered)
        out.copy_(ordered)

    def _view_as_real(self, x: Tensor, source: str) -> Tensor:
        """Return x as a plain tensor of real numbers, in x's memory unless its conjugate or negative bit is set."""
        if type(x) not in _PLAIN_TENSOR_CLASSES or x.layout is not torch.strided:
            kind = type(x).__name__ if type(x) not in _PLAIN_TENSOR_CLASSES else f"{x.layout} tensor"
            raise NotImplementedError(
                f"emulate cannot round what {source} gives, a {kind}: it rounds dense plain tensors only"
            )
        x = to_plain_memory(x, f"what {source} gives")
        return torch.view_as_real(x) if x.is_complex() else x

    def _find_rounding_target(self, dtype: torch.dtype, source: str) -> Target | None:
        if dtype in WIDE_DTYPES:
            return find_target(self.format, self.rounding, self.overflow, dtype)
        raise NotImplementedError(
            f"emulate cannot round what {source} gives, a tensor of {dtype}: it was rounded to {dtype} before, and "
            f"rounding it to {self.format.name} again would be a second rounding; keep the model in float32, "
            "without autocast"
        )
