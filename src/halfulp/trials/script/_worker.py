"""One run of a script, whose model and optimizer are replaced by those of a recipe."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ... import optim, recipes
from ..._extensions import load_inherited
from ...observation.scripts import BackwardLosses, Ending, model_of, run_script
from ...recipes import Recipe
from ...recipes._optimizer import _object as recipe_update
from ...recipes._optimizer import _state as recipe_state

RULES = ("SGD", "Adam", "AdamW")
# What chooses an implementation in torch, and no other training.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


class Refusal(BaseException):
    """Raised where a recipe cannot be put into a script, past `except Exception` of the script's own."""


@dataclass
class Substitution:
    """The replacements made for a script's models and optimizers; it keeps none of them alive.

    Attributes:
        models: that were converted.
        optimizers: that were made for them.
        made: how many these were in all.
        others: names of the classes of other optimizers, which stayed as they are.
        steps: how often any optimizer stepped.
    """

    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    made: int = 0
    others: list[str] = field(default_factory=list)
    steps: int = 0

    def add(self, optimizer: Any) -> None:
        """Add an optimizer of the recipe's."""
        self.optimizers.add(optimizer)
        self.made += 1

    def count(self, *_: Any) -> None:
        """Count a step of an optimizer (a step hook)."""
        self.steps += 1

    def bytes_per_parameter(self) -> float | None:
        """Return the mean over parameters of halfulp's optimizers that live; None without any."""
        found = [(one.bytes_per_parameter(), _count_elements(one)) for one in self.optimizers if _is_own(type(one))]
        return sum(size * count for size, count in found) / sum(count for _, count in found) if found else None


@contextlib.contextmanager
def substitute_optimizers(recipe: Recipe) -> Iterator[Substitution]:
    """Give whoever makes torch.optim's SGD, Adam or AdamW a converted model and the recipe's optimizer.

    Yields:
        What was done.

    Raises:
        Refusal: the recipe needs more than that.
    """
    check_supported(recipe)
    done = Substitution()
    kinds = {name: getattr(torch.optim, name) for name in RULES}
    inits = {kind: kind.__init__ for kind in (*kinds.values(), Optimizer)}
    own = dict(kinds)
    if recipe.narrow:
        own = {name: _make_class(kind, recipe, done) for name, kind in kinds.items()}
    else:
        for kind in kinds.values():
            kind.__init__ = _make_converting_init(kind, recipe, done)
    _put_classes(own, kinds)
    Optimizer.__init__ = _make_noting_init(Optimizer.__init__, {*own.values(), *kinds.values()}, done)  # type: ignore[method-assign]
    counting = register_optimizer_step_post_hook(done.count)
    try:
        yield done
    finally:
        counting.remove()
        _put_classes(kinds, kinds)
        for kind, init in inits.items():
            kind.__init__ = init


def _put_classes(classes: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Put classes where torch's stand: in torch.optim, and in the module of each."""
    for name, kind in kinds.items():
        for place in (torch.optim, sys.modules[kind.__module__]):
            setattr(place, name, classes[name])


def _make_noting_init(init: Any, known: set[type], done: Substitution) -> Any:
    """Return the constructor of all optimizers, which notes those that are neither a recipe's nor torch's three."""

    @functools.wraps(init)
    def noted(optimizer: Any, *args: Any, **options: Any) -> None:
        kind = type(optimizer)
        if kind not in known and not _is_own(kind) and kind.__name__ not in done.others:
            done.others.append(kind.__name__)
        init(optimizer, *args, **options)

    return noted


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "halfulp"


def _count_elements(optimizer: Any) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"]) or 1


def check_supported(recipe: Recipe) -> None:
    """Refuse recipes that need more than another model and optimizer.

    Raises:
        Refusal: the recipe scales or rounds gradients or emulates a format, by objects that the script has to use.
    """
    for need, words in (
        ("gradient_format", "its gradients go through hu.AdaptiveGradScaler, which the script has to call"),
        ("payload", "its parameters carry scales: use hu.scalify(model) and an optimizer of hu.optim in the script"),
        ("emulate", "it emulates a format by hu.emulate(model), which the script has to call"),
        ("format", "it holds weights to a format, by an optimizer of hu.optim with format="),
    ):
        if getattr(recipe, need):
            raise Refusal(words)


def _make_class(own: Any, recipe: Recipe, done: Substitution) -> type:
    """Return a subclass of an optimizer whose call returns the recipe's; a subclass of it is an optimizer of its own.

    Not `__new__` of torch's own class: one that was set and deleted leaves a class that takes no arguments any more.
    """

    def make(cls: type, *args: Any, **options: Any) -> Any:
        if cls is not kind:
            return object.__new__(cls)
        return _make_recipe_optimizer(own, recipe, done, args, options)

    kind = type(own.__name__, (own,), {"__new__": make, "__module__": own.__module__, "__doc__": own.__doc__})
    return kind


def _make_recipe_optimizer(own: Any, recipe: Recipe, done: Substitution, args: tuple, options: dict[str, Any]) -> Any:
    """Return the recipe's optimizer for what was to be torch's."""
    given = dict(inspect.signature(own.__init__).bind(None, *args, **options).arguments)
    groups = _list_groups(given.pop("params"))
    model = _convert(groups, recipe, done)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    given = {key: value for key, value in given.items() if key not in ("self", *_IMPLEMENTATION)}
    with _turn_into_refusals():
        updates = recipes.assign(recipe, model)
        split = [part for group in groups for part in _split_by_update(group, names, updates)]
        kind: Any = optim.OPTIMIZERS[own.__name__]
        made = kind(split, state_dtype=recipe_state(recipe, kind, given), **given)
    done.add(made)
    return made


def _make_converting_init(kind: Any, recipe: Recipe, done: Substitution) -> Any:
    """Return a constructor that converts the model first; the optimizer stays torch's, and a subclass what it is."""
    init = kind.__init__

    @functools.wraps(init)
    def convert_and_init(optimizer: Any, params: Any, *args: Any, **options: Any) -> None:
        if type(optimizer) is not kind:
            init(optimizer, params, *args, **options)
            return
        groups = _list_groups(params)
        _convert(groups, recipe, done)
        init(optimizer, groups, *args, **options)
        done.add(optimizer)

    return convert_and_init


def _convert(groups: list[dict[str, Any]], recipe: Recipe, done: Substitution) -> nn.Module:
    """Convert the model that holds an optimizer's parameters, unless it has been; return it."""
    model = model_of(parameter for group in groups for parameter in group["params"])
    if model is None:
        raise Refusal("no module holds the optimizer's parameters, so that there is no model to convert")
    if model not in done.models:
        with _turn_into_refusals():
            recipes.convert(model, recipe)
        done.models.add(model)
    return model


@contextlib.contextmanager
def _turn_into_refusals() -> Iterator[None]:
    """Turn errors of a conversion into a Refusal."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise Refusal(" ".join(str(error).split())) from error


def _list_groups(params: Any) -> list[dict[str, Any]]:
    """Return param groups whose params are lists of tensors, from whatever an optimizer takes."""
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


def _split_by_update(
    group: dict[str, Any], names: dict[int, str], updates: dict[str, str | None]
) -> list[dict[str, Any]]:
    """Return a group split by the weight updates that the recipe gives its parameters."""
    parts: dict[str | None, list[tuple[str, Tensor]]] = {}
    for parameter in group["params"]:
        name = names[id(parameter)]
        parts.setdefault(None if parameter.dtype == torch.float32 else updates[name], []).append((name, parameter))
    rest = {key: value for key, value in group.items() if key != "params"}
    return [
        {**rest, "params": members, **({} if update is None else {"weight_update": recipe_update(update)})}
        for update, members in parts.items()
    ]


def main() -> None:
    """Run `[recipe, result file, "file" or "module", script, *arguments]` of sys.argv and write the result as JSON."""
    load_inherited()
    recipe, result, kind, script, *arguments = sys.argv[1:]

    def write(found: dict[str, Any]) -> None:
        Path(result).write_text(json.dumps(found), encoding="utf-8")

    write(run(script, arguments, recipe, module=kind == "module", leave=write))


def run(script: str, arguments: list[str], recipe: str, module: bool = False, leave: Any = None) -> dict[str, Any]:
    """Run a script under a recipe.

    Args:
        script: its path, or the dotted name of a module.
        arguments: its own.
        recipe: a name.
        module: whether it is a module.
        leave: given the result where the script ends the process by os._exit.

    Returns:
        The losses that backward passes began with, without a scaler's factor; optimizer steps; how the script ended;
        why the recipe could not be used, or what else is to be said of it.
    """
    losses: list[float] = []
    done = Substitution()

    def left(ending: Ending) -> int:
        if leave is not None:
            leave(_describe_run(losses, done, ending, None))
        return ending.code

    def log(loss: torch.Tensor) -> None:
        losses.append(float(loss))

    refused, ending = None, None
    try:
        with substitute_optimizers(recipes.get(recipe)) as done, BackwardLosses(log):
            ending = run_script(script, arguments, passing=Refusal, module=module, leave=left)
    except Refusal as refusal:
        refused = str(refusal)
    return _describe_run(losses, done, ending, refused)


def _describe_run(
    losses: list[float], done: Substitution, ending: Ending | None, refused: str | None
) -> dict[str, Any]:
    code = 0 if ending is None else ending.code
    if refused is None and not done.made and not code:
        refused = _explain_nothing_converted(done)
    return {
        "losses": losses,
        "steps": done.steps,
        "refused": refused,
        "notes": _list_notes(done),
        "ended": None if ending is None else ending.reason,
        "code": code,
        "bytes_per_parameter": None if refused else done.bytes_per_parameter(),
    }


def _explain_nothing_converted(done: Substitution) -> str:
    known = f"recipes replace torch.optim's {', '.join(RULES[:-1])} and {RULES[-1]}, and no subclasses of them"
    if done.others:
        return f"it trains by {', '.join(done.others)}; {known}"
    return f"it makes no torch optimizer in its own process, and other processes are not reached; {known}"


def _list_notes(done: Substitution) -> list[str]:
    notes = []
    if done.made > 1:
        notes.append(f"{done.made} optimizers: the loss is the mean over the backward passes of all")
    if done.made and done.others:
        notes.append(f"{', '.join(done.others)} and what it steps stayed as they are")
    return notes
