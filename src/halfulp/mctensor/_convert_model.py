"""Converting a model's parameters to MCTensors (`multicomponent`), and back (`single_component`)."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from .._messages import a_kind
from ..subclass._in_backward import COMPONENTS, FIRST, check_gradients
from ..subclass.models._conversion import converted, put_converted, put_plain
from ..subclass.models._module_parameters import (
    ParameterRef,
    Where,
    check_has_shape,
    check_module,
    matching_parameters,
    module_parameters,
    with_attributes,
)
from ..subclass.models._parameter_holders import check_holders
from . import _state_dict as _state_dict
from ._encode import check_count, check_dtype
from ._mctensor import MCTensor
from .entry import _recurrent_inputs
from .rules.networks import _recurrent as _recurrent

Model = TypeVar("Model", bound=nn.Module)
# Name of a module's record of the dtypes that its parameters had before.
_BEFORE = "_halfulp_dtypes"
# What an MCTensor keeps in its __dict__.
_OWN = ("_parts", "_scale", "_gradients")


def multicomponent(
    model: Model,
    components: int = 2,
    dtype: torch.dtype | None = None,
    where: Where = None,
    gradients: str = FIRST,
) -> Model:
    """Hold a model's parameters as sums of several components: in place, like nn.Module.to.

    Every matched parameter becomes an nn.Parameter that is an MCTensor, with every digit that fits; its modules, their
    forward methods and torch.optim optimizers stay as they are. A parameter that several modules share stays shared.
    Parameters are new objects: make optimizers afterwards. Buffers stay as they are, but for floating ones that are not
    saved: those are constants (rotary frequencies, positions) that models cast to the parameters' dtype, and are given
    as many components of their own dtype, so that such a cast keeps their digits.

    `state_dict` holds plain tensors: `weight`, the leading component, which any loader may take for the weight, beside
    it `weight.component_1`, ..., and where components have a scale `weight.component_scale`.
    DistributedDataParallel averages gradients as plain tensors.

    Args:
        model: any module; its parameters are floating tensors, plain or MCTensors. Inputs are MCTensors or
            plain, of any floating dtype: they enter with all digits, and a wider dtype widens the results.
        components: 1 to 4.
        dtype: of the components, one of float16, bfloat16, float32 and float64; each parameter's own by default.
        where: which parameters and such buffers, a glob over qualified names ("encoder.*.weight"), several of them, or
            a function of the module that holds one and its qualified name; all by default.
        gradients: "first": `p.grad` is a plain tensor of the components' dtype; "components": an MCTensor.

    Returns:
        The same model.

    Raises:
        ValueError: components not in 1 to 4, integer or complex data or dtype, a pattern that matches no parameter, a
            value out of the components' range, a parameter that is scaled or has hooks. The model is as it was.

    >>> import torch
    >>> layer = multicomponent(torch.nn.Linear(3, 2), components=2, dtype=torch.bfloat16)
    >>> list(layer.state_dict())
    ['weight', 'weight.component_1', 'bias', 'bias.component_1']
    >>> layer(torch.ones(3)).components[1].shape
    torch.Size([2])
    """
    check_module(model, "multicomponent")
    check_count(components)
    check_gradients(gradients)
    if dtype is not None:
        check_dtype(dtype)
    found = matching_parameters(module_parameters(model, constants=True), where)
    for ref in found:
        _check(ref)
    _check_holders(found, "multicomponent")
    values = converted(found, lambda ref: _to_multicomponent(ref, components, dtype, gradients))
    for ref in found:
        ref.module.__dict__.setdefault(_BEFORE, {}).setdefault(ref.key, ref.value.dtype)
    put_converted(model, found, values)
    _recurrent_inputs.install(model)
    return model


def single_component(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Make the parameters plain tensors again, each value rounded once: the way back from `multicomponent`, in ref.

    Args:
        model: any module; parameters that are no MCTensors stay as they are.
        dtype: of the parameters; by default what each was before `multicomponent`.

    Returns:
        The same model.

    Raises:
        ValueError: a dtype that is not floating, a value out of its range, or a parameter with hooks. The model is as
            it was.

    >>> import torch
    >>> layer = torch.nn.Linear(3, 2)
    >>> start = layer.weight.detach().clone()
    >>> back = single_component(multicomponent(layer, components=3, dtype=torch.bfloat16))
    >>> type(back.weight).__name__, torch.equal(back.weight, start)
    ('Parameter', True)
    """
    if dtype is not None:
        check_dtype(dtype)
    found = [ref for ref in module_parameters(model, constants=True) if isinstance(ref.value, MCTensor)]
    _check_holders(found, "single_component")

    def plain(ref: ParameterRef) -> Tensor:
        before = ref.module.__dict__.get(_BEFORE, {}).get(ref.key, ref.value.dtype)
        return _to_single_component(ref, dtype if dtype and ref.is_parameter else before)

    put_plain(model, found, converted(found, plain))
    _recurrent_inputs.remove(model)
    for module in model.modules():
        module.__dict__.pop(_BEFORE, None)
    return model


def _check_holders(found: list[ParameterRef], what: str) -> None:
    named = [(ref.name, ref.value) for ref in found if ref.is_parameter]
    check_holders(named, what, replaced=True)


def _check(ref: ParameterRef) -> None:
    check_has_shape(ref)
    if not isinstance(ref.value, MCTensor) and hasattr(ref.value, "decode"):
        raise ValueError(
            f"parameter {ref.name!r} is {a_kind(ref.value)}: make it plain first, by "
            "halfulp.scaled.unscalify(model), or leave it out by where="
        )
    try:
        check_dtype(ref.value.dtype)
    except ValueError as error:
        raise ValueError(f"parameter {ref.name!r}: {error}; or leave it out by where=") from None


def _to_multicomponent(ref: ParameterRef, components: int, dtype: torch.dtype | None, gradients: str) -> Tensor:
    old = ref.value
    kind = dtype if dtype and ref.is_parameter else old.dtype
    try:
        value = MCTensor.encode(old.detach(), components, kind, gradients=gradients)
        if not ref.is_parameter:
            return value
        new = nn.Parameter(value, old.requires_grad)
        if old.grad is not None:
            grad = MCTensor.encode(old.grad.detach(), components, kind, gradients=gradients)
            new.grad = grad if gradients == COMPONENTS else grad.decode(kind)
    except ValueError as error:
        raise ValueError(f"parameter {ref.name!r}: {error}") from None
    return with_attributes(new, old, _OWN)


def _to_single_component(ref: ParameterRef, dtype: torch.dtype) -> Tensor:
    old = ref.value
    assert isinstance(old, MCTensor)
    value = old.detach().decode(dtype)
    if not value.is_meta and bool((value.isinf() & old.detach().decode().isfinite()).any()):
        raise ValueError(f"parameter {ref.name!r} has values beyond {dtype}: give a wider dtype=")
    if not ref.is_parameter:
        return value
    new = nn.Parameter(value, old.requires_grad)
    if old.grad is not None:
        grad = old.grad.detach()
        new.grad = grad.decode(dtype) if isinstance(grad, MCTensor) else grad.to(dtype)
    return with_attributes(new, old, _OWN)
