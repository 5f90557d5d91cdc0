"""The float32 weight of a parameter and its auxiliary tensors, and writes from outside, which reset the latter.

An auxiliary tensor (a residual, low bits, a master copy) belongs to the payload that it was stored beside. If the
parameter's version counter or address shows a write from outside, it is reset, and a copy of the payload is kept until
no such write has come for some steps: only elements that differ from the copy are then reset, so that a clamp or a
projection at every step costs no bit of what it does not change, and bits that are put back are the same weight. A
write through `.data`, which no counter shows, is detected element by element in the kernel (`fitting` of Kahan). Files
and copies hold checksums of the payload that their auxiliary tensors belong to, because version counters are not saved.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...kernels import row_checksums, same_bits
from ._local_tensors import get_local, is_dtensor
from ._parameter_plan import ANY_VERSION, MOVED, ParameterPlan, PayloadVersion
from ._tensor_map import TensorMap

STEPS_WITH_COPY = 1000
_WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_restored_versions: TensorMap[tuple[int, int]] = TensorMap()
CHECKSUMS_KEY = "payload_checksums"
# In files and copies: for how many more steps a copy of the payload is kept. It is there in every file, because
# torch.distributed.checkpoint wants in a file whatever a reader has.
COPY_KEY = "payload_copy_steps"
PAYLOAD_KEYS = (CHECKSUMS_KEY, COPY_KEY)


def describe_payload(plan: ParameterPlan) -> dict[str, Any]:
    """Return the payload's saved identity beside auxiliary tensors, valid as `read_auxiliary_tensors` are."""
    held, checksums = plan.payload_version, compute_checksums(plan)
    if held is None or checksums is None:
        return {}
    # A write is answered at the next step: the copy that begins then has already begun in the file.
    return {CHECKSUMS_KEY: checksums, COPY_KEY: STEPS_WITH_COPY - 1 if is_payload_written(plan) else held.steps}


def renew_payload_version(parameter: torch.Tensor, part: torch.Tensor, held: PayloadVersion | None) -> PayloadVersion:
    """Return the payload version for a new plan, carried over from the plans before it."""
    memory = part.detach()
    if held is None:
        return PayloadVersion(parameter._version, memory)
    before = held.memory
    is_same = before.data_ptr() == memory.data_ptr() or before.shape != memory.shape or held.version == ANY_VERSION
    if not is_same and before.dtype == memory.dtype and not (before.is_meta or memory.is_meta):
        is_freed = before.untyped_storage().nbytes() < before.nbytes  # by an offloader
        is_same = not is_freed and same_bits(before.to(memory.device), memory)
    return replace(held, memory=memory, version=held.version if is_same else MOVED)


def is_payload_written(plan: ParameterPlan) -> bool:
    """Return whether a parameter holds other bits than those that its auxiliary tensors were stored beside.

    Off the CPU, where the answer would have to be waited for, a version that differs counts as other bits.
    """
    held = plan.payload_version
    if held is None:
        return False
    if _is_version_known(plan, held):
        return False
    known, now = _find_known_payload(plan), plan.payloads[0]
    if known is not None and (known.dtype, known.shape) == (now.dtype, now.shape):
        is_waited_for = not now.is_cpu and held.version != ANY_VERSION
        return is_waited_for or bool((_view_bits(now) != _view_bits(known.to(now.device))).any())
    if held.version != ANY_VERSION:
        return True
    rows = None if held.checksums is None else compute_checksums(plan)
    return held.checksums is not None and rows is not None and any_row_differs(held.checksums, rows)


def _is_version_known(plan: ParameterPlan, held: PayloadVersion) -> bool:
    """Return whether the parameter's version tells that its bits are as they were."""
    version = plan.parameter._version
    return held.version == version or _restored_versions.get(plan.parameter) == (held.version, version)


def read_auxiliary_tensors(plan: ParameterPlan) -> Sequence[torch.Tensor]:
    """Return the auxiliary tensors as they are valid for the present payload, without changing them."""
    if not is_payload_written(plan):
        return plan.auxiliary_tensors
    return fit_auxiliary_tensors(plan, plan.payloads[0], _find_known_payload(plan))


def _find_known_payload(plan: ParameterPlan) -> torch.Tensor | None:
    """Return the copy of the payload that the auxiliary tensors belong to, if it is in the present scale."""
    held = plan.payload_version
    return None if held is None or held.payload is None or float(held.scale) != plan.scale else held.payload


def fit_auxiliary_tensors(plan: ParameterPlan, payload: torch.Tensor, known: torch.Tensor | None) -> list[torch.Tensor]:
    """Return auxiliary tensors for a payload: the stored ones where it equals a known payload, else neutral ones."""
    auxiliary = [tensor.clone() for tensor in plan.auxiliary_tensors]
    _reset_auxiliary_tensors(plan, auxiliary, payload, known)
    return auxiliary


def _reset_auxiliary_tensors(
    plan: ParameterPlan, auxiliary: Sequence[torch.Tensor], payload: torch.Tensor, known: torch.Tensor | None
) -> None:
    """Make auxiliary tensors neutral, in place, where a payload differs from a known one."""
    update, store = plan.spec.update, plan.spec.store
    if known is None or known.dtype != payload.dtype or known.shape != payload.shape:
        for tensor in auxiliary:
            tensor[...] = update.neutral(store, payload)
        return
    differs = _view_bits(payload) != _view_bits(known.to(payload.device))
    if differs.is_cpu and not differs.any():  # another device would have to be waited for
        return
    for tensor in auxiliary:
        tensor.copy_(torch.where(differs, update.neutral(store, payload), tensor))


def reset_if_stale(plan: ParameterPlan) -> None:
    """Reset the auxiliary tensors of elements that were written from outside, before a step."""
    held = plan.payload_version
    if held is None:
        return
    if not is_payload_written(plan):
        if held.version != ANY_VERSION:
            if held.payload is not None and not _is_version_known(plan, held):
                held.steps = STEPS_WITH_COPY  # as such writes go on
            record_version(plan)
        return
    _reset_auxiliary_tensors(plan, plan.auxiliary_tensors, plan.payloads[0], _find_known_payload(plan))
    held.steps = STEPS_WITH_COPY
    record_payload(plan)


def record_version(plan: ParameterPlan) -> None:
    """Record the parameter's version as that of its payload, whose bits are as they were."""
    held = plan.payload_version
    if held is not None:
        held.version = plan.parameter._version


def is_version_current(plan: ParameterPlan) -> bool:
    """Return whether the version of a parameter is the one that its auxiliary tensors were stored beside."""
    held = plan.payload_version
    return held is not None and held.version == plan.parameter._version


def record_payload(plan: ParameterPlan, scale: torch.Tensor | None = None) -> None:
    """Record that the auxiliary tensors belong to the present payload: the optimizer has written both.

    `scale` is a copy of the payload's scale, if whoever wrote it has one.
    """
    held = plan.payload_version
    if held is None:
        return
    held.version = plan.parameter._version
    held.scale = plan.scale_to_keep if scale is None else scale
    if held.steps:
        held.steps -= 1
        held.payload = held.memory.clone() if held.payload is None else held.payload.copy_(held.memory)
    else:
        held.payload = None


def record_loaded_payload(plan: ParameterPlan, state: Mapping[str, Any]) -> None:
    """Record that auxiliary tensors were loaded or copied, with what the saved state tells of their payload."""
    if plan.payload_version is None:
        return
    held = PayloadVersion(ANY_VERSION, plan.payload_version.memory, scale=plan.scale_to_keep)
    saved, steps = get_local(state.get(CHECKSUMS_KEY)), state.get(COPY_KEY)
    rows = plan.payloads[0].shape[0] if plan.payloads[0].dim() else 1
    if isinstance(saved, torch.Tensor) and (saved.dtype, saved.shape) == (torch.int64, (rows,)):
        held.checksums = saved.clone()
    plan.record.payload_version = held
    held.steps = steps if isinstance(steps, int) and 0 <= steps < STEPS_WITH_COPY else 0
    # Else the model is loaded later, or no checksum tells.
    if held.steps and held.checksums is not None and bool(held.checksums.all()) and not is_payload_written(plan):
        held.payload = plan.payloads[0].clone()


def note_restored_version(tensor: torch.Tensor, before: int, after: int) -> None:
    """Record that a tensor's content at one version equals that at an earlier one, after a temporary swap."""
    first, last = _restored_versions.get(tensor) or (before, before)
    _restored_versions[tensor] = (first if last == before else before, after)


def _view_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_WORD_DTYPES[x.element_size()])


def compute_checksums(plan: ParameterPlan) -> torch.Tensor | None:
    """Return one checksum per row that this process holds; None for a parameter without memory."""
    payload = plan.payloads[0]
    if payload.is_meta:
        return None
    if not _has_whole_rows(plan.parameter):
        rows = payload.shape[0] if payload.dim() else 1
        return torch.zeros(rows, dtype=torch.int64, device=payload.device)
    found = row_checksums(payload)
    if plan.spec.scaled:
        found += zlib.crc32(plan.scale.hex().encode())
    return torch.where(found == 0, 1, found)


def any_row_differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether any row differs whose checksums are both known."""
    return bool(((one.to(other.device) != other) & (one.to(other.device) != 0) & (other != 0)).any())


def _has_whole_rows(parameter: torch.Tensor) -> bool:
    """Return whether each process holds whole rows: replicated, or sharded along the first dimension."""
    if not is_dtensor(parameter):
        return True
    from torch.distributed.tensor import Replicate, Shard

    return all(isinstance(p, Replicate) or (type(p) is Shard and p.dim == 0) for p in parameter.placements)


def place_checksums(checksums: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
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
    """Set a parameter and its auxiliary tensors to a weight, in units of its scale, as its weight update holds it.

    What was written from outside until now is answered first: a file saved before would say that it has been.
    """
    reset_if_stale(plan)
    parts = [part.contiguous() for part in plan.parts]
    plan.spec.update.fill(plan.spec.store, parts, value)
    for part, filled in zip(plan.parts, parts):
        if part is not filled:
            part.copy_(filled)
    record_payload(plan)
