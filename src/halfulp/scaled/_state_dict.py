"""Scaled parameters in a state_dict: payload and scale as plain tensors beside each other, and back."""

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
_PAYLOAD, _SCALE = ".payload", ".scale"


def plain_state_dict(state_dict: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A scaled model's state_dict for a plain model and other tools: every payload times its scale, rounded once.

    Args:
        state_dict: from `state_dict()`, torch.load or safetensors.
        dtype: of what was payload and scale; entries that were none stay as they are.

    Returns:
        `weight` for every `weight.payload` with `weight.scale`, and the other entries, in the same order.

    Raises:
        ValueError: a scale that is no power of two, a payload of another dtype, a plain entry of the same name, or
            another layout.

    >>> from halfulp.scaled import scalify
    >>> layer = torch.nn.Linear(3, 2)
    >>> layer.load_state_dict(plain_state_dict(scalify(torch.nn.Linear(3, 2)).state_dict()))
    <All keys matched successfully>
    """
    for metadata in getattr(state_dict, "_metadata", {}).values():
        check_version(metadata)
    bases = {base for base in _stems(state_dict, _PAYLOAD) & _stems(state_dict, _SCALE) if _is_pair(state_dict, base)}
    plain = {}
    for name, value in state_dict.items():
        base = name.removesuffix(_PAYLOAD)
        if base != name and base in bases:
            plain[base] = decoded(_gathered(state_dict, base, torch.float32), dtype)
        elif name.removesuffix(_SCALE) not in bases:
            plain[name] = decoded(value, dtype) if isinstance(value, ScaledTensor) else value
    return plain


def _stems(state_dict: Mapping, suffix: str) -> set[str]:
    return {name.removesuffix(suffix) for name in state_dict if name.endswith(suffix)}


def _is_pair(state_dict: Mapping, name: str) -> bool:
    """Whether two entries are a payload and its scale; parameters of one module may be called so, too."""
    pair = state_dict[name + _PAYLOAD], state_dict[name + _SCALE]
    if not all(isinstance(x, Tensor) and not isinstance(x, ScaledTensor) for x in pair):
        return False
    payload, scale = pair
    return payload.dtype in STORAGES and not scale.dim() and scale.dtype == torch.float32 and _is_power(scale)


def _is_power(scale: Tensor) -> bool:
    return scale.is_meta or bool(scale == _powers.round_to_power(scale))


def _entries(name: str, value: ScaledTensor) -> dict[str, Tensor]:
    """Nothing under the name itself, where a plain loader would take a payload for the weight."""
    return {name + _PAYLOAD: value._payload, name + _SCALE: value._scale}


def _fitting(state_dict: Mapping, name: str, parameter: ScaledTensor) -> ScaledTensor | None:
    """A parameter's entries in its own storage; a plain tensor is encoded; None where the file has none."""
    value = _gathered(state_dict, name, parameter.dtype)
    if not isinstance(value, Tensor):
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
    """Both entries of one parameter as a tensor; else the plain entry of its name, or None."""
    names = [name, name + _PAYLOAD, name + _SCALE]
    found = [entry for entry in names if state_dict.get(entry) is not None]
    if found in ([], [name]):
        return state_dict.get(name)
    payload, scale = (state_dict.get(entry) for entry in names[1:])
    if found != names[1:] or not isinstance(payload, Tensor) or not isinstance(scale, Tensor):
        raise ValueError(
            f"of {name!r} the file has {found}: it is damaged; a scaled parameter is both {names[1]!r} and "
            f"{names[2]!r}, or a plain {name!r}"
        )
    if payload.dtype not in STORAGES:
        raise ValueError(f"{names[1]!r} is {payload.dtype} in the file: payloads are {', '.join(map(str, STORAGES))}")
    try:
        return wrap(payload.detach(), _powers.as_scale(scale.detach(), payload.device), dtype)
    except ValueError as error:
        raise ValueError(f"{names[2]!r}: {error}; the file is damaged") from None


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
        suffix=re.compile(r"\.(payload|scale)$"),
        entries=_entries,
        fitting=_fitting,
        copy=_copy,
    )
)
