"""8-bit states in blocks, in plain torch: the reference of `_int8_device_functions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch

from ...kernels import float32_root
from ._int8_device_functions import (
    LEAST_ROOTED,
    MARGIN,
    ROOT_MAGIC,
    SIGNED_CUBES,
    SIGNED_UNIT,
    THIRD,
    TINY,
    TWO_NINTHS,
    UNSIGNED_CUBES,
    UNSIGNED_UNIT,
    decode_signed,
    decode_squared,
    encode_signed,
    encode_squared,
)
from ._storage import BF16

CODEC_VERSION = 2


@dataclass(frozen=True)
class Int8Blocks:
    """8-bit codes in blocks: value = scale x (code / 127)^3, or the square of scale x (code / 255)^3 (second moments).

    The scale is the block's largest finite magnitude, rounded up to three significant bits. Cubes give codes that lie
    close together where most values are, beside the largest, and still reach down to 5e-7 of it (6e-8 for roots).
    Codes are rounded stochastically, such that a first moment is right on average, and of a second moment the code,
    its sixth root: noise of v then leaves the mean of 1 / sqrt(v) as it is, by which the update is made. A positive
    second moment never gets code 0, which would divide by eps alone. An infinity is kept out of the scale and stored
    as the largest code; -128 is NaN.
    """

    columns: ClassVar[int] = 2

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

    def decode(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the float32 values."""
        values = self.decode_roots(tensors)
        return values * values if self.squared else values

    def decode_roots(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the float32 values before squaring."""
        codes, scale = tensors
        code = codes.reshape(-1).float()
        values = code * code * code * float(UNSIGNED_UNIT if self.squared else SIGNED_UNIT)
        values = values * self._spread(BF16.decode(scale).reshape(-1), codes.numel())
        return (values if self.squared else torch.where(code == -128, torch.nan, values)).reshape(codes.shape)

    def encode(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None) -> None:
        """Store values; without random words as nearly as the codes allow."""
        self.encode_roots(tensors, float32_root(value) if self.squared else value, random)

    def encode_roots(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None) -> None:
        """Store values given before squaring."""
        random = torch.full(value.shape, 0x8000, dtype=torch.int64, device=value.device) if random is None else random
        flat = value.reshape(-1)
        scale = self._scales(flat)
        inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, 1.0)
        x = flat * self._spread(inverse, flat.numel())
        x = torch.where((flat > 0) & (x == 0), float(TINY), x)
        most = float(UNSIGNED_CUBES if self.squared else SIGNED_CUBES)
        size = (x if self.squared else x.abs()) * most
        code = _cube_codes(torch.where(size < most, size, most), random.reshape(-1), self.squared)
        if self.squared:
            code = torch.where((code == 0) & (x > 0), 1, code)
        else:
            code = torch.where(x == x, torch.where(x < 0, -code, code), -128)
        tensors[0].copy_(code.reshape(tensors[0].shape))
        tensors[1].copy_(scale.to(torch.bfloat16).reshape(tensors[1].shape))

    def _scales(self, flat: torch.Tensor) -> torch.Tensor:
        words = flat.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
        words = torch.where(words >= 0x7F800000, 0, words)
        padding = -flat.numel() % self.block
        top = torch.nn.functional.pad(words, (0, padding)).reshape(-1, self.block).amax(1)
        code = ((top + 0x1FFFFF >> 21) << 5).clamp(0x0080, 0x7F60)
        return (torch.where(top > 0, code, 0) << 16).to(torch.int32).view(torch.float32)

    def _spread(self, per_block: torch.Tensor, count: int) -> torch.Tensor:
        return per_block.repeat_interleave(self.block)[:count]


def scale_shape(shape: torch.Size, block: int) -> torch.Size:
    """One scale per block: along the last dimension where blocks divide it, else along the rows of dimension 0."""
    if len(shape) > 0 and shape[-1] % block == 0:
        return torch.Size([*shape[:-1], shape[-1] // block])
    row = prod(shape[1:])
    if len(shape) > 1 and row % block == 0:
        return torch.Size([shape[0], row // block])
    return torch.Size([-(-prod(shape) // block)])


def _cube_codes(x: torch.Tensor, random: torch.Tensor, by_code: bool) -> torch.Tensor:
    """Round to one of the two integers whose cubes lie around x, without bias of the integer or of the cube."""
    safe = x.clamp(min=float(LEAST_ROOTED))
    third = float(THIRD)
    y = (int(ROOT_MAGIC) - (safe.view(torch.int32).float() * third).to(torch.int32)).to(torch.int32).view(torch.float32)
    off = 1.0 - safe * (y * y * y)
    y = y + y * off * (third + off * float(TWO_NINTHS))
    k = (safe * y * y - float(MARGIN)).to(torch.int32).float()
    above = k + 1.0
    k = torch.where(above * above * above <= x, above, k)
    chance = ((random & 0xFFFF).float() + 0.5) * 2.0**-16
    t = k + chance
    up = t * t * t < x if by_code else chance * (3.0 * (k * (k + 1.0)) + 1.0) < x - k * k * k
    return k.to(torch.int64) + up.to(torch.int64)
