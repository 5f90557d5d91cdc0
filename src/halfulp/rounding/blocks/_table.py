"""The target of a rounding in blocks, its layout, and its device functions bound to a table."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from math import frexp
from typing import NamedTuple

import numpy as np
import torch

from ...formats import BlockFormat
from ...kernels._device_function import Recording, bound
from ...kernels._table import Table
from .._modes import Nearest, Rounding, Up
from .._random_bits import WEYL, draw, recorded_start
from .._table import container_pieces, fixed_elements, mode_pieces
from .._target import COUNT, DOWN, DTYPES, UP, WORD32, WORD64, Layout, Target, constants, layout_for, make_target
from . import _device_functions as b

FLOOR, RAISED, CLOSEST = range(3)
_SCALE_ROUNDINGS = {"floor": FLOOR, "up": RAISED, "nearest": CLOSEST}


class BlockTarget(NamedTuple):
    """The format of elements and scales, and the way a block gets its scale.

    Attributes:
        element: what payloads are rounded to.
        scale: what scales are rounded to, saturating.
        block: elements that share a scale.
        choice: FLOOR, RAISED or CLOSEST.
        tensor_scale: whether the tensor has a scale of its own.
    """

    element: Target
    scale: Target
    block: int
    choice: int
    tensor_scale: bool

    def flat(self) -> tuple[int, ...]:
        """Return the target as an operator's argument."""
        return (*self.element, *self.scale, self.block, self.choice, int(self.tensor_scale))

    @classmethod
    def of(cls, flat: list[int]) -> BlockTarget:
        """Return the target that an operator's argument encodes."""
        size = len(Target._fields)
        element, scale = Target(*flat[:size]), Target(*flat[size : 2 * size])
        return cls(element, scale, flat[-3], flat[-2], bool(flat[-1]))

    @property
    def powers(self) -> bool:
        """Whether scales are powers of two, so that scaling is exact."""
        return self.scale.mantissa_bits == 0 and not self.tensor_scale


def make_block_target(format: BlockFormat, rounding: Rounding, overflow: str | None, dtype: torch.dtype) -> BlockTarget:
    """Return the target of rounding tensors of a dtype to a block format.

    Raises:
        ValueError: If the overflow policy is not saturation, or the formats are such that no scale fits.
    """
    if overflow not in (None, "saturate"):
        raise ValueError(f"the elements of {format.name} saturate: overflow is 'saturate' or None, got {overflow!r}")
    if not format.element.zero or not format.element.signed:
        raise ValueError(f"{format.name}: elements need a zero and a sign, and {format.element.name} lacks one")
    choice = _SCALE_ROUNDINGS[format.scale_rounding]
    mode = Nearest() if choice == CLOSEST else Up()
    element = make_target(format.element, rounding, "saturate", torch.float64)
    scale = make_target(format.scale, mode, "saturate", torch.float64)
    if element is None or scale is None or format.element.mantissa_bits > 10 or format.scale.mantissa_bits > 22:
        raise ValueError(
            f"{format.name}: elements of up to 10 and scales of up to 22 mantissa bits are rounded in blocks; got "
            f"{format.element.name} and {format.scale.name}"
        )
    if dtype not in DTYPES:
        raise TypeError(f"x is float16, bfloat16, float32 or float64; got {dtype}")
    return BlockTarget(element, scale, format.block, choice, format.tensor_scale)


def scale_threshold(target: BlockTarget, mantissa: int) -> tuple[int, int]:
    """Return how a power-of-two scale follows from largest = 2^e (1 + f): exponent e - first + (f >= second).

    `second` is in units of 2^-mantissa; a value that f never reaches stands for never.
    """
    largest = Fraction(target.element.max)
    never = 1 << mantissa
    if target.choice == FLOOR:
        return _exponent(largest), never
    if target.choice == CLOSEST:
        largest = largest * 3 / 2
    first = _exponent(largest)
    second = (largest / Fraction(2) ** first - 1) * never
    return first, int(second) + (target.choice == RAISED)


def _exponent(value: Fraction) -> int:
    return frexp(float(value))[1] - 1


class Kind(NamedTuple):
    """The parameters that determine the instructions of a block kernel beside the dtype.

    Attributes:
        mode: of the elements' rounding.
        path, plain, saturating: as in `Constants`, of the elements.
        block: elements that share a scale.
        powers: whether scales are powers of two.
        closest: whether a scale is the closest.
        inexact: whether results may lie between two numbers of the dtype, which has 16 bits, and are rounded to it.
        under_amax: whether the tensor has a scale of its own that the kernel computes from the word AMAX.
    """

    mode: int
    path: str
    plain: bool
    saturating: bool
    block: int
    powers: bool
    closest: bool
    inexact: bool
    under_amax: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype, target: BlockTarget, layout: Layout) -> Kind:
        """Return the kind of a target, of tensors of a dtype."""
        known = constants(target.element, layout)[:3]
        inexact = dtype.itemsize == 2 and has_wide_results(target)
        return cls(target.element.mode, *known, target.block, target.powers, target.choice == CLOSEST, inexact)


def has_wide_results(target: BlockTarget) -> bool:
    """Return whether results may lie between two 16-bit numbers.

    So may products, and what a largest element scaled down makes of a larger one.
    """
    return not target.powers or target.choice == CLOSEST


def layout_of(dtype: torch.dtype, target: BlockTarget) -> Layout | None:
    """Return the words in which blocks are rounded; None where only the reference does it."""
    narrow = layout_for(target.element) is WORD32 and dtype != torch.float64
    if not target.powers:
        fits = layout_for(target.scale) is WORD32 and target.scale.tiny_exponent >= -126
        return WORD32 if narrow and fits else None
    first, _ = scale_threshold(target, 0)
    return WORD32 if narrow and first >= 2 and target.scale.emin >= -127 else WORD64


@cache
def rounding_table(dtype: torch.dtype, kind: Kind) -> Table:
    """Return the table that rounds: its columns are what is rounded and where it goes."""
    return _table(dtype, kind, rounds=True)


@cache
def largest_table(dtype: torch.dtype, kind: Kind) -> Table:
    """Return the table that finds the largest of the finite blocks' largest magnitudes."""
    return _table(dtype, kind, rounds=False)


def bound_names(kind: Kind, wide: bool) -> dict[str, object]:
    """Return the functions bound to the free names of the device functions."""
    names: dict[str, object] = {**mode_pieces(kind.mode, (kind.path, kind.plain, kind.saturating), wide)}
    kept = kind.mode in (UP, DOWN)
    if kind.powers:
        names |= {"scale_of": b.exponent_of_scale, "factor_of": b.power, "inverse_of": b.inverse_power}
        names |= {"payload": b.multiplied_kept if kept else b.multiplied}
    else:
        names |= {"scale_of": b.product_of_scale, "factor_of": b.itself, "inverse_of": b.itself}
        names |= {"payload": b.divided_kept if kept else b.divided}
        names["scale_addend"] = b.nearest_scale if kind.closest else b.raised_scale
    return names


def _table(dtype: torch.dtype, kind: Kind, rounds: bool) -> Table:
    pieces, wide = container_pieces(dtype, kind.inexact), dtype == torch.float64
    element = Recording(2, 2 * COUNT + b.WORDS, "w64" if wide else "w32")
    i, (source, target), words = element.index, element.arrays, element.constants
    c, d, of_block = words[:COUNT], words[COUNT : 2 * COUNT], words[2 * COUNT :]
    w, names = pieces["load"](source, i), bound_names(kind, wide)
    if rounds:
        random, of_block = draw(*element.stream), b.under_tensor_scale(of_block) if kind.under_amax else of_block
        pieces["store"](target, i, bound(b.block_element, names)(w, random, c, d, of_block))
    else:
        element.trace.gather_sum("max", bound(b.finite_largest, names)(w, c))
    return Table(element.trace, 2, len(words), recorded_start(), int(WEYL), kind.block, partial=True)


def words_of(target: BlockTarget, layout: Layout, tensor: float, unit: float) -> np.ndarray:
    """Return the constants of a table: of the elements, of the scales, and of blocks.

    `tensor` is the tensor's scale, and `unit` its product with the largest element.
    """
    of_scale = constants(target.scale, layout).words
    of_block = _block_words(target, layout, tensor, unit)
    return np.concatenate([constants(target.element, layout).words, of_scale, of_block])


def _block_words(target: BlockTarget, layout: Layout, tensor: float, unit: float) -> np.ndarray:
    words = dict.fromkeys(range(b.WORDS), 0)
    if target.powers:
        first, second = scale_threshold(target, layout.mantissa)
        highest = int(np.frexp(target.scale.max)[1]) - 1
        words |= {b.FIRST: first % (1 << layout.width), b.SECOND: second, b.TWICE_BIAS: 2 * layout.bias}
        words[b.SMALLEST] = max(0, target.scale.tiny_exponent + layout.bias)
        words[b.GREATEST] = min(highest + layout.bias, 2 * layout.bias - 1)
        words[b.BELOW_NORMAL] = layout.power(-layout.bias)
    else:
        words |= {b.UNIT: layout.word(unit), b.TENSOR: layout.word(tensor)}
        if target.tensor_scale:
            with np.errstate(over="ignore"):  # an infinity, as in `tensor_scale`
                words[b.DIVISOR] = layout.word(float(np.float32(target.element.max * target.scale.max)))
    return np.array([words[i] for i in range(b.WORDS)], np.uint32 if layout.width == 32 else np.uint64)


def fixed_rows(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Return rows of a length, of numbers of all magnitudes and the special ones."""
    x = fixed_elements(dtype)
    x = x.repeat(-(-length // x.numel()))
    return x[: x.numel() // length * length].view(-1, length)
