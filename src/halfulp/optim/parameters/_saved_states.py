"""Saved states of any storage as float32 values: floats, two bfloat16, scaled payloads, 8-bit codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..rules._update_rule import StateSlot
from ..states._int4_blocks import Int4Blocks
from ..states._int8_blocks import CODEC_VERSION, Int8Blocks, scale_shape
from ._local_tensors import local

ABSENT = object()
BLOCKS = tuple(1 << power for power in range(4, 11))


def codec_versions(state: Mapping[str, object]) -> dict[str, int]:
    """Return the version of the codes of every 8-bit state, under the state's own name.

    A reader that knows no codes finds a number where it wants a tensor, and stops, instead of taking codes for moments
    or starting without them.
    """
    return {name.removesuffix("_codes"): CODEC_VERSION for name in state if name.endswith("_codes")}


def check_version(name: str, state: Mapping[str, object]) -> None:
    """Refuse codes of an unknown version.

    Raises:
        ValueError: another version than this one.
    """
    version = state.get(name)
    if f"{name}_codes" in state and version not in (None, CODEC_VERSION):
        raise ValueError(
            f"saved state {name!r} has 8-bit codes of version {version!r}, known is {CODEC_VERSION}: load it with the "
            "halfulp that saved it, into an optimizer with state_dtype=torch.float32, and save that"
        )


def block_of(codes: torch.Tensor, scale: torch.Tensor, among: tuple[int, ...] = BLOCKS) -> int:
    """Return the block length of saved codes and scales.

    Raises:
        ValueError: no length fits the shapes.
    """
    codes, scale = local(codes), local(scale)
    for block in among:
        if scale_shape(codes.shape, block) == scale.shape:
            return block
    raise ValueError(
        f"codes of shape {tuple(codes.shape)} have scales of shape {tuple(scale.shape)}, which no length of blocks "
        f"{BLOCKS} gives: the file is damaged"
    )


def packed_block_of(packed: torch.Tensor, scale: torch.Tensor) -> int:
    """Return the block length of saved bytes of two codes and scales; raise ValueError if no length fits."""
    return 2 * block_of(packed, scale, tuple(block // 2 for block in BLOCKS))


def saved_tensor(state: Mapping[str, Any], name: str) -> Any:
    """Return the tensor of a saved state: numbers, or codes of 8 or 4 bits; `ABSENT` without."""
    found = (state.get(f"{name}{form}", ABSENT) for form in ("_codes", "_packed", ""))
    return next((given for given in found if given is not ABSENT), ABSENT)


def saved_value(given: torch.Tensor, state: Mapping[str, Any], slot: StateSlot) -> torch.Tensor:
    """Return a saved state as float32.

    Args:
        given: its tensor, or its codes.
        state: all that was saved of the parameter.
        slot: which of the rule's states it is.

    Raises:
        ValueError: dtypes or shapes that do not belong together, or codes of an unknown version.
    """
    scale, residual = (local(state.get(f"{slot.name}_{part}")) for part in ("scale", "residual"))
    if f"{slot.name}_codes" in state:
        check_version(slot.name, state)
        codes = torch.uint8 if slot.degree == 2 else torch.int8
        if not isinstance(scale, torch.Tensor) or (given.dtype, scale.dtype) != (codes, torch.bfloat16):
            raise ValueError(
                f"saved state {slot.name!r} has codes in {given.dtype} and scales in {getattr(scale, 'dtype', None)}, "
                f"wanted are {codes} and torch.bfloat16: the file is damaged"
            )
        return Int8Blocks(block_of(given, scale), slot.degree == 2).decode([given, scale])
    if f"{slot.name}_packed" in state:
        if not isinstance(scale, torch.Tensor) or (given.dtype, scale.dtype) != (torch.uint8, torch.float32):
            raise ValueError(
                f"saved state {slot.name!r} has 4-bit codes in {given.dtype} and scales in "
                f"{getattr(scale, 'dtype', None)}, wanted are torch.uint8 and torch.float32: the file is damaged"
            )
        return Int4Blocks(packed_block_of(given, scale), slot.degree == 2).decode([given, scale])
    if not given.is_floating_point():
        raise ValueError(f"saved state {slot.name!r} is {given.dtype} without a scale: the file is damaged")
    if scale is not None:
        value = given.float() * scale.to(given.device)
        return value * value if slot.degree == 2 else value
    if residual is None:
        return given.float()
    if residual.shape != given.shape:
        raise ValueError(f"saved state {slot.name!r} and its residual have other shapes: the file is damaged")
    return given.float() + residual.float()
