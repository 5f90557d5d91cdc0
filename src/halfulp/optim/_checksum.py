"""A checksum of every row of a parameter, which goes with companions into files and copies.

Rows are those of the first dimension, along which parameters are sharded: however many processes a file is read by,
each has the checksums of its own rows, and asks nobody. A row in which one element is another has another checksum:

    sum_j w_j b_j  mod 2^64,   w_j odd, b_j the bits of element j, below 2^32

0 stands for a row of which nothing is known.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ._slots import Slot

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit constants with about as many ones as zeros, as signed integers.
_STEP, _MIX = -0x61C8864680B583EB, -0x4B47D0C5E2A3A5A7
_AT_ONCE = 2**22


def checksums_of(slot: Slot) -> torch.Tensor | None:
    """One for each row that this process holds; None of a parameter without memory."""
    payload = slot.payloads[0]
    if payload.is_meta:
        return None
    rows = (payload.detach() if payload.dim() else payload.detach()[None]).unsqueeze(-1).flatten(1)
    if not _is_by_rows(slot.parameter):
        return torch.zeros(len(rows), dtype=torch.int64, device=payload.device)
    sums = [_sums(part) for part in rows.split(max(1, _AT_ONCE // max(1, rows.shape[1])))]
    found = torch.cat(sums) + (zlib.crc32(slot.parameter.scale.item().hex().encode()) if slot.kind.scaled else 0)
    return torch.where(found == 0, 1, found)


def _sums(rows: torch.Tensor) -> torch.Tensor:
    bits = rows.contiguous().view(_WORDS[rows.element_size()]).long()
    weights = (torch.arange(1, rows.shape[1] + 1, dtype=torch.int64, device=rows.device) * _STEP) ^ _MIX
    return (bits * ((weights * _MIX) | 1)).sum(1)


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether any row is known to be another."""
    return bool(((one.to(other.device) != other) & (one.to(other.device) != 0) & (other != 0)).any())


def _is_by_rows(parameter: torch.Tensor) -> bool:
    """Whether each process holds whole rows: of a DTensor that is replicated, or sharded along its first dimension."""
    if not hasattr(parameter, "_local_tensor"):
        return True
    from torch.distributed.tensor import Replicate, Shard

    return all(isinstance(p, Replicate) or (type(p) is Shard and p.dim == 0) for p in parameter.placements)


def as_saved(checksums: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What a file holds of a parameter: a DTensor where that is one, so that it can be read by other processes."""
    if not hasattr(parameter, "_local_tensor"):
        return checksums
    from torch.distributed.tensor import DTensor, Replicate

    by_rows = _is_by_rows(parameter)
    rows, mesh = parameter.shape[0] if parameter.dim() else 1, parameter.device_mesh
    placements = parameter.placements if by_rows else [Replicate()] * mesh.ndim
    checksums = checksums if by_rows else checksums.new_zeros(rows)
    return DTensor.from_local(checksums, mesh, placements, shape=(rows,), stride=(1,), run_check=False)


def as_loaded(saved: object, slot: Slot) -> torch.Tensor | None:
    """What a file says of the rows that this process holds; None where it does not say."""
    saved = getattr(saved, "_local_tensor", saved)
    rows = slot.payloads[0].shape[0] if slot.payloads[0].dim() else 1
    is_fitting = isinstance(saved, torch.Tensor) and saved.dtype == torch.int64 and saved.shape == (rows,)
    return saved.clone() if is_fitting else None
