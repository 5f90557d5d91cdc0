"""A model's parameters with the modules that hold them, selecting among them by name, and removing our own hooks."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..._messages import a_kind


def remove_hooks(modules: Iterable[nn.Module], is_ours: Callable[[Any], bool]) -> None:
    """Remove the forward hooks and forward pre-hooks of modules that a predicate picks, with what torch notes of them.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> handle = layer.register_forward_hook(print, always_call=True)
    >>> remove_hooks(layer.modules(), lambda hook: hook is print)
    >>> layer._forward_hooks, layer._forward_hooks_always_called
    (OrderedDict(), OrderedDict())
    """
    for module in modules:
        tables: list[tuple[dict[int, Any], ...]] = [
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ]
        for hooks, *notes in tables:
            for key in [key for key, hook in hooks.items() if is_ours(hook)]:
                for table in (hooks, *notes):
                    table.pop(key, None)


Where = str | Iterable[str] | Callable[[nn.Module, str], bool] | None


class ParameterRef(NamedTuple):
    """A parameter or buffer with its qualified name, the module that holds it, and its name there."""

    name: str
    module: nn.Module
    key: str
    value: Tensor

    @property
    def is_parameter(self) -> bool:
        return self.key in self.module._parameters

    def put(self, value: Tensor) -> None:
        """Replace the parameter in its module, by attribute, as recurrent modules keep lists of their weights."""
        setattr(self.module, self.key, value)


def check_module(given: object, what: str) -> None:
    """Raise TypeError where something else than a module was given to the function named `what`."""
    if not isinstance(given, nn.Module):
        raise TypeError(f"{what} takes a torch.nn.Module, got {a_kind(given)}")


def module_parameters(model: nn.Module, constants: bool = False) -> Iterator[ParameterRef]:
    """Yield every parameter under each of its names; with `constants` floating buffers that are not saved, too."""
    for path, module in model.named_modules():
        values = dict(module._parameters)
        if constants:
            buffers = {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
            values |= {key: value for key, value in buffers.items() if value is not None and value.is_floating_point()}
        for key, value in values.items():
            if value is not None:
                yield ParameterRef(f"{path}.{key}" if path else key, module, key, value)


def matching_parameters(found: Iterable[ParameterRef], where: Where) -> list[ParameterRef]:
    """Return the parameters that match under any of their names, each under all of its names.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    found = list(found)
    matches = matcher(where, [ref.name for ref in found])
    matched = {id(ref.value) for ref in found if matches(ref.module, ref.name)}
    if where is not None and not matched:
        raise ValueError(f"where={where!r} matches none of the model's {len(found)} parameters")
    return [ref for ref in found if id(ref.value) in matched]


def check_has_shape(ref: ParameterRef) -> None:
    """Raise for a parameter of a lazy module that has seen no batch."""
    if nn.parameter.is_lazy(ref.value):
        raise ValueError(f"parameter {ref.name!r} has no shape yet: run one batch through the model first")


def matcher(where: Where, names: list[str], what: str = "where", of: str = "parameter") -> Callable:
    """Return a function of a module and a name: whether `where` (a glob, several, a function, None for all) matches."""
    if where is None:
        return lambda module, name: True
    if callable(where):
        return where
    globs = [where] if isinstance(where, str) else list(where)
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(f"{what} holds {glob!r}: allowed are globs over names, or one function f(module, name)")
        if not fnmatch.filter(names, glob):
            near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the names are {names[:5]} ..."
            raise ValueError(f"{what}={glob!r} matches no {of}; {hint}")
    return lambda module, name: any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def with_attributes(new: nn.Parameter, old: Tensor, own: Iterable[str]) -> nn.Parameter:
    """Copy the attributes that users set on a parameter (marks for weight decay, say), but for the class's `own`."""
    own = {*own, "_is_param"}
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name not in own})
    return new
