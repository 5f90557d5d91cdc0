"""The rounding unit of the emulated hardware: a format, a rounding, and a tally of what it rounded."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from ..formats import BlockFormat, Format, block_names, get_block
from ..formats._catalog import get_signed
from ..kernels import to_plain_memory
from ..rounding import Rounding, Stochastic, get_rounding, mix64
from ..rounding._kernels import round_into as run_kernel
from ..rounding._modes import draw_key
from ..rounding._quantize import find_target
from ..rounding._target import Target

WIDE_DTYPES = (torch.float32, torch.float64)
_SIXTEEN_BIT_DTYPES = (torch.float16, torch.bfloat16)
_PLAIN_TENSOR_CLASSES = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))


class Rounder:
    """Rounds tensors of float32 and float64 to a format, and counts.

    Attributes:
        format, rounding, overflow: as `emulate` was given them.
        forward: how many tensors each operator's outputs made, by operator.
        backward: how many gradients each autograd node gave, by node.
        plain: calls of operators whose outputs hold no floating numbers, or no new ones (views).
        kept: statistics for the backward pass that stayed in float32, by operator.
    """

    def __init__(self, format: Format | str | torch.dtype, rounding: Rounding | str, overflow: str | None) -> None:
        self.format: Format = _find_format(format)
        self.rounding: Rounding = get_rounding(rounding)
        self.overflow = overflow
        for dtype in WIDE_DTYPES:
            find_target(self.format, self.rounding, overflow, dtype)
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.plain: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self._draw_count = 0

    @property
    def settings(self) -> tuple[Format, Rounding, str | None]:
        """The settings by which two rounders give the same results."""
        return self.format, self.rounding, self.overflow

    @property
    def is_replayable(self) -> bool:
        """Whether operators that run again from the same generator state give the same bits."""
        return not isinstance(self.rounding, Stochastic) or self.rounding.seed is None

    def round_in_place(self, x: Tensor, source: str) -> int:
        """Round x in place; return the number of tensors rounded, 0 if x has no floating numbers."""
        if not (x.is_floating_point() or x.is_complex()) or x.is_meta:
            return 0
        if x._is_zerotensor():  # zeros that torch has not written out, which every format has
            return 1
        if x.is_neg() or x.is_conj():  # its memory holds other numbers: torch writes through the bit
            x.detach().copy_(self.round_copy(x, source))
            return 1
        real = self._view_real(x, source)
        target = self._find_target(real.dtype, source)
        if target is not None:
            self._round(real, target, real)
        return 1

    def round_copy(self, x: Tensor, source: str) -> Tensor:
        """Return a rounded copy of x; x itself where it holds no floating numbers."""
        if not (x.is_floating_point() or x.is_complex()) or x.is_meta:
            return x
        real = self._view_real(x.detach(), source)
        target = self._find_target(real.dtype, source)
        if target is None:
            return x
        out = torch.empty_like(real)
        self._round(real, target, out)
        return torch.view_as_complex(out) if x.is_complex() else out

    def _round(self, x: Tensor, target: Target, out: Tensor) -> None:
        """Round x into out, which may be x, by the kernel itself: callers are below autograd or without gradients."""
        if x.is_contiguous() and out.is_contiguous():
            run_kernel(x, target, self._make_key(), out)
            return
        ordered = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        run_kernel(ordered, target, self._make_key(), ordered)
        out.copy_(ordered)

    def _make_key(self) -> int:
        """Return the key of the next rounding's random bits."""
        if not isinstance(self.rounding, Stochastic):
            return 0
        if self.rounding.seed is None:
            return mix64(draw_key(), 0)
        self._draw_count += 1
        return mix64(self.rounding.seed, self._draw_count - 1)

    def _view_real(self, x: Tensor, source: str) -> Tensor:
        """Return x as a plain tensor of real numbers, in x's memory unless its conjugate or negative bit is set."""
        if type(x) not in _PLAIN_TENSOR_CLASSES or x.layout is not torch.strided:
            kind = type(x).__name__ if type(x) not in _PLAIN_TENSOR_CLASSES else f"{x.layout} tensor"
            raise NotImplementedError(
                f"emulate cannot round what {source} gives, a {kind}: it rounds dense plain tensors only"
            )
        x = to_plain_memory(x, f"what {source} gives")
        return torch.view_as_real(x) if x.is_complex() else x

    def _find_target(self, dtype: torch.dtype, source: str) -> Target | None:
        if dtype in WIDE_DTYPES:
            return find_target(self.format, self.rounding, self.overflow, dtype)
        if dtype in _SIXTEEN_BIT_DTYPES:
            try:
                if find_target(self.format, self.rounding, self.overflow, dtype) is None:
                    return None
            except ValueError:
                pass
        raise NotImplementedError(
            f"emulate cannot round what {source} gives, a tensor of {dtype}: it was rounded to {dtype} before, and "
            f"rounding it to {self.format.name} again would be a second rounding; keep the model in float32, "
            "without autocast"
        )


def _find_format(given: Format | BlockFormat | str | torch.dtype) -> Format:
    if isinstance(given, BlockFormat) or (isinstance(given, str) and given in block_names()):
        block = get_block(given)
        raise ValueError(
            f"{block.name} is a block format, and an operator's output has no blocks: take its element format, "
            f"{block.element.name}, or quantize the operands of the matmuls yourself"
        )
    return get_signed(given)


def describe_roundings(rounder: Rounder, off_format: dict[str, int]) -> str:
    """Return the table of all operators seen, most roundings first, and of values outside the format."""
    lines = [
        f"{rounder.format.name}, {rounder.rounding.name} rounding: {rounder.forward.total()} tensors rounded forward, "
        f"{rounder.backward.total()} gradients backward"
    ]
    lines += _format_section("forward", rounder.forward, "tensors rounded")
    lines += _format_section("backward", rounder.backward, "gradients rounded")
    lines += _format_section("inside the operator, in float32", rounder.kept, "statistics kept for the backward pass")
    unrounded = {name: count for name, count in rounder.plain.items() if not rounder.forward[name]}
    lines += _format_section("not rounded", unrounded, "calls without new floating numbers")
    lines += _format_section(f"not in {rounder.format.name}", off_format, "numbers, read as they are")
    return "\n".join(lines)


def _format_section(title: str, counts: dict[str, int], what: str) -> list[str]:
    shown = {name: count for name, count in counts.items() if count}
    if not shown:
        return []
    width = max(map(len, shown))
    ordered = sorted(shown.items(), key=lambda item: (-item[1], item[0]))
    return [f"  {title} ({what})", *(f"    {name:{width}}  {count}" for name, count in ordered)]
