"""Which modules and parameters of a model a recipe changes, and which weight update each gets."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from .._messages import a_kind
from ..subclass.models._float32_products import class_of
from ._casts import inside
from ._recipe import NORMS, Recipe


def check(model: nn.Module, recipe: Recipe) -> None:
    """Raise for a model that no recipe starts from."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {a_kind(model)}: give a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one batch through the model first")
        if parameter.dtype != torch.float32:
            cure = "make it a buffer"
            if parameter.dtype.is_floating_point:
                cure = "call model.float() or build the model in float32"
            elif parameter.dtype.is_complex:
                cure = "make torch.view_as_real(it) the parameter, and take torch.view_as_complex of that in forward"
            raise TypeError(f"a recipe starts from float32 parameters, but {name!r} is {parameter.dtype}; {cure}")


def islands(model: nn.Module, recipe: Recipe) -> dict[str, str]:
    """Return the names of the modules that a narrow recipe keeps in float32, the outermost ones, each with why.

    These are the ones that the recipe's globs match, losses with weights, modules whose weight is computed from float32
    buffers before each forward pass, and, where norms are kept, modules whose weights enter no product (`_scales`).

    Raises:
        ValueError: a glob of the recipe's own that matches no module.

    >>> from halfulp import recipes
    >>> islands(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), recipes.get("bf16"))
    {'1': "matches '*Norm*'"}
    """
    if not recipe.narrow:
        return {}
    found: dict[str, str] = {}
    matched: set[str] = set()
    keeps_norms = set(NORMS) <= set(recipe.float32)
    for name, module in model.named_modules():
        globs = [glob for glob in recipe.float32 if _matches(glob, name, module)]
        matched.update(globs)
        if inside(name, found):
            continue
        if globs:
            found[name] = f"matches {globs[0]!r}"
        elif any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
            found[name] = "has a spectral norm with float32 buffers"
        elif isinstance(module, nn.modules.loss._Loss) and any(True for _ in module.parameters()):
            found[name] = "is a loss, which is computed with all digits"
        elif keeps_norms and module is not model and _scales(module):
            found[name] = "has vectors alone, which scale or shift"
    for glob in recipe.float32:
        if glob not in matched and glob not in NORMS:
            raise ValueError(
                f"recipe {recipe.name!r} keeps {glob!r} in float32, which is the name of no module of the model and of "
                "no class of its modules without children; globs are matched against both"
            )
    return found


def _scales(module: nn.Module) -> bool:
    """Return whether a layer of nobody's but the user's has vectors alone: frequencies of positions, scales of layers.

    Its products are element by element, where frequencies times positions need all digits and which cost nothing.
    """
    if class_of(module).__module__.startswith("torch.nn.") or any(True for _ in module.children()):
        return False
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return bool(own) and all(parameter.ndim <= 1 for parameter in own)


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


def kept_parameters(model: nn.Module, kept: Container[str]) -> set[int]:
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
