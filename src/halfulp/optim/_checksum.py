"""A checksum of every row of a parameter (`kernels.row_checksums`), which goes with companions into files and copies.

Rows are those of the first dimension, along which parameters are sharded: however many processes a file is read by,
each has the checksums of its own rows, and asks nobody. 0 stands for a row of which nothing is known.
"""

from __future__ import annotations

import zlib

import torch

from ..kernels import row_checksums
from ._parameter_plan import Slot


def checksums_of(slot: Slot) -> torch.Tensor | None:
    """One for each row that this process holds; None of a parameter without memory."""
    payload = slot.payloads[0]
    if payload.is_meta:
        return None
    if not _is_by_rows(slot.parameter):
        rows = payload.shape[0] if payload.dim() else 1
        return torch.zeros(rows, dtype=torch.int64, device=payload.device)
    scale = zlib.crc32(slot.parameter.scale.item().hex().encode()) if slot.kind.scaled else 0
    found = row_checksums(payload) + scale
    return torch.where(found == 0, 1, found)


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
