"""Multi-component parameters in a state_dict: one entry for each component and the scale."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import PRECISION
from ..subclass.models._state_dict import StateDictLayout, check_state_dict, check_version, register
from ._mctensor import MCTensor, decoded, wrap

# Layout of the entries below; a file of a later layout is refused. In layout 1 `weight` was without `weight.scale`.
VERSION = 2
_SUFFIX = re.compile(r"\.(component_[1-3]|component_scale|scale)$")
_SCALE = "component_scale"


def plain_state_dict(state_dict: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A multi-component model's state_dict for a plain model: every sum of components as one tensor, rounded once.

    Args:
        state_dict: from `state_dict()`, torch.load or safetensors.
        dtype: of what was a sum; entries that were none stay as they are.

    Raises:
        TypeError: no mapping, such as a model instead of its state_dict.
        ValueError: a component without its first one, or another layout.

    >>> import torch
    >>> from halfulp.mctensor._convert_model import multicomponent
    >>> layer = torch.nn.Linear(3, 2)
    >>> saved = multicomponent(torch.nn.Linear(3, 2), dtype=torch.bfloat16).state_dict()
    >>> layer.load_state_dict(plain_state_dict(saved))
    <All keys matched successfully>
    """
    check_state_dict(state_dict, "plain_state_dict")
    for metadata in getattr(state_dict, "_metadata", {}).values():
        check_version(metadata)
    bases = {_SUFFIX.sub("", name) for name in state_dict if _SUFFIX.search(name)}
    bases = {base for base in bases if f"{base}.payload" not in state_dict}  # the scale is an older scaled tensor's
    plain = {}
    for name, value in state_dict.items():
        base = _SUFFIX.sub("", name)
        if base not in bases:
            plain[name] = value
        elif name == base:
            whole = _from_entries(state_dict, base)
            assert whole is not None  # `name` is one of its entries
            plain[name] = decoded(whole, dtype)
    for base in bases - plain.keys():
        _from_entries(state_dict, base)
    return plain


def _entries(name: str, value: MCTensor) -> dict[str, Tensor]:
    """Return the entries of a parameter: under its own name the leading component times the scale, for any loader."""
    entries = {name: _leading(value)}
    entries |= {f"{name}.component_{i}": part for i, part in enumerate(value._parts) if i}
    return entries if value._scale is None else entries | {f"{name}.{_SCALE}": value._scale}


def _leading(x: MCTensor) -> Tensor:
    """Return the leading component; times a scale in float32, or in float64 where float32 would lose something."""
    first = x._parts[0]
    if x._scale is None:
        return first
    wide = first.double() * x._scale.double()
    values = wide.float()
    exact = first.dtype != torch.float64 and (first.is_meta or bool(((values == wide) | wide.isnan()).all()))
    return values if exact else wide


def _copy(parameter: MCTensor, value: MCTensor) -> None:
    """Copy components and scale of `value` into `parameter`, bit for bit."""
    with torch.no_grad():
        for target, part in zip(parameter._parts, value._parts, strict=True):
            target.copy_(part)
        assert (parameter._scale is None) == (value._scale is None)
        if parameter._scale is not None and value._scale is not None:
            parameter._scale.copy_(value._scale)


def _fitting(state_dict: Mapping[str, Any], name: str, parameter: MCTensor) -> MCTensor | None:
    """Return a parameter's entries as an MCTensor of its own dtype and components; None where the file has none.

    Raises:
        ValueError: they hold more digits than the parameter, or are of another layout.
    """
    value = _from_entries(state_dict, name, parameter.dtype)
    if value is None:
        return None
    count, own = len(value._parts), len(parameter._parts)
    holds, held = own * PRECISION[parameter.dtype], count * PRECISION[value.dtype]
    if count > 1 and held > holds:
        raise ValueError(
            f"{name!r} has {count} components of {value.dtype} in the file and {own} of {parameter.dtype} in the "
            f"model, which would lose digits: hu.multicomponent(model, components={count}, dtype={value.dtype}) first, "
            "or load hu.mctensor.plain_state_dict(state_dict)"
        )
    scaled = parameter._scale is not None
    if (count, value.dtype, value._scale is not None) == (own, parameter.dtype, scaled):
        parts = tuple(_in_own_memory(part) for part in value._parts) if scaled else value._parts
        return wrap(parts, value._scale, parameter._gradients)
    scale = "auto" if scaled else "none"
    return MCTensor.encode(value, own, parameter.dtype, scale, gradients=parameter._gradients)


def _in_own_memory(part: Tensor) -> Tensor:
    """Return a component in memory of its own: a change of scale rewrites all of a component's memory."""
    return part if part.untyped_storage().nbytes() == part.numel() * part.element_size() else part.clone()


def _from_entries(state_dict: Mapping[str, Any], name: str, dtype: torch.dtype | None = None) -> MCTensor | None:
    """Return all entries of one parameter as an MCTensor; dtype: of a single component stored beside its scale."""
    beside = {
        match[1]: value
        for entry, value in state_dict.items()
        if (match := _SUFFIX.search(entry)) and _SUFFIX.sub("", entry) == name
    }
    first = state_dict.get(name)
    if first is None:
        if beside:
            raise ValueError(f"the file has {sorted(beside)} of {name!r} and not {name!r} itself: it is damaged")
        return None
    if isinstance(first, MCTensor):
        return first.detach()
    names = [f"component_{i}" for i in range(1, 1 + sum(bool(re.match(r"component_\d", part)) for part in beside))]
    rest = [beside.get(part) for part in names]
    scale = beside.get("scale")
    if _SCALE in beside:
        first, scale = _unscaled(name, first, beside[_SCALE], rest[0].dtype if rest and rest[0] is not None else dtype)
    parts = [part for part in (first, *rest) if isinstance(part, Tensor)]
    if len(parts) <= len(rest) or len({(part.shape, part.dtype) for part in parts}) != 1:
        raise ValueError(f"the components of {name!r} are not all there, or of several shapes: the file is damaged")
    if parts[0].dtype not in PRECISION:
        raise ValueError(f"{name!r} is {parts[0].dtype} in the file: components are floating point")
    return wrap(tuple(part.detach() for part in parts), scale, "first")


def _unscaled(name: str, first: Tensor, scale: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Return the leading component divided by its scale, and the scale; unchanged where it was stored alone."""
    if dtype is None:
        return first, None
    part = (first.detach().double() / scale.double()).to(dtype)
    back = part.double() * scale.double()
    if first.is_meta or bool(((back == first) | (back.isnan() & first.isnan())).all()):
        return part, scale
    raise ValueError(
        f"{name!r} is no {dtype} times {name}.{_SCALE}: it was written without the entries beside it; take these away "
        "to load it as a plain tensor"
    )


register(
    StateDictLayout(
        MCTensor,
        key="halfulp_components",
        version=VERSION,
        what="components",
        plain="plain_state_dict",
        suffix=_SUFFIX,
        older=(1,),
        entries=_entries,
        fitting=_fitting,
        copy=_copy,
    )
)
