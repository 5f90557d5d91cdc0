"""Writes to a parameter from outside its optimizer, and how they reset the auxiliary tensors beside it.

An auxiliary tensor (a residual, low bits, a master copy) belongs to the payload that it was stored beside. If the
parameter's version counter or address shows a write from outside, the auxiliary tensors are reset at the elements that
differ from that payload, or at all elements if the payload is not known: the float32 value is then what was written.
After such a write a copy of the payload is kept for some steps, so that a clamp or a projection at every step costs no
bit of the elements that it does not change. A write through `.data`, which no counter shows, is detected element by
element in the kernel (`_residual_bound`). Files and copies hold checksums of the payload that their auxiliary tensors
belong to, because version counters are not saved (`_checksum`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ._checksums import any_row_differs, checksums_from_saved, checksums_of
from ._parameter_plan import ANY_VERSION, MOVED, ParameterPlan, PayloadVersion
from ._tensor_map import TensorMap

WATCHED_STEPS = 1000
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_restored: TensorMap[tuple[int, int]] = TensorMap()
CHECKSUMS = "payload_checksums"


def payload_version_of(
    parameter: torch.Tensor, part: torch.Tensor, held: PayloadVersion | None, checksums: torch.Tensor | None = None
) -> PayloadVersion:
    """Return the payload version for a new plan, carried over from the plans before it.

    Args:
        parameter: as the user holds it.
        part: its memory.
        held: as it was recorded last, None if there is none.
        checksums: of the payload that the auxiliary tensors belong to, if these are a copy without a plan yet.
    """
    memory = part.detach()
    if held is None:
        version = parameter._version if checksums is None else ANY_VERSION
        return PayloadVersion(version, memory, checksums=checksums)
    old = held.memory
    if held.version in (ANY_VERSION, MOVED) or old.data_ptr() == memory.data_ptr() or old.shape != memory.shape:
        return replace(held, memory=memory)
    if held.version == parameter._version:  # not written in place before it moved: the old memory tells
        return PayloadVersion(MOVED, memory, old.clone() if held.steps else old, held.steps, held.scale)
    return PayloadVersion(MOVED, memory, held.payload, held.steps, held.scale)


def is_written(plan: ParameterPlan) -> bool:
    """Return whether a parameter was written from outside since its auxiliary tensors were stored."""
    held = plan.payload_version
    if held is None:
        return False
    if held.version == ANY_VERSION:
        now = None if held.checksums is None else checksums_of(plan)
        return held.checksums is not None and now is not None and any_row_differs(held.checksums, now)
    parameter = plan.parameter
    version = parameter._version
    return held.version != version and _restored.get(parameter) != (held.version, version)


def current_auxiliary_tensors(plan: ParameterPlan) -> Sequence[torch.Tensor]:
    """Return the auxiliary tensors as they are valid for the present payload, without changing them."""
    if not is_written(plan):
        return plan.auxiliary_tensors
    return auxiliary_tensors_beside(plan, plan.payloads[0], _known_payload(plan))


def _known_payload(plan: ParameterPlan) -> torch.Tensor | None:
    """Return the copy of the payload that the auxiliary tensors belong to, if it is in the present scale."""
    held = plan.payload_version
    return held.payload if held is not None and held.scale == plan.scale else None


def auxiliary_tensors_beside(
    plan: ParameterPlan, payload: torch.Tensor, known: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return auxiliary tensors for a payload: the stored ones where it equals a known payload, else neutral ones."""
    auxiliary = [tensor.clone() for tensor in plan.auxiliary_tensors]
    _reset(plan, auxiliary, payload, known)
    return auxiliary


def _reset(
    plan: ParameterPlan, auxiliary: Sequence[torch.Tensor], payload: torch.Tensor, known: torch.Tensor | None
) -> None:
    """Make auxiliary tensors neutral, in place, where a payload differs from a known one."""
    update, store = plan.spec.update, plan.spec.store
    if known is None or known.dtype != payload.dtype or known.shape != payload.shape:
        for tensor in auxiliary:
            tensor[...] = update.neutral(store, payload)
        return
    differs = _bits(payload) != _bits(known.to(payload.device))
    if differs.is_cpu and not differs.any():  # another device would have to be waited for
        return
    for tensor in auxiliary:
        tensor.copy_(torch.where(differs, update.neutral(store, payload), tensor))


def drop_stale(plan: ParameterPlan) -> None:
    """Reset the auxiliary tensors of elements that were written from outside, before a step."""
    held = plan.payload_version
    if held is None or not is_written(plan):
        return
    _reset(plan, plan.auxiliary_tensors, plan.payloads[0], _known_payload(plan))
    if held.version != MOVED:  # after a move the old memory holds the payload; after a write in place nothing does
        held.payload = torch.empty_like(held.memory) if held.payload is None else held.payload
        held.steps = WATCHED_STEPS
    mark_current(plan)


def mark_current(plan: ParameterPlan) -> None:
    """Record that the auxiliary tensors belong to the present payload: the optimizer has written both."""
    held = plan.payload_version
    if held is None:
        return
    held.version, held.scale = plan.parameter._version, plan.scale
    if held.steps and held.payload is not None:
        held.steps -= 1
        held.payload.copy_(held.memory)
    else:
        held.payload = None


def mark_loaded(plan: ParameterPlan, checksums: object) -> None:
    """Record that auxiliary tensors were loaded, and the checksums of the payload that they belong to."""
    if plan.payload_version is not None:
        memory = plan.payload_version.memory
        plan.record.payload_version = PayloadVersion(
            ANY_VERSION, memory, checksums=checksums_from_saved(checksums, plan)
        )


def note_restored(tensor: torch.Tensor, before: int, after: int) -> None:
    """Record that a tensor's content at one version equals that at an earlier one, after a temporary swap."""
    first, last = _restored.get(tensor, (before, before))
    _restored[tensor] = (first if last == before else before, after)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_WORDS[x.element_size()])
