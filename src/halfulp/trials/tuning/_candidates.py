"""Candidates of a search: recipes in the order of their bytes that observed trainings leave open."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from ... import recipes
from ..._qualified_names import pattern_of
from ...recipes import Recipe
from ...recipes._plan import assign
from ..tasks import Task

# Rounding to nearest is taken to do where the movement that took place differs from the wanted one by no more.
OFF = 0.02

Updates = dict[str, str]


def group_by_pattern(observed: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of narrow parameters by their pattern: those that differ in numbers alone are of one kind.

    >>> group_by_pattern({"a.0.w": {"dtype": "bfloat16"}, "a.1.w": {"dtype": "bfloat16"}, "b": {"dtype": "float32"}})
    {'a.*.w': ['a.0.w', 'a.1.w']}
    """
    found: dict[str, list[str]] = {}
    for name, one in observed.items():
        if one["dtype"] in ("bfloat16", "float16"):
            found.setdefault(pattern_of(name), []).append(name)
    return found


def choose_updates(observed: Mapping[str, Any]) -> Updates:
    """Return for each narrow parameter the weight update of fewest bytes that an observed training allows.

    The observed training rounds to nearest. Where nearly all of the wanted movement took place, that will do. Else
    rounding at random does, of the same bytes, unless its noise would be above the drift: then 8 more bits do.

    >>> moved, lost, noisy = ({"realised": r, "noise": n} for r, n in ((1.0, 0.1), (0.4, 0.2), (0.0, 3.0)))
    >>> wide = {"dtype": "bfloat16"}
    >>> choose_updates({"a": moved | wide, "b": lost | wide, "c": noisy | wide})
    {'a': 'nearest', 'b': 'stochastic', 'c': 'split8'}
    """
    chosen: Updates = {}
    for names in group_by_pattern(observed).values():
        realised = [observed[name]["realised"] for name in names]
        noise = [observed[name]["noise"] for name in names]
        if all(share is not None and abs(1 - share) <= OFF for share in realised):
            update = "nearest"
        else:
            update = "stochastic" if all(one is None or one < 1 for one in noise) else "split8"
        chosen |= dict.fromkeys(names, update)
    return chosen


def estimate_harm(observed: Mapping[str, Any], names: list[str], update: str) -> float:
    """Return how badly a kind of layers fares under an update in an observed training, to order them."""
    if update == "nearest":
        return max(float(abs(1 - (observed[name]["realised"] or 0.0))) for name in names)
    return float(max(observed[name]["noise"] or 0.0 for name in names))


def set_updates(recipe: Recipe, model: nn.Module, updates: Updates) -> Recipe:
    """Return the recipe with a weight update for each parameter, said in as few globs as say it right.

    Args:
        recipe: any of narrow parameters.
        model: in float32.
        updates: of all parameters that become narrow.
    """
    names = list(dict.fromkeys(updates.values()))
    usual = max(names, key=list(updates.values()).count)
    others = {name: update for name, update in updates.items() if update != usual}
    if not others:
        return recipe.replace(weight_update=usual)
    by_pattern = dict.fromkeys((pattern_of(name), update) for name, update in others.items())
    for pairs in ((*by_pattern, ("*", usual)), (*others.items(), ("*", usual))):
        mixed = recipe.replace(weight_update=pairs)
        given = assign(mixed, model)
        if all(given[name] == update for name, update in updates.items()):
            return mixed
    raise AssertionError("names of parameters are globs that match themselves")


PROBES = {"bfloat16": "bf16", "float16": "fp16"}
# By weight update those that keep less of an update, whatever its size.
_LESS = {
    "nearest": (),
    "stochastic": (),
    "split8": ("nearest", "stochastic"),
    "kahan": ("nearest", "stochastic", "split8"),
    "split": ("nearest", "stochastic", "split8"),
    "master": ("nearest", "stochastic", "split8"),
}
_STATES = ("8bit", "bfloat16", "float32")
# Beyond this share of a tensor's elements a format's range is too narrow for it.
OUT_OF_RANGE = 1e-3


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A recipe of the search, its bytes per parameter and its outcome.

    Attributes:
        recipe: the recipe.
        bytes_per_parameter: weight, what lies beside it, optimizer states and gradient.
        outcome: "holds", "worse", "unclear", "diverged", or "not trained".
        why: in words.
        gap: its mean loss above float32's; None where nothing was trained to the end.
    """

    recipe: Recipe
    bytes_per_parameter: float
    outcome: str = "not trained"
    why: str = ""
    gap: float | None = None


class Costs:
    """Bytes per parameter of recipes on one model, as the optimizer that goes with each counts them."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task, self.model = task, model

    def count_bytes(self, recipe: Recipe) -> float:
        """Return the bytes per parameter of a recipe.

        Raises:
            ValueError: the model, or the task's optimizer, does not go with it.
        """
        model = copy.deepcopy(self.model)
        recipes.convert(model, recipe)
        return float(recipes.optimizer(model, self._task.rule, **self._task.hyper).bytes_per_parameter())


def order_candidates(
    costs: Costs, observed: Mapping[str, dict[str, Any]], dtypes: Sequence[str]
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the recipes that observed trainings leave open, by their bytes, and those that they rule out.

    Args:
        costs: of recipes on the model.
        observed: by dtype, the readings of a training with parameters of that dtype, rounded to nearest.
        dtypes: of parameters, the preferred one first where bytes are equal.
    """
    found: list[Candidate] = []
    out: list[Candidate] = []
    for dtype in dtypes:
        probe = recipes.get(PROBES[dtype])
        wide = _describe_range(observed[dtype]["ranges"][dtype], dtype)
        if wide is not None:
            out.append(Candidate(probe, costs.count_bytes(probe), why=wide))
            continue
        found += _list_candidates(costs, observed[dtype]["parameters"], probe)
    by_cost: dict[tuple[float, object], Candidate] = {}
    known = recipes.names()
    for candidate in sorted(found, key=lambda one: (one.bytes_per_parameter, one.recipe.name not in known)):
        # Where an optimizer has no states, their dtype makes no difference.
        key = candidate.bytes_per_parameter, (candidate.recipe.param_dtype, candidate.recipe.weight_update)
        by_cost.setdefault(key, candidate)
    return list(by_cost.values()), out


def _list_candidates(costs: Costs, observed: Mapping[str, Any], probe: Recipe) -> list[Candidate]:
    updates = choose_updates(observed)
    if not updates:
        return []
    cheapest = _describe(set_updates(probe, costs.model, updates), updates)
    rungs = [(cheapest, "8bit"), (cheapest, None), (cheapest, "float32")]
    for update in ("split8", "kahan", "split"):
        rungs += [(probe.replace(weight_update=update), state) for state in ("8bit", None, "float32")]
    found = []
    for recipe, state in rungs:
        named = _name_recipe(recipe.replace(state_dtype=state))
        try:
            found.append(Candidate(named, costs.count_bytes(named)))
        except ValueError:
            continue  # "split" needs bfloat16, and an optimizer of one's own may have no states of 8 bits
    return found


def _describe(recipe: Recipe, updates: Updates) -> Recipe:
    names = list(dict.fromkeys(updates.values()))
    return recipe if len(names) == 1 else recipe.replace(description=f"{' and '.join(names)}, as observed")


def _name_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe under the catalogue's name for it, or under one that says what it is."""
    update = recipe.weight_update if isinstance(recipe.weight_update, str) else "mix"
    dtype = PROBES[str(recipe.param_dtype)]
    state = {None: "", "8bit": "-state8", "float32": "-state32"}[recipe.state_dtype]
    for name in recipes.names():
        known = recipes.get(name)
        if known.replace(name="x", description="") == recipe.replace(name="x", description=""):
            return known
    name = f"{dtype}-{update}{state}"
    name += "-state16" if name in recipes.names() else ""  # the catalogue's name for other states
    words = recipe.description if update == "mix" else f"{recipe.param_dtype}, {update} updates"
    states = {"8bit": ", 8-bit states", "float32": ", float32 states"}.get(recipe.state_dtype or "", "")
    return recipe.replace(name=name, description=words + states)


def _describe_range(ranges: Mapping[str, Any], dtype: str) -> str | None:
    if ranges["share"] <= OUT_OF_RANGE:
        return None
    where = ranges["name"] or "the model"
    return f"{100 * ranges['share']:.1f}% of the {ranges['role']} of {where} would leave {dtype}'s range"


def keeps_less(one: Recipe, other: Recipe, model: nn.Module) -> bool:
    """Return whether a recipe keeps no more of anything than another one, and so cannot hold where that one did not.

    >>> from halfulp import recipes
    >>> small = recipes.get("bf16-split8")
    >>> keeps_less(small, small.replace(weight_update="kahan", state_dtype=None), nn.Linear(2, 2))
    True
    >>> keeps_less(recipes.get("bf16-stochastic"), small, nn.Linear(2, 2))
    False
    """
    if not one.narrow or (one.param_dtype, one.float32) != (other.param_dtype, other.float32):
        return False
    states = [recipe.state_dtype or "bfloat16" for recipe in (one, other)]
    if any(state not in _STATES for state in states) or _STATES.index(states[0]) > _STATES.index(states[1]):
        return False
    mine, theirs = assign(one, model), assign(other, model)
    return all(mine[name] == theirs[name] or mine[name] in _LESS.get(str(theirs[name]), ()) for name in mine)


def price_recipes(costs: Costs, given: Sequence[Recipe]) -> list[Candidate]:
    """Return given recipes as candidates, in the order of their bytes per parameter.

    Raises:
        ValueError: the model or the optimizer does not go with one of them.
    """
    return sorted(
        (Candidate(recipe, costs.count_bytes(recipe)) for recipe in given), key=attrgetter("bytes_per_parameter")
    )
