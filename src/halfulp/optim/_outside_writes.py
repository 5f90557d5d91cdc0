"""Writes to a parameter that its optimizer did not make, and what becomes of the companions beside it.

A companion belongs to the payload that it was stored with. Where the parameter's version counter or address shows that
somebody else has written it since, the elements that differ from what was there lose their companions, and all lose
them where what was there is not known: their float32 value is then what the writer wrote. After such a write the
payload is kept for some steps, so that a clamp or a projection at every step costs no bit of the elements that it
leaves alone. A write through `.data`, which no counter sees, is judged element by element in the kernel
(`_companion_fit`). Files and copies hold checksums of the payload that their companions belong to, as no counter goes
along (`_checksum`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ._checksum import as_loaded, checksums_of, differ
from ._parameter_plan import ANY, MOVED, Agreement, Slot
from ._tensor_map import TensorMap

WATCHED_STEPS = 1000
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_restored: TensorMap[tuple[int, int]] = TensorMap()


CHECKSUMS = "payload_checksums"


def agreement_of(
    parameter: torch.Tensor, part: torch.Tensor, known: Slot | None, checksums: torch.Tensor | None = None
) -> Agreement:
    """The agreement of a parameter that is looked at, from what was known of it.

    Args:
        parameter: as the user holds it.
        part: its memory.
        known: what was known.
        checksums: of the payload that its companions go with, where they are a copy that has not been looked at.
    """
    memory, held = part.detach(), None if known is None else known.agreement
    if held is None:
        version = parameter._version if checksums is None else ANY
        return Agreement(version, memory, checksums=checksums)
    old = held.memory
    if held.version in (ANY, MOVED) or old.data_ptr() == memory.data_ptr() or old.shape != memory.shape:
        return replace(held, memory=memory)
    if held.version == parameter._version:  # not written in place before it moved: the old memory tells
        return Agreement(MOVED, memory, old.clone() if held.steps else old, held.steps, held.scale)
    return Agreement(MOVED, memory, held.payload, held.steps, held.scale)


def is_written(slot: Slot) -> bool:
    """Whether somebody else has written a parameter since it agreed with its companions."""
    held = slot.agreement
    if held is None:
        return False
    if held.version == ANY:
        return held.checksums is not None and differ(held.checksums, checksums_of(slot))
    parameter = slot.parameter
    now = parameter._version
    return held.version != now and _restored.get(parameter) != (held.version, now)


def companions_now(slot: Slot) -> Sequence[torch.Tensor]:
    """The companions as they count now; nothing is changed."""
    return companions_beside(slot, slot.payloads[0], _known(slot)) if is_written(slot) else slot.companions


def _known(slot: Slot) -> torch.Tensor | None:
    """The payload that the companions held were stored with, where it stands for the same weights still."""
    held = slot.agreement
    return held.payload if held.scale == _scale(slot) else None


def companions_beside(slot: Slot, payload: torch.Tensor, known: torch.Tensor | None) -> list[torch.Tensor]:
    """Companions for a payload: those that are held where it equals a known one, and such as add nothing elsewhere."""
    companions = [companion.clone() for companion in slot.companions]
    _let_go(slot, companions, payload, known)
    return companions


def _let_go(slot: Slot, companions: Sequence[torch.Tensor], payload: torch.Tensor, known: torch.Tensor | None) -> None:
    """Let companions in place add nothing to a payload where it differs from a known one."""
    update, store = slot.kind.update, slot.kind.store
    if known is None or known.dtype != payload.dtype or known.shape != payload.shape:
        for companion in companions:
            companion[...] = update.alone(store, payload)
        return
    differs = _bits(payload) != _bits(known.to(payload.device))
    if differs.is_cpu and not differs.any():  # another device would have to be waited for
        return
    for companion in companions:
        companion.copy_(torch.where(differs, update.alone(store, payload), companion))


def settle(slot: Slot) -> None:
    """Let the companions that do not belong to the parameter any more go, before a step."""
    if not is_written(slot):
        return
    _let_go(slot, slot.companions, slot.payloads[0], _known(slot))
    held = slot.agreement
    if held.version != MOVED:  # of the next move the old memory tells; a write in place leaves no trace
        held.payload = torch.empty_like(held.memory) if held.payload is None else held.payload
        held.steps = WATCHED_STEPS
    agree(slot)


def agree(slot: Slot) -> None:
    """Parameter and companions belong together now: the optimizer has written them."""
    held = slot.agreement
    if held is None:
        return
    held.version, held.scale = slot.parameter._version, _scale(slot)
    if held.steps:
        held.steps -= 1
        held.payload.copy_(held.memory)
    else:
        held.payload = None


def loaded(slot: Slot, checksums: object) -> None:
    """Companions have come from a file, and belong to the payload of which it has checksums."""
    if slot.agreement is not None:
        slot.agreement = Agreement(ANY, slot.agreement.memory, checksums=as_loaded(checksums, slot))


def note_restored(tensor: torch.Tensor, before: int, after: int) -> None:
    """Say that a tensor holds at one version of its counter what it held at another: a swap has ended."""
    first, last = _restored.get(tensor, (before, before))
    _restored[tensor] = (first if last == before else before, after)


def _scale(slot: Slot) -> float:
    return slot.parameter.scale.item() if slot.kind.scaled else 1.0


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_WORDS[x.element_size()])
