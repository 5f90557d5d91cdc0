"""Saved states of any storage as float32 values: floats, two bfloat16, scaled payloads, 8-bit codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..rules._update_rule import StateSlot
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


def block_of(codes: torch.Tensor, scale: torch.Tensor) -> int:
    """Return the block length of saved codes and scales.

    Raises:
        ValueError: no length fits the shapes.
    """
    codes, scale = local(codes), local(scale)
    for block in BLOCKS:
        if scale_shape(codes.shape, block) == scale.shape:
            return block
    raise ValueError(
        f"8-bit codes of shape {tuple(codes.shape)} have scales of shape {tuple(scale.shape)}, which no length of "
        f"blocks {BLOCKS} gives: the file is damaged"
    )


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
    if scale is not None and given.dtype in (torch.int8, torch.uint8):
        return _linear_codes(given, scale, slot)
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


def _linear_codes(codes: torch.Tensor, scale: torch.Tensor, slot: StateSlot) -> torch.Tensor:
    """The first version's values: (code x scale / most), or its square, a scale per block in the order of memory."""
    flat, scale = codes.reshape(-1).float(), scale.reshape(-1).float()
    block = next((n for n in BLOCKS if -(-flat.numel() // n) == scale.numel()), None)
    if block is None:
        raise ValueError(f"saved state {slot.name!r} has {scale.numel()} scales for its codes: the file is damaged")
    root = flat * (scale / (255.0 if slot.degree == 2 else 127.0)).repeat_interleave(block)[: flat.numel()]
    root = root * root if slot.degree == 2 else torch.where(flat == -128, torch.nan, root)
    return root.reshape(codes.shape)
