"""Auxiliary tensors belong to the payload that they were stored beside: writes from outside reset them.

A residual, low bits or a master copy are neutral again, for the whole parameter, where the parameter's version counter
or address shows that somebody else has written it. A write through `.data`, which no counter shows, is detected element
by element in the kernel (`zero_oversized_residual` of Kahan). Files and copies hold checksums of the payload that their
auxiliary tensors belong to, because version counters are not saved.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..._messages import find_user_stack_level
from ...kernels import compute_row_checksums, same_bits
from ._local_tensors import get_local, is_dtensor
from ._parameter_plan import MOVED_VERSION, UNKNOWN_VERSION, WARNED_STEP, ParameterPlan, PayloadVersion

CHECKSUMS_KEY = "payload_checksums"
# 0 in every file, for earlier versions, which count steps there.
LEGACY_PAYLOAD_COPY_STEPS_KEY = "payload_copy_steps"
PAYLOAD_IDENTITY_KEYS = (CHECKSUMS_KEY, LEGACY_PAYLOAD_COPY_STEPS_KEY)
# From one write to the next where writes are a habit, as of a Lookahead, and not an event.
_MOST_STEPS_BETWEEN_HABITUAL_WRITES = 100


def make_checksum_entries(plan: ParameterPlan) -> dict[str, Any]:
    """Return the payload's saved identity beside auxiliary tensors, valid as `read_valid_auxiliary_tensors` are."""
    checksums = None if plan.payload_version is None else compute_payload_checksums(plan)
    return {} if checksums is None else {CHECKSUMS_KEY: checksums, LEGACY_PAYLOAD_COPY_STEPS_KEY: 0}


def carry_payload_version(parameter: torch.Tensor, part: torch.Tensor, held: PayloadVersion | None) -> PayloadVersion:
    """Return the payload version for a new plan, carried over from the plans before it."""
    memory = part.detach()
    if held is None:
        return PayloadVersion(parameter._version, memory)
    before = held.memory
    is_same = before.data_ptr() == memory.data_ptr() or before.shape != memory.shape or held.version == UNKNOWN_VERSION
    if not is_same and before.dtype == memory.dtype and not (before.is_meta or memory.is_meta):
        is_freed = before.untyped_storage().nbytes() < before.nbytes  # by an offloader
        is_same = not is_freed and same_bits(before.to(memory.device), memory)
        # torch.utils.swap_tensors leaves the counter with the memory: the parameter has another one now.
        if is_same and part is parameter and before._version == held.version != parameter._version:
            return replace(held, memory=memory, version=parameter._version)
    return replace(held, memory=memory, version=held.version if is_same else MOVED_VERSION)


def is_payload_overwritten(plan: ParameterPlan) -> bool:
    """Return whether a parameter was written since its auxiliary tensors were stored beside it."""
    held = plan.payload_version
    if held is None or held.version == plan.parameter._version:
        return False
    if held.version != UNKNOWN_VERSION:
        return True
    if held.checksums is None:
        return False
    rows = compute_payload_checksums(plan)
    return rows is not None and has_differing_checksum(held.checksums, rows)


def read_valid_auxiliary_tensors(plan: ParameterPlan) -> Sequence[torch.Tensor]:
    """Return the auxiliary tensors as they are valid for the present payload, without changing them."""
    if not is_payload_overwritten(plan):
        return plan.auxiliary_tensors
    auxiliary = [torch.empty_like(tensor) for tensor in plan.auxiliary_tensors]
    _set_neutral_values(plan, auxiliary)
    return auxiliary


def _set_neutral_values(plan: ParameterPlan, auxiliary: Sequence[torch.Tensor]) -> None:
    """Set auxiliary tensors to those of a parameter that is the whole weight by itself."""
    for tensor in auxiliary:
        tensor[...] = plan.spec.update.make_neutral_values(plan.spec.store, plan.payloads[0])


def reset_stale_auxiliary_tensors(plan: ParameterPlan) -> None:
    """Reset the auxiliary tensors of a parameter that was written from outside, before a step."""
    held = plan.payload_version
    if held is None:
        return
    if is_payload_overwritten(plan):
        _set_neutral_values(plan, plan.auxiliary_tensors)
        step = plan.state["step"]
        if held.last_reset_step >= 0 and step - held.last_reset_step <= _MOST_STEPS_BETWEEN_HABITUAL_WRITES:
            warnings.warn(
                "parameters are written between steps, again and again: what auxiliary tensors hold is dropped then, "
                "and with it updates under half a unit in the last place. Write float32 weights by "
                "load_float32_state_dict, or train such parameters in float32 or with weight_update='stochastic'",
                RuntimeWarning,
                stacklevel=find_user_stack_level(),
            )
            held.last_reset_step = WARNED_STEP
        elif held.last_reset_step != WARNED_STEP:
            held.last_reset_step = step
    record_payload_version(plan)


def record_payload_version(plan: ParameterPlan) -> None:
    """Record that the auxiliary tensors belong to the present payload."""
    held = plan.payload_version
    if held is not None:
        held.version = plan.parameter._version


def is_payload_version_current(plan: ParameterPlan) -> bool:
    """Return whether the version of a parameter is the one that its auxiliary tensors were stored beside."""
    held = plan.payload_version
    return held is not None and held.version == plan.parameter._version


def record_loaded_auxiliary_tensors(plan: ParameterPlan, state: Mapping[str, Any]) -> None:
    """Record that auxiliary tensors were loaded or copied, with what the saved state tells of their payload."""
    if plan.payload_version is None:
        return
    held, saved = (PayloadVersion(UNKNOWN_VERSION, plan.payload_version.memory), get_local(state.get(CHECKSUMS_KEY)))
    rows = plan.payloads[0].shape[0] if plan.payloads[0].dim() else 1
    if isinstance(saved, torch.Tensor) and (saved.dtype, saved.shape) == (torch.int64, (rows,)):
        held.checksums = saved.clone()
    plan.record.payload_version = held


def compute_payload_checksums(plan: ParameterPlan) -> torch.Tensor | None:
    """Return one checksum per row that this process holds; None for a parameter without memory."""
    payload = plan.payloads[0]
    if payload.is_meta:
        return None
    if not _has_whole_rows(plan.parameter):
        rows = payload.shape[0] if payload.dim() else 1
        return torch.zeros(rows, dtype=torch.int64, device=payload.device)
    found = compute_row_checksums(payload)
    if plan.spec.scaled:
        found += zlib.crc32(plan.scale.hex().encode())
    return torch.where(found == 0, 1, found)


def has_differing_checksum(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether any row differs whose checksums are both known."""
    return bool(((one.to(other.device) != other) & (one.to(other.device) != 0) & (other != 0)).any())


def _has_whole_rows(parameter: torch.Tensor) -> bool:
    """Return whether each process holds whole rows: replicated, or sharded along the first dimension."""
    if not is_dtensor(parameter):
        return True
    from torch.distributed.tensor import Replicate, Shard

    return all(isinstance(p, Replicate) or (type(p) is Shard and p.dim == 0) for p in parameter.placements)


def wrap_checksums_like_parameter(checksums: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return checksums as they are saved: a DTensor if the parameter is one, so that other processes can read them."""
    if not is_dtensor(parameter):
        return checksums
    from torch.distributed.tensor import DTensor, Replicate

    by_rows = _has_whole_rows(parameter)
    rows, mesh = parameter.shape[0] if parameter.dim() else 1, parameter.device_mesh
    placements = parameter.placements if by_rows else [Replicate()] * mesh.ndim
    checksums = checksums if by_rows else checksums.new_zeros(rows)
    return DTensor.from_local(checksums, mesh, placements, shape=torch.Size([rows]), stride=(1,), run_check=False)


def set_weight(plan: ParameterPlan, value: torch.Tensor) -> None:
    """Set a parameter and its auxiliary tensors to a weight, in units of its scale, as its weight update holds it."""
    parts = [part.contiguous() for part in plan.weight_tensors]
    plan.spec.update.fill(plan.spec.store, parts, value)
    for part, filled in zip(plan.weight_tensors, parts):
        if part is not filled:
            part.copy_(filled)
    record_payload_version(plan)
