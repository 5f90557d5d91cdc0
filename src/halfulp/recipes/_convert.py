"""Moving a float32 model to a recipe's formats, in place, and back."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from ..mctensor import multicomponent
from ..mctensor._convert_model import single_component
from ..optim.parameters._narrowing import mark_to_stay_float32, narrow_parameter, refuse_values_beyond, widen_parameter
from ..scaled import scalify, unscalify
from ..subclass import float32_products
from ..subclass.models._conversion import list_module_parameters, refuse_torchscript, remove_forward_hooks
from ..subclass.models._parameter_holders import (
    check_parameter_holders,
    list_parameters_held_by_optimizers,
    replace_parameter_data,
)
from . import _casts, _operands
from . import _recipe as _catalog
from ._multipoint import MultipointLayer
from ._plan import (
    assign_weight_updates,
    check_float32_model,
    find_float32_modules_with_reasons,
    list_float32_parameter_ids,
)
from ._recipe import Recipe

ModuleType = TypeVar("ModuleType", bound=nn.Module)

_CONVERSION_RECORD_ATTRIBUTE = "_halfulp_conversion"


class _ConversionRecord(NamedTuple):
    """A record of a conversion: the recipe, and the buffers whose dtype was changed."""

    recipe: Recipe
    buffers: tuple[str, ...]


def convert(model: ModuleType, recipe: Recipe | str, *, seed: int = 0) -> ModuleType:
    """Move a float32 model to a recipe's formats, in place, like ``nn.Module.to``; `revert` undoes it.

    Parameters become what the recipe says and stay the same objects, tied ones tied, frozen ones frozen. Under a
    recipe with ``param_dtype`` of 16 bits norms (``recipe.float32``) keep float32 weights and statistics and compute
    in float32, as do layers of your own whose weights are vectors alone (scales, frequencies of positions), and every
    tensor is cast where it meets weights: the inputs of a layer to the dtype of its parameters, those of a norm to
    float32 and its output back, and what the model returns to float32, so that a loss has all digits. A cast keeps
    finite numbers finite (a mask of ``torch.finfo(torch.float32).min`` becomes the narrow dtype's) and what is given
    twice one tensor. A module of your own that writes into an argument which is cast (a float32 cache, a list of
    tensors) is refused, but in compiled graphs, where the write is lost. Integers, buffers and what meets no weight
    (masks, positions) stay as they are: a module around layers has its inputs cast only if it owns a parameter called
    weight; another one of its own (a class token) meets them by torch's type promotion, and in a product of two dtypes
    torch raises. `halfulp.explain` says what each module gets.

    Afterwards make the optimizer, by `halfulp.recipes.optimizer` (the recipe's own weight updates and states) or by
    hand (``hu.optim.AdamW(model.named_parameters(), weight_update="kahan")``; leave ``param_dtype=`` out). The low
    bits of the float32 start wait beside the parameters, at 2 bytes per parameter (4 under float16), until the first
    optimizer of ``halfulp.optim`` takes them. A copy of the model, another device, fully_shard and every write of other
    values before that leave them behind: the weights then start as the narrow ones show them (``param_dtype=`` after
    fully_shard keeps them). A weight half-way between two bfloat16 numbers shows the one of larger magnitude, as the
    low bits have to fit into 16, until an optimizer takes these: its weight update may show the even one.

    Order: move the model to its device, convert, then wrap it (DistributedDataParallel, fully_shard), compile it and
    make optimizers.

    Args:
        model: any module with float32 parameters.
        recipe: a Recipe or the name of one: `halfulp.recipes.names`.
        seed: of the recipe's perturbation of the start.

    Returns:
        The same model.

    Raises:
        ValueError: an unknown recipe, a model that is converted already, wrapped, held by an optimizer, or with weights
            of `halfulp.multipoint`, a layer of torch.jit, a glob that matches nothing, or values that the narrow dtype
            would make infinite. The model is as it was.
        TypeError: no module, or parameters that are not float32.

    >>> model = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "bf16-kahan")
    >>> [str(parameter.dtype) for parameter in model.parameters()]
    ['torch.bfloat16', 'torch.bfloat16', 'torch.float32', 'torch.float32']
    >>> model(torch.randn(2, 3, 8, 8)).dtype
    torch.float32
    >>> revert(model)[0].weight.dtype
    torch.float32
    """
    recipe = _catalog.get(recipe)
    _refuse_wrapped_model(model)
    for record in _list_conversion_records(model):
        raise ValueError(
            f"the model is converted already, by recipe {record.recipe.name!r}: halfulp.revert(model) first"
        )
    check_float32_model(model)
    for name, module in model.named_modules():
        if isinstance(module, MultipointLayer):
            raise ValueError(
                f"{name or 'the model'} has multipoint weights, which are codes and not trained: model.to(torch."
                "bfloat16) narrows what is beside them, and halfulp.multipoint comes after a recipe and halfulp.revert"
            )
    kept = find_float32_modules_with_reasons(model, recipe)
    assign_weight_updates(recipe, model)
    for ref in list_module_parameters(model) if recipe.param_dtype or recipe.operand_format else ():
        refuse_torchscript(ref)
    if recipe.is_narrow:
        advice = "take a wider recipe, or keep its module in float32 by recipe.replace(float32=...)"
        keeps = list_float32_parameter_ids(model, kept)
        for name, parameter in model.named_parameters():
            if id(parameter) not in keeps:
                refuse_values_beyond(parameter, _get_param_dtype(recipe), name, advice)
        _refuse_parameters_of_optimizers(model, "convert")
    _refuse_parameters_held_elsewhere(model, recipe, "convert")
    buffers: tuple[str, ...] = ()
    if recipe.perturb:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
                parameter.mul_(1 + recipe.perturb * noise.to(parameter.device))
    if recipe.components:
        # All components of gradients too: a float16 gradient alone underflows without loss scaling.
        multicomponent(model, recipe.components, _get_param_dtype(recipe), gradients="components")
    elif recipe.payload:
        scalify(model, getattr(torch, recipe.payload), matmul=recipe.matmul, wide="none")
    elif recipe.param_dtype == "float64":
        for parameter in model.parameters():
            replace_parameter_data(parameter, parameter.detach().double())
        buffers = tuple(name for name, buffer in model.named_buffers() if buffer.dtype == torch.float32)
        _cast_buffers(model, buffers, torch.float64)
        for module in model.modules():
            if _casts.has_weights(module):
                _casts.install_input_cast_hooks(module, torch.float64)
    elif recipe.is_narrow:
        buffers = _cast_parameters_to_narrow_dtype(model, kept, _get_param_dtype(recipe))
    _operands.install_operand_rounding(model, recipe)
    model.__dict__[_CONVERSION_RECORD_ATTRIBUTE] = _ConversionRecord(recipe, buffers)
    return model


def revert(model: ModuleType) -> ModuleType:
    """Make a converted model float32 again, its weights as trained, in place: the way back from `convert`.

    Hooks, casts and marks are taken away; parameters stay the same objects where `convert` kept them. Low bits that
    an optimizer holds are the optimizer's to give:

        weights = opt.float32_state_dict(model)
        del opt
        hu.revert(model).load_state_dict(weights)

    Returns:
        The same model.

    Raises:
        ValueError: a model that is not converted, or whose parameters an optimizer holds. The model is as it was.

    >>> model = nn.Linear(3, 2)
    >>> start = model.weight.detach().clone()
    >>> torch.equal(revert(convert(model, "bf16-split")).weight, start)
    True
    """
    if not isinstance(model, nn.Module) or _CONVERSION_RECORD_ATTRIBUTE not in model.__dict__:
        raise ValueError("the model is not converted: revert takes the module that halfulp.convert was given")
    record = model.__dict__[_CONVERSION_RECORD_ATTRIBUTE]
    recipe = record.recipe
    _refuse_parameters_of_optimizers(model, "revert")
    _refuse_parameters_held_elsewhere(model, recipe, "revert")
    if recipe.components:
        single_component(model)
    elif recipe.payload:
        unscalify(model)
    elif recipe.is_narrow or recipe.param_dtype == "float64":
        for parameter in model.parameters():
            if parameter.dtype == _get_param_dtype(recipe):
                widen_parameter(parameter)
            mark_to_stay_float32(parameter, False)
        _cast_buffers(model, record.buffers, torch.float32)
    remove_forward_hooks(
        model.modules(), lambda hook: isinstance(hook, _casts.CastHook | _operands.ROUNDING_HOOK_TYPES)
    )
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _operands.BlockProductForward):
            del vars(module)["forward"]
    float32_products(model, False)
    del model.__dict__[_CONVERSION_RECORD_ATTRIBUTE]
    return model


def read_recipe_of_model(model: nn.Module) -> Recipe:
    """Return the recipe of a converted model, or of the one inside a wrapper."""
    found = {record.recipe for record in _list_conversion_records(model)}
    if len(found) != 1:
        several = f"converted by several recipes ({', '.join(sorted(x.name for x in found))})"
        said = several if found else "not converted"
        raise ValueError(f"the model is {said}: call halfulp.convert(model, recipe) once, then make its optimizer")
    return found.pop()


def is_converted(model: nn.Module) -> bool:
    """Return whether `convert` has converted this very module."""
    return vars(model).get(_CONVERSION_RECORD_ATTRIBUTE) is not None


def _list_conversion_records(model: nn.Module) -> list[_ConversionRecord]:
    held = map(vars, model.modules() if isinstance(model, nn.Module) else ())
    return [own[_CONVERSION_RECORD_ATTRIBUTE] for own in held if _CONVERSION_RECORD_ATTRIBUTE in own]


def _get_param_dtype(recipe: Recipe) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, str(recipe.param_dtype))
    return dtype


def _cast_parameters_to_narrow_dtype(model: nn.Module, kept: Container[str], dtype: torch.dtype) -> tuple[str, ...]:
    """Narrow the parameters that are not kept, and install casts between the two kinds."""
    keeps = list_float32_parameter_ids(model, kept)
    for parameter in model.parameters():
        if id(parameter) in keeps:
            mark_to_stay_float32(parameter)
        else:
            narrow_parameter(parameter, dtype)
    # torch's kernel wants statistics of the dtype of the weights, or inputs narrower than both.
    changed = tuple(
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and not _casts.is_inside_modules(name, kept)
        for key, buffer in module.named_buffers(recurse=False)
        if buffer.dtype == torch.float32
    )
    _cast_buffers(model, changed, dtype)
    _casts.install_cast_hooks(model, kept, dtype)
    float32_products(model)
    return changed


def _cast_buffers(model: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
    for name in names:
        owner, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        owner._buffers[key] = owner.get_buffer(key).to(dtype)


def _refuse_parameters_held_elsewhere(model: nn.Module, recipe: Recipe, what: str) -> None:
    """Refuse a change of dtype where others hold the parameters (multicomponent and scalify check by themselves)."""
    if recipe.components or not (recipe.is_narrow or recipe.param_dtype == "float64"):
        return
    if any(hasattr(parameter, "_local_tensor") for parameter in model.parameters()):
        raise ValueError(f"the model is sharded: {what} it before fully_shard, or give the optimizer param_dtype=")
    check_parameter_holders(model.named_parameters(), what, replaced=False)


def _refuse_parameters_of_optimizers(model: nn.Module, function: str) -> None:
    """Raise if an optimizer holds one of the parameters, whose states and low bits belong to the dtype they have."""
    for name, optimizer in list_parameters_held_by_optimizers(model.named_parameters()):
        raise ValueError(
            f"{optimizer} holds parameter {name!r}, whose dtype changes: take opt.float32_state_dict(model) if you "
            f"want the low bits that it keeps, delete it, and make the optimizer after halfulp.{function}"
        )


def _refuse_wrapped_model(model: object) -> None:
    """Raise for a wrapper that has read the parameters already."""
    wraps = {name: name for name in ("DistributedDataParallel", "FullyShardedDataParallel")}
    wraps |= {"FSDPModule": "fully_shard", "OptimizedModule": "torch.compile", "ScriptModule": "torch.jit.script"}
    for kind in (kind.__name__ for kind in type(model).__mro__ if kind.__name__ in wraps):
        call = f"{wraps[kind]}(model)"
        raise ValueError(f"the model is a {kind}, which holds its parameters as they were: convert before {call}")
