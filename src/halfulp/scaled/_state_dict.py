"""Scaled parameters in a state_dict: the payload, and its scale beside it as a plain tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..tensors._companions import Layout, check_version, register
from . import _powers
from ._form import LOGICALS, STORAGES, decoded, encoded
from ._scaled_tensor import ScaledTensor, wrap

# Layout of the entries below; a file of another layout is refused.
VERSION = 1
_SUFFIX = re.compile(r"\.scale$")


def plain_state_dict(state_dict: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A scaled model's state_dict for a plain model: every payload times its scale, rounded once.

    Args:
        state_dict: from `state_dict()`, torch.load or safetensors.
        dtype: of what was payload and scale; entries that were none stay as they are.

    Raises:
        ValueError: a scale that is no power of two, or without its payload, or another layout.

    >>> from halfulp.scaled import scalify
    >>> layer = torch.nn.Linear(3, 2)
    >>> layer.load_state_dict(plain_state_dict(scalify(torch.nn.Linear(3, 2)).state_dict()))
    <All keys matched successfully>
    """
    for metadata in getattr(state_dict, "_metadata", {}).values():
        check_version(metadata)
    scales = {name for name in state_dict if _is_scale(state_dict, name)}
    found = {name: _gathered(state_dict, name, torch.float32) for name in state_dict if name not in scales}
    return {name: decoded(x, dtype) if isinstance(x, ScaledTensor) else state_dict[name] for name, x in found.items()}


def _is_scale(state_dict: Mapping, name: str) -> bool:
    """Whether an entry is the scale of the one beside it; parameters may be called scale, too."""
    if not _SUFFIX.search(name) or not isinstance(state_dict[name], Tensor) or state_dict[name].dim():
        return False
    return name.removesuffix(".scale") in state_dict


def _entries(name: str, value: ScaledTensor) -> dict[str, Tensor]:
    return {name: value._payload, f"{name}.scale": value._scale}


def _fitting(state_dict: Mapping, name: str, parameter: ScaledTensor) -> ScaledTensor | None:
    """A parameter's entries in its own storage; a plain tensor is encoded; None where the file has none."""
    value = _gathered(state_dict, name, parameter.dtype)
    if value is None:
        return None
    storage = parameter._payload.dtype
    if isinstance(value, ScaledTensor) and value._payload.dtype == storage:
        return value
    try:
        plain = decoded(value, torch.float32) if isinstance(value, ScaledTensor) else value
        if plain.dtype not in LOGICALS:
            raise ValueError(f"it is {plain.dtype} in the file, and payloads are encoded from floating tensors")
        return encoded(plain.detach(), storage, dtype=parameter.dtype)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


def _gathered(state_dict: Mapping, name: str, dtype: torch.dtype) -> Any:
    """Both entries of one parameter as a tensor; the entry itself where it has no scale."""
    first, scale = state_dict.get(name), state_dict.get(f"{name}.scale")
    if not isinstance(first, Tensor) or isinstance(first, ScaledTensor):
        if first is None and scale is not None:
            raise ValueError(f"the file has '{name}.scale' and not {name!r} itself: it is damaged")
        return first
    if not isinstance(scale, Tensor):
        return first
    if first.dtype not in STORAGES:
        raise ValueError(f"{name!r} is {first.dtype} in the file: payloads are {', '.join(map(str, STORAGES))}")
    try:
        return wrap(first.detach(), _powers.as_scale(scale.detach(), first.device), dtype)
    except ValueError as error:
        raise ValueError(f"'{name}.scale': {error}; the file is damaged") from None


def _copy(parameter: ScaledTensor, value: ScaledTensor) -> None:
    """The same payload under the same scale, bit for bit."""
    with torch.no_grad():
        parameter._payload.copy_(value._payload)
        parameter._scale.copy_(value._scale)


register(
    Layout(
        ScaledTensor,
        key="halfulp_scaled",
        version=VERSION,
        what="scaled tensors",
        plain="plain_state_dict",
        suffix=_SUFFIX,
        entries=_entries,
        fitting=_fitting,
        copy=_copy,
    )
)
