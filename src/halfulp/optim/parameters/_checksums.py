"""Checksums of a parameter's rows (`kernels.row_checksums`), saved beside auxiliary tensors in files and copies.

Rows are those of the first dimension, along which parameters are sharded: whatever the number of processes that read a
file, each has the checksums of its own rows without communication. 0 stands for an unknown row.
"""

from __future__ import annotations

import zlib

import torch

from ...kernels import row_checksums
from ._local_tensors import is_dtensor
from ._parameter_plan import ParameterPlan


def checksums_of(
    plan: ParameterPlan, payload: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor | None:
    """Return one checksum per row that this process holds; None for a parameter without memory.

    Args:
        plan: of the parameter.
        payload: a copy of its payload in place of the present one.
        scale: that the copy is under.
    """
    payload = plan.payloads[0] if payload is None else payload
    if payload.is_meta:
        return None
    if not _is_by_rows(plan.parameter):
        rows = payload.shape[0] if payload.dim() else 1
        return torch.zeros(rows, dtype=torch.int64, device=payload.device)
    found = row_checksums(payload)
    if plan.spec.scaled:
        found += zlib.crc32((plan.scale if scale is None else scale).hex().encode())
    return torch.where(found == 0, 1, found)


def any_row_differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether any row differs whose checksums are both known."""
    return bool(((one.to(other.device) != other) & (one.to(other.device) != 0) & (other != 0)).any())


def _is_by_rows(parameter: torch.Tensor) -> bool:
    """Return whether each process holds whole rows: replicated, or sharded along the first dimension."""
    if not is_dtensor(parameter):
        return True
    from torch.distributed.tensor import Replicate, Shard

    return all(isinstance(p, Replicate) or (type(p) is Shard and p.dim == 0) for p in parameter.placements)


def checksums_to_save(checksums: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return checksums as they are saved: a DTensor if the parameter is one, so that other processes can read them."""
    if not is_dtensor(parameter):
        return checksums
    from torch.distributed.tensor import DTensor, Replicate

    by_rows = _is_by_rows(parameter)
    rows, mesh = parameter.shape[0] if parameter.dim() else 1, parameter.device_mesh
    placements = parameter.placements if by_rows else [Replicate()] * mesh.ndim
    checksums = checksums if by_rows else checksums.new_zeros(rows)
    return DTensor.from_local(checksums, mesh, placements, shape=torch.Size([rows]), stride=(1,), run_check=False)


def checksums_from_saved(saved: object, plan: ParameterPlan) -> torch.Tensor | None:
    """Return the saved checksums of the rows that this process holds; None if the file has none."""
    saved = getattr(saved, "_local_tensor", saved)
    rows = plan.payloads[0].shape[0] if plan.payloads[0].dim() else 1
    if isinstance(saved, torch.Tensor) and saved.dtype == torch.int64 and saved.shape == (rows,):
        return saved.clone()
    return None
