"""Places of parameters in a model, and choosing among them by name."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from .._messages import a_kind

Where = str | Iterable[str] | Callable[[nn.Module, str], bool] | None


class Place(NamedTuple):
    """Where a parameter or buffer is held: its qualified name, its module, its name there, and itself."""

    name: str
    module: nn.Module
    key: str
    held: Tensor

    @property
    def is_parameter(self) -> bool:
        return self.key in self.module._parameters

    def put(self, value: Tensor) -> None:
        """By attribute: recurrent modules keep lists of their weights, and see that."""
        setattr(self.module, self.key, value)


def check_module(given: object, what: str) -> None:
    """Raise TypeError where something else than a module was given to `what`."""
    if not isinstance(given, nn.Module):
        raise TypeError(f"{what} takes a torch.nn.Module, got {a_kind(given)}")


def places(model: nn.Module, constants: bool = False) -> Iterator[Place]:
    """Every place of a parameter; with `constants` those of floating buffers that are not saved, too."""
    for path, module in model.named_modules():
        held = dict(module._parameters)
        if constants:
            buffers = {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
            held |= {key: value for key, value in buffers.items() if value is not None and value.is_floating_point()}
        for key, value in held.items():
            if value is not None:
                yield Place(f"{path}.{key}" if path else key, module, key, value)


def chosen(found: Iterable[Place], where: Where) -> list[Place]:
    """The places of everything that is matched under any of its names.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    found = list(found)
    matches = matcher(where, [place.name for place in found])
    matched = {id(place.held) for place in found if matches(place.module, place.name)}
    if where is not None and not matched:
        raise ValueError(f"where={where!r} matches none of the model's {len(found)} parameters")
    return [place for place in found if id(place.held) in matched]


def check_has_shape(place: Place) -> None:
    """Raise for a parameter of a lazy module that has seen no batch."""
    if isinstance(place.held, nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"parameter {place.name!r} has no shape yet: run one batch through the model first")


def matcher(where: Where, names: list[str], what: str = "where", of: str = "parameter") -> Callable:
    """A function of a module and a name that tells whether a choice means it."""
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


def with_marks(new: nn.Parameter, old: nn.Parameter, own: Iterable[str]) -> nn.Parameter:
    """What users hang on a parameter (marks for weight decay and the like) goes along; `own` belongs to the class."""
    own = {*own, "_is_param"}
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name not in own})
    return new
