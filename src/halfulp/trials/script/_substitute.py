"""A script's model and optimizer replaced by those of a recipe where the script makes its optimizer."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import optim, recipes
from ...observation.scripts import model_of
from ...recipes import Recipe
from ...recipes._optimizer import _object as recipe_update
from ...recipes._optimizer import _state as recipe_state

RULES = ("SGD", "Adam", "AdamW")
# What chooses an implementation in torch, and no other training.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


class Refusal(BaseException):
    """Why a recipe cannot be put into a script; no `except Exception` of the script's own is to catch it."""


@contextlib.contextmanager
def substituted(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """While open, whoever makes torch.optim's SGD, Adam or AdamW gets a converted model and the recipe's optimizer.

    Yields:
        What was done: the "model" that was converted and the "optimizer" that was made; empty before.

    Raises:
        Refusal: the recipe needs more than that.
    """
    check_supported(recipe)
    done: dict[str, Any] = {}
    kinds = {name: getattr(torch.optim, name) for name in RULES}
    inits = {name: kind.__init__ for name, kind in kinds.items()}
    for name, kind in kinds.items():
        if recipe.narrow:
            setattr(torch.optim, name, _class_that_makes(kind, recipe, done))
        else:
            kind.__init__ = _converting(inits[name], recipe, done)
    try:
        yield done
    finally:
        for name, kind in kinds.items():
            setattr(torch.optim, name, kind)
            kind.__init__ = inits[name]


def check_supported(recipe: Recipe) -> None:
    """Refuse recipes that need more than another model and optimizer.

    Raises:
        Refusal: the recipe scales or rounds gradients or emulates a format, by objects that the script has to use.
    """
    for field, words in (
        ("gradient_format", "its gradients go through hu.AdaptiveGradScaler, which the script has to call"),
        ("payload", "its parameters carry scales: use hu.scalify(model) and an optimizer of hu.optim in the script"),
        ("emulate", "it emulates a format by hu.emulate(model), which the script has to call"),
        ("format", "it holds weights to a format, by an optimizer of hu.optim with format="),
    ):
        if getattr(recipe, field):
            raise Refusal(words)


def _class_that_makes(own: Any, recipe: Recipe, done: dict[str, Any]) -> type:
    """A subclass of an optimizer whose call returns the recipe's; a subclass of it is an optimizer of its own.

    Not `__new__` of torch's own class: one that was set and deleted leaves a class that takes no arguments any more.
    """

    def made(cls: type, *args: Any, **options: Any) -> Any:
        if cls is not kind:
            return object.__new__(cls)
        return _of_recipe(own, recipe, done, args, options)

    kind = type(own.__name__, (own,), {"__new__": made, "__module__": own.__module__, "__doc__": own.__doc__})
    return kind


def _of_recipe(own: Any, recipe: Recipe, done: dict[str, Any], args: tuple, options: dict[str, Any]) -> Any:
    """The recipe's optimizer for what was to be torch's."""
    given = dict(inspect.signature(own.__init__).bind(None, *args, **options).arguments)
    groups = _groups(given.pop("params"))
    model = _convert(groups, recipe, done)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    given = {key: value for key, value in given.items() if key not in ("self", *_IMPLEMENTATION)}
    with _refusing():
        updates = recipes.assign(recipe, model)
        split = [part for group in groups for part in _by_update(group, names, updates)]
        kind: Any = optim.OPTIMIZERS[own.__name__]
        made = kind(split, state_dtype=recipe_state(recipe, kind, given), **given)
    done["optimizer"] = made
    return made


def _converting(init: Any, recipe: Recipe, done: dict[str, Any]) -> Any:
    """A constructor that converts the model first; the optimizer stays torch's."""

    @functools.wraps(init)
    def made(optimizer: Any, params: Any, *args: Any, **options: Any) -> None:
        groups = _groups(params)
        _convert(groups, recipe, done)
        init(optimizer, groups, *args, **options)
        done["optimizer"] = optimizer

    return made


def _convert(groups: list[dict[str, Any]], recipe: Recipe, done: dict[str, Any]) -> nn.Module:
    model = model_of(parameter for group in groups for parameter in group["params"])
    if model is None:
        raise Refusal("no module holds the optimizer's parameters, so that there is no model to convert")
    if done.get("model") is not model:
        with _refusing():
            recipes.convert(model, recipe)
        done["model"] = model
    return model


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise Refusal(" ".join(str(error).split())) from error


def _groups(params: Any) -> list[dict[str, Any]]:
    """Param groups whose params are lists of tensors, of whatever an optimizer takes."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise Refusal(f"the optimizer was given {type(params).__name__} for parameters")
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    found = []
    for group in groups:
        given = group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        found.append({**group, "params": [one[1] if isinstance(one, tuple) else one for one in members]})
    return found


def _by_update(group: dict[str, Any], names: dict[int, str], updates: dict[str, str | None]) -> list[dict[str, Any]]:
    """A group split by the weight updates that the recipe gives its parameters."""
    parts: dict[str | None, list[tuple[str, Tensor]]] = {}
    for parameter in group["params"]:
        name = names[id(parameter)]
        parts.setdefault(None if parameter.dtype == torch.float32 else updates[name], []).append((name, parameter))
    rest = {key: value for key, value in group.items() if key != "params"}
    return [
        {**rest, "params": members, **({} if update is None else {"weight_update": recipe_update(update)})}
        for update, members in parts.items()
    ]
