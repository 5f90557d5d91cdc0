"""Applying a recipe: a float32 model and a rule in, the model and its optimizer out."""

import fnmatch
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..scaled import scalify
from . import _by_torch
from ._few_bit_states import hold_states
from ._near import unknown
from ._recipe import Recipe

if TYPE_CHECKING:
    from ..gradients import AdaptiveGradScaler

RULES = ("SGD", "Adam", "AdamW", "Lion")


def apply(
    recipe: Recipe, model: nn.Module, rule: str, *, seed: int = 0, report_interval: int = 50, **hyper: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Move a float32 model to the recipe's formats, in place, and build the optimizer that goes with it.

    The weights are narrowed by the optimizer, so that the low bits of the float32 start are kept wherever the
    weight update has room for them. Buffers that hold floats are narrowed too.

    Args:
        recipe: What to do.
        model: A module with float32 parameters; changed in place.
        rule: ``"SGD"``, ``"Adam"``, ``"AdamW"`` or ``"Lion"``: a class of ``halfulp.optim``.
        seed: Governs the recipe's stochastic rounding and its perturbation of the start.
        report_interval: How often the lost-update meter samples, in steps.
        **hyper: The rule's own hyper-parameters, ``lr=`` and so on.

    Returns:
        The same model, and the optimizer. Of a recipe with a ``gradient_format`` the optimizer steps only while the
        model has a scaler, as `scaler` makes it.

    Raises:
        ValueError: an unknown rule, a rule that the recipe does not go with, or a parameter that no glob of the
            recipe's weight update matches.
        TypeError: the model's parameters are not float32.
    """
    if rule not in RULES:
        raise ValueError(unknown("rule", rule, RULES))
    _check_float32(model)
    from .. import optim

    if recipe.by_torch:
        _by_torch.check_rule(recipe, rule)
    _perturb(model, recipe.perturb, seed)
    if recipe.by_torch:
        return _by_torch.apply(recipe, model, rule, **hyper)
    if recipe.payload:
        scalify(model, getattr(torch, recipe.payload), matmul=recipe.matmul)
    choices = {
        "state_dtype": _state(recipe, rule, hyper),
        "param_dtype": getattr(torch, recipe.param_dtype) if recipe.param_dtype else None,
        "format": recipe.format,
    }
    if isinstance(recipe.weight_update, str):
        choices["weight_update"] = _object(recipe.weight_update)
    options = {key: value for key, value in choices.items() if value is not None}
    optimizer = getattr(optim, rule)(
        _groups(recipe, model), seed=seed, report_interval=report_interval, **options, **hyper
    )
    if recipe.param_dtype:
        _narrow_buffers(model, getattr(torch, recipe.param_dtype))
    if recipe.format and recipe.state_dtype == recipe.format:
        hold_states(optimizer, recipe.format, seed)
    if recipe.gradient_format:
        optimizer.register_step_pre_hook(lambda *_: _check_scaled(recipe, model))
    return model, optimizer


def scaler(recipe: Recipe, model: nn.Module) -> "AdaptiveGradScaler | None":
    """The scaler that rounds a model's gradients and scales them as the recipe says; None where it does not.

    Train with it in place of ``loss.backward()`` and ``optimizer.step()``: see `halfulp.AdaptiveGradScaler`. A policy
    starts at a scale of 2^16, as torch's scaler does.

    >>> from halfulp import recipes
    >>> recipe = recipes.get("fp16-adaptive")
    >>> model, optimizer = apply(recipe, nn.Linear(4, 2), "SGD", lr=0.1)
    >>> scaled = scaler(recipe, model)
    >>> scaled.scale(model(torch.ones(3, 4)).square().mean()).backward()
    >>> scaled.step(optimizer); scaled.update()
    """
    if recipe.gradient_format is None:
        return None
    from ..gradients import AdaptiveGradScaler

    return AdaptiveGradScaler(model, **_scaler_options(recipe))


def _scaler_options(recipe: Recipe) -> dict[str, Any]:
    options = {"format": recipe.gradient_format, "rounding": recipe.gradient_rounding}
    if isinstance(recipe.gradient_scale, str):
        return {"policy": recipe.gradient_scale, **options}
    # Without a scale too, what is not finite must not reach a weight.
    return {"policy": "constant", "init_scale": recipe.gradient_scale or 1.0, **options}


def _check_scaled(recipe: Recipe, model: nn.Module) -> None:
    if "forward" not in vars(model):
        options = ", ".join(f"{key}={value!r}" for key, value in _scaler_options(recipe).items())
        raise RuntimeError(
            f"recipe {recipe.name!r} rounds gradients, and these were not rounded: make scaler = "
            f"halfulp.AdaptiveGradScaler(model, {options}) and train by scaler.scale(loss).backward(), "
            "scaler.step(optimizer), scaler.update()"
        )


def assign(recipe: Recipe, model: nn.Module) -> dict[str, str | None]:
    """Which weight update each parameter of the model gets; None where the recipe leaves it to the optimizer.

    >>> from halfulp import recipes
    >>> assign(recipes.get("bf16-mixed"), nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)))
    {'0.weight': 'stochastic', '1.weight': 'kahan', '1.bias': 'kahan'}
    """
    return {name: _update_of(recipe, name, module) for name, module, _ in _named(model)}


def _update_of(recipe: Recipe, name: str, module: nn.Module) -> str | None:
    if recipe.weight_update is None or isinstance(recipe.weight_update, str):
        return recipe.weight_update
    for glob, update in recipe.weight_update:
        if fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(type(module).__name__, glob):
            return update
    globs = ", ".join(repr(glob) for glob, _ in recipe.weight_update)
    raise ValueError(
        f"recipe {recipe.name!r}: parameter {name!r} of a {type(module).__name__} matches none of {globs}; "
        "end the list with the glob '*'"
    )


def _groups(recipe: Recipe, model: nn.Module) -> list[Any]:
    """Named parameters; for a mix, one group per weight update, in the recipe's order."""
    if recipe.weight_update is None or isinstance(recipe.weight_update, str):
        return [(name, parameter) for name, _, parameter in _named(model)]
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, module, parameter in _named(model):
        groups.setdefault(_update_of(recipe, name, module), []).append((name, parameter))
    return [{"params": members, "weight_update": _object(update)} for update, members in groups.items()]


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Every parameter once, with its qualified name and the module that holds it."""
    for name, parameter in model.named_parameters():
        yield name, model.get_submodule(name.rpartition(".")[0]), parameter


def _state(recipe: Recipe, rule: str, hyper: dict[str, Any]) -> object:
    """The optimizer's ``state_dtype``; values of a format live in float32 states."""
    if recipe.state_dtype == "bfloat16x2":
        second = ["exp_avg_sq"] if rule in ("Adam", "AdamW") else []
        second += ["max_exp_avg_sq"] if second and hyper.get("amsgrad") else []
        return dict.fromkeys(second, recipe.state_dtype) or None
    if recipe.state_dtype in (None, "8bit", "fp8"):
        return recipe.state_dtype
    return torch.float32 if recipe.state_dtype == recipe.format else getattr(torch, recipe.state_dtype)


def _object(update: str) -> object:
    """The optimizer's ``weight_update``."""
    from .. import optim

    special = {"kahan-literal": optim.Kahan(literal=True), "components-3": optim.Components(3)}
    return special.get(update, update)


def _perturb(model: nn.Module, size: float, seed: int) -> None:
    if not size:
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            parameter.mul_(1 + size * noise.to(parameter.device))


def _narrow_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def _check_float32(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise TypeError(
                f"a recipe starts from float32 parameters, but {name!r} is {parameter.dtype}; "
                "call model.float() or build the model in float32"
            )
