"""Candidate formats as numbers that a loop compares magnitudes with: where zero, normal numbers and overflow begin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...formats import BlockFormat, Format, block_names, get, get_block
from ...rounding import Nearest, quantize
from ...rounding.blocks._table import BlockTarget, make_block_target
from ._sample_places import RUN

AnyFormat = Format | BlockFormat | str | torch.dtype
DEFAULT_FORMATS = ("fp16", "bf16", "e5m2", "e4m3fn", "mxfp8_e4m3", "nvfp4")
INFINITY = 0x7F800000


class Candidates:
    """The formats that samples are counted in.

    Attributes:
        names: of all, in order: formats of single elements first.
        thresholds: int64 of shape (single, 3): the first float32 words of magnitudes that become nonzero, normal, and
            larger than the largest number.
        targets: what float32 is rounded to in each block format.
    """

    def __init__(self, formats: Sequence[AnyFormat]) -> None:
        found = [candidate(format) for format in formats]
        self.single: list[Format] = [format for format in found if isinstance(format, Format)]
        self.blocks: list[BlockFormat] = [format for format in found if isinstance(format, BlockFormat)]
        self.names: list[str] = [*(format.name for format in self.single), *(block.name for block in self.blocks)]
        self.thresholds: np.ndarray = np.array(list(map(thresholds, self.single)), np.int64).reshape(-1, 3)
        self.targets: list[BlockTarget] = list(map(target_of, self.blocks))


def candidate(format: AnyFormat) -> Format | BlockFormat:
    """Return the format or block format that is meant.

    Raises:
        ValueError: unknown, or blocks that the sampled runs do not hold a whole number of.
        TypeError: neither a format, nor a name, nor a dtype.
    """
    if isinstance(format, BlockFormat) or (isinstance(format, str) and _is_block_name(format)):
        block = get_block(format)
        if RUN % block.block:
            raise ValueError(
                f"formats: {block.name} has blocks of {block.block} elements, and samples are runs of {RUN}: "
                f"give block formats whose block divides {RUN}"
            )
        return block
    return get(format)


def _is_block_name(name: str) -> bool:
    key = name.strip().lower().replace("-", "_")
    return key in block_names() or key.startswith(("mx", "nvfp"))


@functools.lru_cache(256)
def thresholds(format: Format) -> tuple[int, int, int]:
    """Return the words by bisection over `quantize` itself, so that ties and missing subnormals are as it has them."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return quantize(x.double(), format, Nearest(), overflow="nan")

    return (
        _first_word(lambda x: rounded(x) != 0),
        _first_word(lambda x: ~(rounded(x) < format.smallest_normal)),
        _first_word(lambda x: ~rounded(x).isfinite()),
    )


def _first_word(holds: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Return the least float32 word of a positive finite number for which a monotone condition holds, or infinity's."""
    low, high = 0, INFINITY
    while low < high:
        middle = (low + high) // 2
        x = torch.tensor([middle], dtype=torch.int32, device="cpu").view(torch.float32)
        low, high = (low, middle) if bool(holds(x)) else (middle + 1, high)
    return low


def target_of(format: BlockFormat) -> BlockTarget:
    """Return the rounding target of float32 tensors in a block format."""
    return make_block_target(format, Nearest(), None, torch.float32)
