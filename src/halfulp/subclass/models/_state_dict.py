"""Parameters of tensor subclasses in a state_dict: a plain tensor for each of their auxiliary tensors, and back."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._messages import name_type, quote
from .._composite_tensor import allow_views, list_plain_tensors

_C: Any = torch._C
_LOADED_NAMES_ATTRIBUTE = "_halfulp_loaded"
# On a parameter: its first name in the newest state_dict, and that one's identity, that of the values, and versions.
FIRST_SAVED_NAME_ATTRIBUTE = "_halfulp_saved"


class StateDictLayout(NamedTuple):
    """The entries in which one tensor class is stored in a state_dict."""

    tensor_class: type[Tensor]
    # The entry of the metadata, and what stands there; a file of another version is refused.
    metadata_key: str
    version: int
    description: str  # of what is stored, for messages
    # Of the entries of auxiliary tensors.
    auxiliary_suffix: re.Pattern[str]
    # All entries of a tensor, by its name.
    make_entries: Callable[[str, Any], dict[str, Tensor]]
    # The tensor that a state_dict holds under a name, with a given one's dtypes and parts, or None.
    read_tensor: Callable[[Mapping, str, Any], Any]


_layouts_by_class: dict[type, StateDictLayout] = {}


def register_layout(layout: StateDictLayout) -> None:
    """Register a class's layout: modules on which `install_state_dict_hooks` was called then save and load it."""
    _layouts_by_class[layout.tensor_class] = layout


def find_state_dict_layout(tensor: object) -> StateDictLayout | None:
    """Return how a tensor is stored in a state_dict; None for a class without a layout."""
    return _layouts_by_class.get(type(tensor))


def install_state_dict_hooks(module: nn.Module) -> None:
    """Save and load this module's own parameters of such classes as plain tensors."""
    # Files of torch.save(model) hold these functions' names.
    if _save_auxiliary_tensors not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_save_auxiliary_tensors)
        module.register_load_state_dict_pre_hook(_load_auxiliary_tensors)
        module.register_load_state_dict_post_hook(_drop_loaded_missing_keys)


def install_state_dict_check(model: nn.Module) -> None:
    """Check a file for all of a model's modules before any of them is loaded."""
    hooks = model._load_state_dict_pre_hooks
    assert isinstance(hooks, OrderedDict)
    if not any(getattr(hook, "hook", None) is _check_entries_of_all_modules for hook in hooks.values()):
        model.register_load_state_dict_pre_hook(_check_entries_of_all_modules)
        hooks.move_to_end(next(reversed(hooks)), last=False)


def remove_state_dict_hooks(module: nn.Module) -> None:
    """Remove the hooks that save and load parameters of such classes, unless some are left."""
    if any(_list_own_parameters(inner) for inner in module.modules()):
        return
    own = (_save_auxiliary_tensors, _load_auxiliary_tensors, _check_entries_of_all_modules, _drop_loaded_missing_keys)
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in own:
                del hooks[key]


def check_is_state_dict(given: object, what: str) -> None:
    """Raise TypeError for a model, or another object, in place of a state_dict, and ValueError for another layout."""
    if isinstance(given, Mapping):
        for metadata in getattr(given, "_metadata", {}).values():
            check_layout_version(metadata)
        return
    wanted = "model.state_dict()" if isinstance(given, nn.Module) else "a mapping from names to tensors"
    raise TypeError(f"{what} takes a state_dict, got {name_type(given)}: give it {wanted}")


def check_layout_version(metadata: Mapping) -> None:
    """Raise for a file of another layout."""
    for layout in _layouts_by_class.values():
        if (version := metadata.get(layout.metadata_key, layout.version)) != layout.version:
            raise ValueError(
                f"this file holds {layout.description} in layout {version}, and this version of halfulp reads layout "
                f"{layout.version}: load it with the version that wrote it, and save its plain_state_dict"
            )


def divide_by_scale_exactly(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return an entry's values divided by a scale, in a dtype; None where it does not hold these."""
    part = (values.detach().double() / scale.double()).to(dtype)
    back = part.double() * scale.double()
    holds = values.is_meta or bool(((back == values) | (back.isnan() & values.isnan())).all())
    return part if holds else None


def _list_own_parameters(module: nn.Module) -> list[tuple[str, Tensor, StateDictLayout]]:
    """Return a module's own parameters that have a layout: name, parameter, layout."""
    return [
        (key, value, layout)
        for key, value in module._parameters.items()
        if value is not None and (layout := find_state_dict_layout(value)) is not None
    ]


def _save_auxiliary_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Store auxiliary tensors as entries behind their parameter; with keep_vars keep the parameter itself."""
    own = {prefix + key: (parameter, layout) for key, parameter, layout in _list_own_parameters(module)}
    local_metadata.update({layout.metadata_key: layout.version for _, layout in own.values()})
    last: list[tuple[str, Any]] = []
    # What this module and its children have saved stands last.
    while state_dict and next(reversed(state_dict)).startswith(prefix):
        last.append(state_dict.popitem())
    for name, value in reversed(last):
        parameter, layout = own.get(name, (value, None))
        if layout is not None and value is not parameter and isinstance(value, layout.tensor_class):
            with allow_views(parameter):
                state_dict.update(_share_tied_memory(layout.make_entries(name, value), name, parameter, state_dict))
        else:
            state_dict[name] = value


def _share_tied_memory(
    entries: dict[str, Tensor], name: str, parameter: Tensor, state_dict: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return a parameter's entries, in the memory that they have under its first name in this state_dict."""
    # Savers that write shared memory once (transformers) would else write the values under both names and what stands
    # beside them under one, and the values alone would be loaded last.
    if parameter.is_inference():  # counts no writes
        return entries
    first, *noted = parameter.__dict__.get(FIRST_SAVED_NAME_ATTRIBUTE, ("",))
    known = state_dict.get(first, entries[name])
    if first != name and noted == [id(state_dict), id(known), known._version, parameter._version]:
        beside = [(x, state_dict.get(first + key.removeprefix(name))) for key, x in entries.items() if key != name]
        if all(
            isinstance(y, Tensor) and _C._is_alias_of(x, y) and x.storage_offset() == y.storage_offset()
            for x, y in beside
        ):
            return {**entries, name: known}
    value = entries[name]
    # Identities, as torch.utils.swap_tensors takes no tensor that is weakly referenced.
    parameter.__dict__[FIRST_SAVED_NAME_ATTRIBUTE] = name, id(state_dict), id(value), value._version, parameter._version
    return entries


def _check_entries_of_all_modules(
    module: nn.Module, state_dict: Mapping, prefix: str, local_metadata: dict, *rest: Any
) -> None:
    """Refuse a file that does not fit before anything is written."""
    check_layout_version(local_metadata)
    metadata = getattr(state_dict, "_metadata", None) or {}
    for path, inner in module.named_modules():
        own = f"{prefix}{path}." if path else prefix
        check_layout_version(metadata.get(own[:-1], {}))
        for key, parameter, layout in _list_own_parameters(inner):
            _read_parameter_from_entries(state_dict, own + key, parameter, layout)


def _read_parameter_from_entries(state_dict: Mapping, name: str, parameter: Tensor, layout: StateDictLayout) -> Any:
    foreign = [
        entry for entry in state_dict if entry.startswith(f"{name}.") and not layout.auxiliary_suffix.search(entry)
    ]
    if foreign:
        raise ValueError(f"unknown entries {quote(foreign)} beside {name!r}: the file is of another layout")
    return layout.read_tensor(state_dict, name, parameter)


def _load_auxiliary_tensors(
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    local_metadata: dict,
    strict: bool,
    missing: list,
    unexpected: list,
    errors: list,
) -> None:
    """Load auxiliary tensors into their parameters; torch reports mismatches and assigns."""
    check_layout_version(local_metadata)
    loaded = module.__dict__[_LOADED_NAMES_ATTRIBUTE] = []
    for key, parameter, layout in _list_own_parameters(module):
        name = prefix + key
        value = _read_parameter_from_entries(state_dict, name, parameter, layout)
        for entry in [entry for entry in state_dict if layout.auxiliary_suffix.sub("", entry) == name != entry]:
            del state_dict[entry]
        if value is None:
            continue
        state_dict[name] = value
        if value.shape == parameter.shape and not local_metadata.get("assign_to_params_buffers", False):
            with torch.no_grad():
                for target, part in zip(list_plain_tensors(parameter), list_plain_tensors(value), strict=True):
                    target.copy_(part)
            del state_dict[name]
            loaded.append(name)


def _drop_loaded_missing_keys(module: nn.Module, incompatible: Any) -> None:
    """Remove the entries that `_load_auxiliary_tensors` has loaded from the missing keys."""
    for name in module.__dict__.pop(_LOADED_NAMES_ATTRIBUTE, ()):
        if name in incompatible.missing_keys:
            incompatible.missing_keys.remove(name)
