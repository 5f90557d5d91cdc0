"""Kinds of layers: which weight update each of them needs, by what an observed training says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..._qualified_names import pattern_of
from ...recipes import Recipe
from ...recipes._plan import assign

# Rounding to nearest is taken to do where the movement that took place differs from the wanted one by no more.
OFF = 0.02

Updates = dict[str, str]


def kinds_of(observed: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of narrow parameters by their pattern: those that differ in numbers alone are of one kind.

    >>> kinds_of({"a.0.w": {"dtype": "bfloat16"}, "a.1.w": {"dtype": "bfloat16"}, "b": {"dtype": "float32"}})
    {'a.*.w': ['a.0.w', 'a.1.w']}
    """
    found: dict[str, list[str]] = {}
    for name, one in observed.items():
        if one["dtype"] in ("bfloat16", "float16"):
            found.setdefault(pattern_of(name), []).append(name)
    return found


def cheapest_updates(observed: Mapping[str, Any]) -> Updates:
    """Return for each narrow parameter the weight update of fewest bytes that an observed training allows.

    The observed training rounds to nearest. Where nearly all of the wanted movement took place, that will do. Else
    rounding at random does, of the same bytes, unless its noise would be above the drift: then 8 more bits do.

    >>> moved, lost, noisy = ({"realised": r, "noise": n} for r, n in ((1.0, 0.1), (0.4, 0.2), (0.0, 3.0)))
    >>> wide = {"dtype": "bfloat16"}
    >>> cheapest_updates({"a": moved | wide, "b": lost | wide, "c": noisy | wide})
    {'a': 'nearest', 'b': 'stochastic', 'c': 'split8'}
    """
    chosen: Updates = {}
    for names in kinds_of(observed).values():
        realised = [observed[name]["realised"] for name in names]
        noise = [observed[name]["noise"] for name in names]
        if all(share is not None and abs(1 - share) <= OFF for share in realised):
            update = "nearest"
        else:
            update = "stochastic" if all(one is None or one < 1 for one in noise) else "split8"
        chosen |= dict.fromkeys(names, update)
    return chosen


def harm(observed: Mapping[str, Any], names: list[str], update: str) -> float:
    """Return how badly a kind of layers fares under an update, by an observed training: to order them, no more."""
    if update == "nearest":
        return max(abs(1 - (observed[name]["realised"] or 0.0)) for name in names)
    return max(observed[name]["noise"] or 0.0 for name in names)


def with_updates(recipe: Recipe, model: nn.Module, updates: Updates) -> Recipe:
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
