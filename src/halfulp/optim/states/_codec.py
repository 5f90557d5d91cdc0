"""What a state's codec does on tensors, by its device functions; the simplest one: a sum of two bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...kernels import Trace, run_on_tensors
from ...kernels._device_function import Recording
from ...kernels._trace import Piece
from ...kernels.scalar._operations import load16, select, store16, sub
from ..stores._storage import bf16_nearest, bf16_real, canonical, random_words_of


class TensorCodec:
    """The base of codecs, which are hashable and give device functions: `load` and `save` of an element."""

    columns: ClassVar[int] = 1
    nearest_draw: ClassVar[int] = 0

    @property
    def scale_block(self) -> int | None:
        """The elements of a block, where elements share a scale."""
        return None

    @property
    def random_bits(self) -> int:
        """Random bits of each rounding."""
        raise AssertionError("every codec says it")

    @property
    def to_nearest(self) -> TensorCodec:
        """The same codec without draws."""
        return self

    def load(self, arrays: Sequence[Any], i: Any, scale: Any) -> Any:
        """Device function: the float32 of element i."""
        raise AssertionError("every codec loads")

    def save(self, arrays: Sequence[Any], i: Any, value: Any, inverse: Any, random: Any) -> None:
        """Device function: store element i."""
        raise AssertionError("every codec saves")

    def load_value(self, arrays: Sequence[Any], i: Any, block: Any, scale: Any) -> Any:
        """Device function: the float32 of element i, in a block and under a scale where the codec has such."""
        return self.load(arrays, i, scale)

    def save_value(self, arrays: Sequence[Any], i: Any, block: Any, value: Any, inverse: Any, random: Any) -> None:
        """Device function: store element i, in a block and under the scale of an inverse where the codec has such."""
        self.save(arrays, i, value, inverse, random)

    def decode(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the float32 values."""
        piece = _reader(self)
        return run_on_tensors(piece.trace, tensors, self.scale_inputs(tensors), piece.results, self.scale_block)[0][0]

    def encode(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None = None) -> None:
        """Store values: to nearest, or by a random word per element."""
        codec = self.to_nearest if random is None else self
        drawn = self.nearest_draw if random is None else random_words_of(random, self.random_bits)
        inputs = {**self.scale_inputs(tensors), "value": value, "random": drawn}
        run_on_tensors(_writer(codec), tensors, inputs, block=self.scale_block)

    def scale_inputs(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor | float]:
        """Return "scale" and "inverse" of a codec with a scale per tensor."""
        return {}


@dataclass(frozen=True)
class DoubleBF16(TensorCodec):
    """value = first + residual, both rounded to nearest: 16 bits, so that a share of 0.999 is kept, where 8 stall.

    Where the first is an infinity or NaN, the residual is zero.
    """

    random_bits: ClassVar[int] = 0
    columns: ClassVar[int] = 2

    def tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the dtypes of both numbers."""
        return {name: (shape, torch.bfloat16), f"{name}_residual": (shape, torch.bfloat16)}

    def load(self, arrays: Sequence[Any], i: Any, scale: Any) -> Any:
        """Device function: the float32 of element i."""
        first, residual = arrays
        return pair_real(first, residual, i)

    def save(self, arrays: Sequence[Any], i: Any, value: Any, inverse: Any, random: Any) -> None:
        """Device function: store element i."""
        first, residual = arrays
        pair_save(first, residual, i, value)


def pair_real(first, residual, i):
    """Device function: the sum."""
    return bf16_real(load16(first, i)) + bf16_real(load16(residual, i))


def pair_save(first, residual, i, x):
    """Device function: the number nearest to x, and the one nearest to the rest."""
    code = bf16_nearest(x, x)
    store16(first, i, code)
    rest = x - bf16_real(code)
    lost = rest - rest
    low = bf16_nearest(rest, rest)
    store16(residual, i, select(lost == lost, low, sub(low, low)))


@functools.cache
def _reader(codec: TensorCodec) -> Piece:
    element = Recording(codec.columns)
    found = codec.load_value(element.arrays, element.index, element.block(), element.given("scale"))
    return Piece(element.trace, (found.number,))


@functools.cache
def _writer(codec: TensorCodec) -> Trace:
    element = Recording(codec.columns)
    given = canonical(element.given("value")), element.given("inverse"), element.given("random", "w32")
    codec.save_value(element.arrays, element.index, element.block(), *given)
    return element.trace
