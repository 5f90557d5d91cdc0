"""What a recipe does to each module of a model, before anything is done."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator

import torch
from torch import nn

from .._messages import a_kind
from . import _catalog
from ._casts import inside
from ._recipe import NORMS, Recipe


@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """What becomes of one module's own parameters.

    Attributes:
        name: the module's qualified name, "" for the model itself.
        kind: name of its class.
        parameters: how many elements its own parameters have; tied ones count where they come first.
        held_as: what they will be: "bfloat16", "float16 payload x scale", "2 x float16".
        weight_update: of the recipe's optimizer; None where float32 parameters need none.
    """

    name: str
    kind: str
    parameters: int
    held_as: str
    weight_update: str | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns; ``print`` shows a table.

    Attributes:
        recipe: the recipe.
        modules: one `ModulePlan` per module that has parameters of its own or is kept in float32.
        bytes_before, bytes_after: of all parameters, without what an optimizer keeps.
    """

    recipe: Recipe
    modules: tuple[ModulePlan, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        rows = [
            (plan.name or "(the model)", plan.kind, plan.held_as, plan.weight_update or "") for plan in self.modules
        ]
        rows = [("module", "class", "parameters", "weight update"), *rows]
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        size = f"{self.bytes_before:,} bytes of parameters become {self.bytes_after:,}."
        return "\n".join([self.recipe.explain(), *table, size])


def explain(model: nn.Module, recipe: Recipe | str) -> Explanation:
    """What `convert` would do to a model, module by module; nothing is changed.

    Args:
        model: with float32 parameters.
        recipe: a Recipe or the name of one.

    Raises:
        ValueError: what `convert` would refuse: an unknown recipe, a glob that matches nothing.
        TypeError: parameters that are not float32, or no module.

    >>> print(explain(nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4)), "bf16-kahan"))
    bf16-kahan: Weights are bfloat16, float32 in modules that match '*Norm*'. Each is updated with a second 16-bit
    number per weight that keeps what rounding dropped. Forward and backward run in bfloat16.
    module  class      parameters  weight update
    0       Linear     bfloat16    kahan
    1       LayerNorm  float32
    96 bytes of parameters become 64.
    """
    recipe = _catalog.get(recipe)
    check(model, recipe)
    kept, updates = islands(model, recipe), assign(recipe, model)
    tied, plans, before, after = set(), [], 0, 0
    keeps = kept_parameters(model, kept)
    for name, module in model.named_modules():
        own = [(key, p) for key, p in module._parameters.items() if p is not None]
        if not own and name not in kept:
            continue
        new = [(key, p) for key, p in own if id(p) not in tied]
        tied |= {id(p) for _, p in own}
        count = sum(p.numel() for _, p in new)
        stays = inside(name, kept) or any(id(p) in keeps for _, p in own)
        update = {None if stays else updates.get(f"{name}.{key}" if name else key) for key, _ in new}
        held = "float32" if stays else _held_as(recipe)
        words = ", ".join(sorted(filter(None, update))) or None
        plans.append(ModulePlan(name, type(module).__name__, count, held, words))
        before, after = before + 4 * count, after + count * (4 if stays else _bytes(recipe))
    return Explanation(recipe, tuple(plans), before, after)


def check(model: nn.Module, recipe: Recipe) -> None:
    """Raise for a model that no recipe starts from."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {a_kind(model)}: give a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise TypeError(
                f"a recipe starts from float32 parameters, but {name!r} is {parameter.dtype}; "
                "call model.float() or build the model in float32"
            )


def islands(model: nn.Module, recipe: Recipe) -> set[str]:
    """The qualified names of the modules that a narrow recipe keeps in float32, the outermost ones.

    Raises:
        ValueError: a glob of the recipe's own that matches no module.
    """
    if not recipe.narrow:
        return set()
    found: set[str] = set()
    matched: set[str] = set()
    for name, module in model.named_modules():
        globs = [glob for glob in recipe.float32 if _matches(glob, name, module)]
        matched.update(globs)
        if globs and not inside(name, found):
            found.add(name)
    for glob in recipe.float32:
        if glob not in matched and glob not in NORMS:
            raise ValueError(
                f"recipe {recipe.name!r} keeps {glob!r} in float32, which is the name of no module of the model and of "
                "no class of its modules without children; globs are matched against both"
            )
    return found


def check_range(model: nn.Module, recipe: Recipe, keeps: set[int]) -> None:
    """Raise for a value that float16 would make infinite, in a parameter that is not kept."""
    for name, parameter in model.named_parameters():
        if recipe.param_dtype != "float16" or id(parameter) in keeps or parameter.is_meta:
            continue
        value = parameter.detach()
        if bool((value.half().isinf() & value.isfinite()).any()):
            raise ValueError(
                f"parameter {name!r} has values beyond float16's largest, 65504: take a bfloat16 recipe, or keep its "
                "module in float32 by recipe.replace(float32=...)"
            )


def kept_parameters(model: nn.Module, kept: set[str]) -> set[int]:
    """The ids of the parameters that lie in islands, under any of their names."""
    inner = [module for name, module in model.named_modules() if inside(name, kept)]
    return {id(p) for module in inner for p in module._parameters.values() if p is not None}


def assign(recipe: Recipe, model: nn.Module) -> dict[str, str | None]:
    """Which weight update each parameter of the model gets; None where the recipe leaves it to the optimizer.

    >>> from halfulp import recipes
    >>> assign(recipes.get("bf16-mixed"), nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)))
    {'0.weight': 'stochastic', '1.weight': 'kahan', '1.bias': 'kahan'}
    """
    return {name: update_of(recipe, name, module) for name, module, _ in named(model)}


def update_of(recipe: Recipe, name: str, module: nn.Module) -> str | None:
    """The weight update of one parameter, by its qualified name and the module that holds it."""
    if recipe.weight_update is None or isinstance(recipe.weight_update, str):
        return recipe.weight_update
    for glob, update in recipe.weight_update:
        if fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(type(module).__name__, glob):
            return update
    globs = ", ".join(repr(glob) for glob, _ in recipe.weight_update)
    raise ValueError(
        f"recipe {recipe.name!r}: parameter {name!r} of {a_kind(module)} matches none of {globs}; "
        "end the list with the glob '*'"
    )


def named(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Every parameter once, with its qualified name and the module that holds it."""
    for name, parameter in model.named_parameters():
        yield name, model.get_submodule(name.rpartition(".")[0]), parameter


def _matches(glob: str, name: str, module: nn.Module) -> bool:
    """By its name; by its class only without children, as wrappers are often called by what they wrap."""
    if fnmatch.fnmatchcase(name, glob):
        return True
    classes = () if any(True for _ in module.children()) else type(module).__mro__
    return any(fnmatch.fnmatchcase(kind.__name__, glob) for kind in classes)


def _held_as(recipe: Recipe) -> str:
    if recipe.components:
        return f"{recipe.components} x {recipe.param_dtype}"
    if recipe.payload:
        return f"{recipe.payload} payload x scale"
    return f"float32 with values of {recipe.format}" if recipe.format else recipe.param_dtype or "float32"


def _bytes(recipe: Recipe) -> int:
    name = recipe.payload or recipe.param_dtype or "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize * (recipe.components or 1)
