"""8-bit states in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch

from ...kernels.scalar._operations import sqrt
from ._codec import TensorCodec
from ._int8_device_functions import decode_signed, decode_squared, encode_signed, encode_squared

CODEC_VERSION = 2


@dataclass(frozen=True)
class Int8Blocks(TensorCodec):
    """8-bit codes in blocks: value = scale x (code / 127)^3, or the square of scale x (code / 255)^3 (second moments).

    The scale is the block's largest finite magnitude, rounded up to three significant bits. Cubes give codes that lie
    close together where most values are, beside the largest, and still reach down to 5e-7 of it (6e-8 for roots).
    Codes are rounded stochastically, such that a first moment is right on average, and of a second moment the code,
    its sixth root: noise of v then leaves the mean of 1 / sqrt(v) as it is, by which the update is made. A positive
    second moment never gets code 0, which would divide by eps alone. An infinity is kept out of the scale and stored
    as the largest code; -128 is NaN.
    """

    columns: ClassVar[int] = 2
    nearest_draw: ClassVar[int] = 0x8000

    block: int
    squared: bool

    random_bits: int = 16

    def tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Codes of the parameter's shape, and one scale per block, in rows that shard as the parameter's do."""
        codes = torch.uint8 if self.squared else torch.int8
        return {
            f"{name}_codes": (shape, codes),
            f"{name}_scale": (scale_shape(shape, self.block), torch.bfloat16),
        }

    def load_root(self, arrays: Sequence[Any], i: Any, block: Any) -> Any:
        """Device function: the float32 of element i before squaring."""
        codes, scales = arrays
        return (decode_squared if self.squared else decode_signed)(codes, scales, i, block)

    def save_root(self, arrays: Sequence[Any], i: Any, block: Any, root: Any, random: Any) -> None:
        """Device function: store element i, given before squaring."""
        codes, scales = arrays
        (encode_squared if self.squared else encode_signed)(codes, scales, i, block, root, random)

    @property
    def scale_block(self) -> int:
        """The elements of a block."""
        return self.block

    def load_value(self, arrays: Sequence[Any], i: Any, block: Any, scale: Any) -> Any:
        """Device function: the float32 of element i."""
        root = self.load_root(arrays, i, block)
        return root * root if self.squared else root

    def save_value(self, arrays: Sequence[Any], i: Any, block: Any, value: Any, inverse: Any, random: Any) -> None:
        """Device function: store element i."""
        self.save_root(arrays, i, block, sqrt(value) if self.squared else value, random)


def scale_shape(shape: torch.Size, block: int) -> torch.Size:
    """One scale per block: along the last dimension where blocks divide it, else along the rows of dimension 0."""
    if len(shape) > 0 and shape[-1] % block == 0:
        return torch.Size([*shape[:-1], shape[-1] // block])
    row = prod(shape[1:])
    if len(shape) > 1 and row % block == 0:
        return torch.Size([shape[0], row // block])
    return torch.Size([-(-prod(shape) // block)])
