"""Operators of which torch writes MCTensors into a plain tensor of its own: the same results, with all components.

Padded and packed sequences, Vandermonde matrices, points between two tensors, draws around a number. Each takes an
operator's arguments above autograd, and gives NotImplemented where there is no MCTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import torch_operators
from .._mctensor import MCTensor

aten = torch_operators("aten")


def pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    """Sequences side by side, each filled up to the longest."""
    if not any(isinstance(x, MCTensor) for x in sequences) or padding_side not in ("left", "right"):
        return NotImplemented
    longest = max(x.shape[0] for x in sequences)
    padded = []
    for x in sequences:
        room = longest - x.shape[0]
        ends = (room, 0) if padding_side == "left" else (0, room)
        padded.append(F.pad(x, (0, 0) * (x.dim() - 1) + ends, value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


def pad_packed_sequence(
    rows: Any, batch_sizes: Tensor, batch_first: bool, padding_value: Any, total_length: int
) -> Any:
    """The sequences of packed rows, each filled up to a length, and their lengths."""
    if not isinstance(rows, MCTensor):
        return NotImplemented
    steps = max(total_length, batch_sizes.numel())
    if 0 < total_length < batch_sizes.numel():
        raise ValueError(
            f"total_length={total_length}: the longest sequence has {batch_sizes.numel()} steps, give that or more"
        )
    places, is_row = _places(batch_sizes, steps, rows.device)
    padded = rows.index_select(0, places.flatten()).unflatten(0, places.shape)
    outside = ~is_row.reshape(*is_row.shape, *[1] * (rows.dim() - 1))
    padded = padded.masked_fill(outside, padding_value)
    lengths = (batch_sizes[:, None] > torch.arange(places.shape[1], dtype=torch.int64, device="cpu")).sum(0)
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _places(batch_sizes: Tensor, steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row of every step of every sequence, and which of these there are."""
    counts = F.pad(batch_sizes, (0, steps - batch_sizes.numel()))
    starts = counts.cumsum(0) - counts
    batch = torch.arange(int(batch_sizes[0]), dtype=torch.int64, device="cpu")
    is_row = batch < counts[:, None]
    return torch.where(is_row, starts[:, None] + batch, 0).to(device), is_row.to(device)


def pack_padded_sequence_backward(
    gradient: Any, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool
) -> Any:
    """The gradient of the packed rows, as padded sequences with zeros outside."""
    steps = input_size[1] if batch_first else input_size[0]
    padded = pad_packed_sequence(gradient, batch_sizes, batch_first, 0.0, steps)
    return padded if padded is NotImplemented else padded[0]


def vander(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    """The powers of every element, the highest first unless increasing."""
    if not isinstance(x, MCTensor):
        return NotImplemented
    if x.dim() != 1 or (N is not None and N < 0):
        return NotImplemented
    count = x.shape[0] if N is None else N
    powers = torch.cat([torch.ones_like(x)[:, None], x[:, None].expand(-1, max(count - 1, 0))], 1).cumprod(1)
    powers = powers[:, :count]
    return powers if increasing else powers.flip(1)


def linspace(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Points at equal distances from one value to another."""
    ends = [x for x in (start, end) if isinstance(x, MCTensor)]
    if not ends or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    like = ends[0]
    places = MCTensor.encode(
        torch.arange(steps, dtype=torch.float64, device="cpu"), len(like._parts), dtype or like.dtype
    )
    ratios = places.to(like.device) / max(steps - 1, 1)
    return start + (end - start) * ratios


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, **options: Any) -> Any:
    """A base to the power of points at equal distances."""
    exponents = linspace(start, end, steps, **options)
    return exponents if exponents is NotImplemented else torch.pow(base, exponents)


def _normal(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Any:
    if not isinstance(std, MCTensor) and not isinstance(mean, MCTensor):
        return NotImplemented
    like = std if isinstance(std, MCTensor) else mean
    return mean + std * torch.empty_like(like).normal_(generator=generator)


def _of_three(function: Callable, packet: Any) -> dict:
    return {getattr(packet, name): function for name in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")}


OWN = {
    aten.pad_sequence.default: pad_sequence,
    aten._pad_packed_sequence.default: pad_packed_sequence,
    aten._pack_padded_sequence_backward.default: pack_padded_sequence_backward,
    aten.vander.default: vander,
    aten.normal.float_Tensor: _normal,
    **_of_three(linspace, aten.linspace),
    **_of_three(logspace, aten.logspace),
}
