"""Multi-component parameters in a state_dict: plain tensors beside each other, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ..arithmetic import PRECISION
from ._mctensor import MCTensor, wrap
from ._scale import decoded

# Layout of the entries below; a file of another layout is refused.
VERSION = 1
_VERSION_KEY = "halfulp_components"
_LOADED = "_halfulp_loaded"
_SUFFIX = re.compile(r"\.(component_[1-3]|scale)$")


def plain_state_dict(state_dict: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A multi-component model's state_dict for a plain model: every sum of components as one tensor, rounded once.

    Args:
        state_dict: from `state_dict()`, torch.load or safetensors.
        dtype: of what was a sum; entries that were none stay as they are.

    Raises:
        ValueError: a component without its first one, or another layout.

    >>> import torch
    >>> from halfulp.tensors._model import multicomponent
    >>> layer = torch.nn.Linear(3, 2)
    >>> saved = multicomponent(torch.nn.Linear(3, 2), dtype=torch.bfloat16).state_dict()
    >>> layer.load_state_dict(plain_state_dict(saved))
    <All keys matched successfully>
    """
    for metadata in getattr(state_dict, "_metadata", {}).values():
        _check_version(metadata)
    bases = {_SUFFIX.sub("", name) for name in state_dict if _SUFFIX.search(name)}
    plain = {}
    for name, value in state_dict.items():
        base = _SUFFIX.sub("", name)
        if base not in bases:
            plain[name] = value
        elif name == base:
            plain[name] = decoded(_gathered(state_dict, base), dtype)
    for base in bases - plain.keys():
        _gathered(state_dict, base)
    return plain


def install(module: nn.Module) -> None:
    """Save and load this module's own multi-component parameters as plain tensors."""
    if _save not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_load)
        module.register_load_state_dict_post_hook(_forget_missing)


def install_check(model: nn.Module) -> None:
    """Check a file for all of a model's modules before any of them is loaded."""
    if not any(getattr(hook, "hook", None) is _check_all for hook in model._load_state_dict_pre_hooks.values()):
        model.register_load_state_dict_pre_hook(_check_all)
        model._load_state_dict_pre_hooks.move_to_end(next(reversed(model._load_state_dict_pre_hooks)), last=False)


def remove(module: nn.Module) -> None:
    """Take back what `install` and `install_check` did."""
    own = (_save, _load, _check_all, _forget_missing)
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in own:
                del hooks[key]


def _own(module: nn.Module) -> list[tuple[str, MCTensor]]:
    return [(key, value) for key, value in module._parameters.items() if isinstance(value, MCTensor)]


def _save(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: dict) -> None:
    """Components as entries of their own, each behind its parameter; with keep_vars the parameter itself stays."""
    local_metadata[_VERSION_KEY] = VERSION
    names = {prefix + key: parameter for key, parameter in _own(module)}
    last = []
    # What this module and its children have saved stands last.
    while state_dict and next(reversed(state_dict)).startswith(prefix):
        last.append(state_dict.popitem())
    for name, value in reversed(last):
        whole = name in names and isinstance(value, MCTensor) and value is not names[name]
        state_dict.update(_entries(name, value) if whole else {name: value})


def _entries(name: str, value: MCTensor) -> dict[str, Tensor]:
    entries = {name: value._parts[0]}
    entries |= {f"{name}.component_{i}": part for i, part in enumerate(value._parts) if i}
    return entries if value._scale is None else entries | {f"{name}.scale": value._scale}


def _check_all(module: nn.Module, state_dict: Mapping, prefix: str, local_metadata: dict, *rest: Any) -> None:
    """Refuse a file that does not fit before anything is written."""
    _check_version(local_metadata)
    metadata = getattr(state_dict, "_metadata", None) or {}
    for path, inner in module.named_modules():
        own = f"{prefix}{path}." if path else prefix
        _check_version(metadata.get(own[:-1], {}))
        for key, parameter in _own(inner):
            _fitting(state_dict, own + key, parameter)


def _load(
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    local_metadata: dict,
    strict: bool,
    missing: list,
    unexpected: list,
    errors: list,
) -> None:
    """Components back into parameters; what is left to torch is what it reports, and assigning."""
    _check_version(local_metadata)
    loaded = module.__dict__[_LOADED] = []
    for key, parameter in _own(module):
        name = prefix + key
        value = _fitting(state_dict, name, parameter)
        for entry in [entry for entry in state_dict if _SUFFIX.sub("", entry) == name != entry]:
            del state_dict[entry]
        if value is None:
            continue
        state_dict[name] = value
        if value.shape == parameter.shape and not local_metadata.get("assign_to_params_buffers", False):
            _copy(parameter, value)
            del state_dict[name]
            loaded.append(name)


def _copy(parameter: MCTensor, value: MCTensor) -> None:
    """The same components under the same scale, bit for bit."""
    with torch.no_grad():
        for target, part in zip(parameter._parts, value._parts, strict=True):
            target.copy_(part)
        if parameter._scale is not None:
            parameter._scale.copy_(value._scale)


def _forget_missing(module: nn.Module, incompatible: Any) -> None:
    """What `_load` has loaded is not missing."""
    for name in module.__dict__.pop(_LOADED, ()):
        if name in incompatible.missing_keys:
            incompatible.missing_keys.remove(name)


def _fitting(state_dict: Mapping, name: str, parameter: MCTensor) -> MCTensor | None:
    """A parameter's entries in its own form; None where the file has none.

    Raises:
        ValueError: they hold more digits than the parameter, or are of another layout.
    """
    foreign = [entry for entry in state_dict if entry.startswith(f"{name}.") and not _SUFFIX.search(entry)]
    if foreign:
        raise ValueError(f"unknown entries {foreign[:3]} beside {name!r}: the file is of another layout")
    value = _gathered(state_dict, name)
    if value is None:
        return None
    count, own = len(value._parts), len(parameter._parts)
    holds, held = own * PRECISION[parameter.dtype], count * PRECISION[value.dtype]
    if count > 1 and held > holds:
        raise ValueError(
            f"{name!r} has {count} components of {value.dtype} in the file and {own} of {parameter.dtype} in the "
            f"model, which would lose digits: hu.multicomponent(model, components={count}, dtype={value.dtype}) first, "
            "or load hu.tensors.plain_state_dict(state_dict)"
        )
    scaled = parameter._scale is not None
    if (count, value.dtype, value._scale is not None) == (own, parameter.dtype, scaled):
        parts = tuple(_alone(part) for part in value._parts) if scaled else value._parts
        return wrap(parts, value._scale, parameter._gradients)
    scale = "auto" if scaled else "none"
    return MCTensor.encode(value, own, parameter.dtype, scale, gradients=parameter._gradients)


def _alone(part: Tensor) -> Tensor:
    """A component in memory of its own: a change of scale rewrites all of the memory that a component lies in."""
    return part if part.untyped_storage().nbytes() == part.numel() * part.element_size() else part.clone()


def _gathered(state_dict: Mapping, name: str) -> MCTensor | None:
    """All entries of one parameter as a tensor."""
    beside = {_SUFFIX.search(e)[1]: v for e, v in state_dict.items() if _SUFFIX.sub("", e) == name != e}
    first = state_dict.get(name)
    if first is None:
        if beside:
            raise ValueError(f"the file has {sorted(beside)} of {name!r} and not {name!r} itself: it is damaged")
        return None
    if isinstance(first, MCTensor):
        return first.detach()
    names = [f"component_{i}" for i in range(1, 1 + sum(part.startswith("component_") for part in beside))]
    parts = (first, *(beside.get(part) for part in names))
    shapes = {(tuple(part.shape), part.dtype) for part in parts if isinstance(part, Tensor)}
    if len(shapes) != 1 or not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(f"the components of {name!r} are not all there, or of several shapes: the file is damaged")
    if parts[0].dtype not in PRECISION:
        raise ValueError(f"{name!r} is {parts[0].dtype} in the file: components are floating point")
    return wrap(tuple(part.detach() for part in parts), beside.get("scale"), "first")


def _check_version(metadata: Mapping) -> None:
    version = metadata.get(_VERSION_KEY, VERSION)
    if version != VERSION:
        raise ValueError(
            f"this file holds components in layout {version}, and this version of halfulp reads layout {VERSION}: load "
            "it with the version that wrote it, and save its plain_state_dict"
        )
