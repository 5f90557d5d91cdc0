"""The float32 weight of a parameter and its auxiliary tensors, and writes from outside, which reset the latter.

An auxiliary tensor (a residual, low bits, a master copy) belongs to the payload that it was stored beside. If the
parameter's version counter or address shows a write from outside, the payload is compared with the one that the last
step wrote: with a copy of it if there is one, else by digests (`_payload_digests`). Equal bits are the same weight,
whatever happened to the parameter meanwhile: a perturbation that was taken back, a swap, a write to another parameter
that shares the counter. Else the auxiliary tensors are reset at the elements that differ, or at all elements without a
copy: the float32 value is then what was written.

After such a write a copy of the payload is kept for some steps, so that a clamp or a projection at every step costs no
bit of the elements that it does not change. Files and copies of an optimizer hold that copy, and go on with it. A write
through `.data`, which no counter shows, is detected element by element in the kernel (`fitting` of Kahan). Files and
copies hold checksums of the payload that their auxiliary tensors belong to, because version counters are not saved
(`compute_checksums`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import numpy as np
import torch

from ...kernels import row_checksums
from ._local_tensors import is_dtensor
from ._parameter_plan import ANY_VERSION, MOVED, ParameterPlan, PayloadVersion
from ._payload_digests import compute_digests
from ._tensor_map import TensorMap

STEPS_WITH_COPY = 1000
_WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_restored_versions: TensorMap[tuple[int, int]] = TensorMap()
CHECKSUMS_KEY = "payload_checksums"
# In files and copies: for how many steps a copy of the payload is kept, its scale, and the copy, as bytes; or 0. It is
# one value, and there in every file, because torch.distributed.checkpoint wants in a file whatever a reader has.
COPY_KEY = "payload_copy"
PAYLOAD_KEYS = (CHECKSUMS_KEY, COPY_KEY)
_COPY_HEADER = struct.Struct("<qd")  # steps, scale


def describe_payload(plan: ParameterPlan) -> dict[str, Any]:
    """Return the payload's saved identity beside auxiliary tensors, valid as `read_auxiliary_tensors` are."""
    held, checksums = plan.payload_version, compute_checksums(plan)
    if held is None or checksums is None:
        return {}
    # A write is answered at the next step: what begins then has already begun in the file.
    begins = is_payload_written(plan)
    if not begins and held.payload is None:
        return {CHECKSUMS_KEY: checksums, COPY_KEY: 0}
    memory = plan.payloads[0].contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return {
        CHECKSUMS_KEY: checksums,
        COPY_KEY: _COPY_HEADER.pack(STEPS_WITH_COPY - 1 if begins else held.steps, plan.scale) + memory,
    }


def payload_version_of(parameter: torch.Tensor, part: torch.Tensor, held: PayloadVersion | None) -> PayloadVersion:
    """Return the payload version for a new plan, carried over from the plans before it."""
    memory = part.detach()
    if held is None:
        return PayloadVersion(parameter._version, memory)
    stays = held.memory.data_ptr() == memory.data_ptr() or held.memory.shape != memory.shape
    return replace(held, memory=memory, version=held.version if stays or held.version == ANY_VERSION else MOVED)


def is_payload_written(plan: ParameterPlan) -> bool:
    """Return whether a parameter holds other bits than those that its auxiliary tensors were stored beside.

    Off the CPU, where the answer would have to be waited for, a version that differs counts as other bits.
    """
    held = plan.payload_version
    if held is None:
        return False
    version = plan.parameter._version
    if held.version == version or _restored_versions.get(plan.parameter) == (held.version, version):
        return False
    known = _find_known_payload(plan)
    if known is not None and known.shape == plan.payloads[0].shape:
        now = plan.payloads[0]
        is_waited_for = not now.is_cpu and held.version != ANY_VERSION
        if is_waited_for or known.dtype != now.dtype:
            return True
        return bool((_view_bits(now) != _view_bits(known.to(now.device))).any())
    if held.version == ANY_VERSION:
        rows = None if held.checksums is None else compute_checksums(plan)
        return held.checksums is not None and rows is not None and any_row_differs(held.checksums, rows)
    if held.digests is None or not held.is_under(plan.scale):
        return True
    found = compute_digests(plan.payloads[0], plan.index_map)
    return found is None or not np.array_equal(found, held.digests)


def read_auxiliary_tensors(plan: ParameterPlan) -> Sequence[torch.Tensor]:
    """Return the auxiliary tensors as they are valid for the present payload, without changing them."""
    if not is_payload_written(plan):
        return plan.auxiliary_tensors
    return fit_auxiliary_tensors(plan, plan.payloads[0], _find_known_payload(plan))


def _find_known_payload(plan: ParameterPlan) -> torch.Tensor | None:
    """Return the copy of the payload that the auxiliary tensors belong to, if it is in the present scale."""
    held = plan.payload_version
    if held is None or held.payload is None:
        return None
    return held.payload if held.is_under(plan.scale) else None


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
            record_version(plan)
        return
    _reset_auxiliary_tensors(plan, plan.auxiliary_tensors, plan.payloads[0], _find_known_payload(plan))
    held.steps = STEPS_WITH_COPY
    _record_payload_as(plan, held, None)


def record_version(plan: ParameterPlan) -> None:
    """Record the parameter's version as that of its payload, whose bits are as they were."""
    held = plan.payload_version
    if held is not None:
        held.version = plan.parameter._version


def is_version_current(plan: ParameterPlan) -> bool:
    """Return whether the version of a parameter is the one that its auxiliary tensors were stored beside."""
    held = plan.payload_version
    return held is not None and held.version == plan.parameter._version


def mark_stepped(
    plans: Sequence[ParameterPlan],
    recorded: Sequence[PayloadVersion],
    stepped: Sequence[torch.Tensor],
    digests: list[np.ndarray] | None,
    scales: torch.Tensor | None = None,
) -> None:
    """Record after a step that auxiliary tensors belong to the present payloads, as `record_payload` does for one.

    The steps of the same plans write their digests into the same arrays. Only plain parameters of which no copy is kept
    hold them, so that where all do, only their versions have changed.

    Args:
        recorded: the payload versions of those whose writes are tracked.
        stepped: their tensors.
        digests: of their payloads in the same order, if the step has computed them.
        scales: the same of their scales, if the step has chosen them on their device.
    """
    held_now = [held.digests for held in recorded]
    if digests is not None and len(held_now) == len(plans) and all(map(is_, held_now, digests)):
        for known, tensor in zip(recorded, stepped):
            known.version = tensor._version
        return
    for row, (plan, tensor) in enumerate(zip(plans, stepped)):
        held = plan.payload_version
        if held is None:
            continue
        is_known = held.payload is None and not held.steps and plan.plain
        if is_known and digests is not None:
            held.version, held.digests = tensor._version, digests[row]
        elif is_known and held.digests is None and not tensor.is_cpu and not plan.spec.scaled:
            held.version = tensor._version
        else:
            own = None if digests is None else digests[row].copy()
            record_payload(plan, own, None if scales is None else scales[row])


def record_payload(plan: ParameterPlan, digests: np.ndarray | None = None, scale: torch.Tensor | None = None) -> None:
    """Record that the auxiliary tensors belong to the present payload: the optimizer has written both.

    `digests` are of the payload alone, and `scale` is a copy of its own, if whoever wrote it has them.
    """
    held = plan.payload_version
    if held is None:
        return
    if digests is None:
        digests = compute_digests(plan.payloads[0], plan.index_map)
    _record_payload_as(plan, held, digests, scale)


def _record_payload_as(
    plan: ParameterPlan,
    held: PayloadVersion,
    digests: np.ndarray | None,
    scale: torch.Tensor | None = None,
) -> None:
    held.version, held.digests = plan.parameter._version, digests
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
    held = PayloadVersion(ANY_VERSION, plan.payload_version.memory)
    held.checksums, kept = read_checksums(state.get(CHECKSUMS_KEY), plan), state.get(COPY_KEY)
    plan.record.payload_version = held
    if not isinstance(kept, bytes) or len(kept) < _COPY_HEADER.size:
        return
    held.steps, held.scale = _COPY_HEADER.unpack_from(kept)
    now, memory = plan.payloads[0], bytearray(kept[_COPY_HEADER.size :])
    if memory and len(memory) == now.numel() * now.element_size():
        payload = torch.frombuffer(memory, dtype=torch.uint8).view(now.dtype).view(now.shape).to(now.device)
        found = compute_checksums(plan, payload, float(held.scale))
        # Else it is another process's part of a sharded parameter.
        if held.checksums is None or found is None or not any_row_differs(held.checksums, found):
            held.payload = payload


def note_restored_version(tensor: torch.Tensor, before: int, after: int) -> None:
    """Record that a tensor's content at one version equals that at an earlier one, after a temporary swap."""
    first, last = _restored_versions.get(tensor) or (before, before)
    _restored_versions[tensor] = (first if last == before else before, after)


def _view_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_WORD_DTYPES[x.element_size()])


def compute_checksums(
    plan: ParameterPlan, payload: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor | None:
    """Return one checksum per row that this process holds; None for a parameter without memory.

    They are of a copy of its payload under some scale, if these are given, else of the present one.
    """
    payload = plan.payloads[0] if payload is None else payload
    if payload.is_meta:
        return None
    if not _has_whole_rows(plan.parameter):
        rows = payload.shape[0] if payload.dim() else 1
        return torch.zeros(rows, dtype=torch.int64, device=payload.device)
    found = row_checksums(payload)
    if plan.spec.scaled:
        found += zlib.crc32((plan.scale if scale is None else scale).hex().encode())
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


def read_checksums(saved: object, plan: ParameterPlan) -> torch.Tensor | None:
    """Return the saved checksums of the rows that this process holds; None if the file has none."""
    saved = getattr(saved, "_local_tensor", saved)
    rows = plan.payloads[0].shape[0] if plan.payloads[0].dim() else 1
    if isinstance(saved, torch.Tensor) and saved.dtype == torch.int64 and saved.shape == (rows,):
        return saved.clone()
    return None


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
