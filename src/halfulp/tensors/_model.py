"""A model's parameters as multi-component tensors, and back."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import _collectives as _collectives
from . import _model_fallbacks, _state_dict
from . import _recurrent as _recurrent
from ._backward import COMPONENTS, FIRST, check_gradients
from ._mctensor import MCTensor
from ._numbers import check_count, check_dtype

Where = str | Iterable[str] | Callable[[nn.Module, str], bool] | None

# Name of a module's record of the dtypes that its parameters had before.
_BEFORE = "_halfulp_dtypes"


def multicomponent(
    model: nn.Module,
    components: int = 2,
    dtype: torch.dtype | None = None,
    where: Where = None,
    gradients: str = FIRST,
) -> nn.Module:
    """Hold a model's parameters as sums of several components: in place, like nn.Module.to.

    Every matched parameter becomes an nn.Parameter that is an MCTensor, with every digit that fits; its modules, their
    forward methods and torch.optim optimizers stay as they are. A parameter that several modules share stays shared.
    Parameters are new objects: make optimizers afterwards. Buffers stay as they are, but for floating ones that are not
    saved: those are constants (rotary frequencies, positions) that models cast to the parameters' dtype, and are given
    as many components of their own dtype, so that such a cast keeps their digits.

    `state_dict` holds plain tensors: `weight`, `weight.component_1`, ..., and `weight.scale` where there is one.
    DistributedDataParallel averages gradients as plain tensors.

    Args:
        model: any module; its parameters are floating tensors, plain or MCTensors. Inputs have the components' dtype
            or are MCTensors; a wider dtype widens the results.
        components: 1 to 4.
        dtype: of the components, one of float16, bfloat16, float32 and float64; each parameter's own by default.
        where: which parameters and such buffers, a glob over qualified names ("encoder.*.weight"), several of them, or
            a function of the module that holds one and its qualified name; all by default.
        gradients: "first": `p.grad` is a plain tensor of the components' dtype; "components": an MCTensor.

    Returns:
        The same model.

    Raises:
        ValueError: components not in 1 to 4, integer or complex data or dtype, a pattern that matches no parameter, a
            value out of the components' range. The model is as it was.

    >>> import torch
    >>> layer = multicomponent(torch.nn.Linear(3, 2), components=2, dtype=torch.bfloat16)
    >>> list(layer.state_dict())
    ['weight', 'weight.component_1', 'bias', 'bias.component_1']
    >>> layer(torch.ones(3)).components[1].shape
    torch.Size([2])
    """
    check_count(components)
    check_gradients(gradients)
    if dtype is not None:
        check_dtype(dtype)
    places = _chosen(model, where)
    made: dict[int, Tensor] = {}
    for place in places:
        if id(place.held) not in made:
            made[id(place.held)] = _multiplied(place, components, dtype, gradients)
    for place in places:
        place.module.__dict__.setdefault(_BEFORE, {}).setdefault(place.key, place.held.dtype)
        place.put(made[id(place.held)])
        _state_dict.install(place.module)
    _state_dict.install_check(model)
    _model_fallbacks.install(model)
    return model


def single_component(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Make the parameters plain tensors again, each value rounded once: the way back from `multicomponent`, in place.

    Args:
        model: any module; parameters that are no MCTensors stay as they are.
        dtype: of the parameters; by default what each was before `multicomponent`.

    Returns:
        The same model.

    Raises:
        ValueError: a dtype that is not floating, or a value out of its range. The model is as it was.

    >>> import torch
    >>> layer = torch.nn.Linear(3, 2)
    >>> start = layer.weight.detach().clone()
    >>> back = single_component(multicomponent(layer, components=3, dtype=torch.bfloat16))
    >>> type(back.weight).__name__, torch.equal(back.weight, start)
    ('Parameter', True)
    """
    if dtype is not None:
        check_dtype(dtype)
    places = [place for place in _places(model) if isinstance(place.held, MCTensor)]
    made: dict[int, Tensor] = {}
    for place in places:
        if id(place.held) not in made:
            before = place.module.__dict__.get(_BEFORE, {}).get(place.key, place.held.dtype)
            made[id(place.held)] = _single(place, dtype if dtype and place.is_parameter else before)
    for place in places:
        place.put(made[id(place.held)])
    for module in model.modules():
        module.__dict__.pop(_BEFORE, None)
        _state_dict.remove(module)
        _model_fallbacks.remove(module)
    return model


class _Place(NamedTuple):
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


def _places(model: nn.Module) -> Iterator[_Place]:
    """Every place of a parameter, and of a floating buffer that is not saved."""
    for path, module in model.named_modules():
        constants = {
            key: value
            for key, value in module._buffers.items()
            if key in module._non_persistent_buffers_set and value is not None and value.is_floating_point()
        }
        for key, value in (*module._parameters.items(), *constants.items()):
            if value is not None:
                yield _Place(f"{path}.{key}" if path else key, module, key, value)


def _chosen(model: nn.Module, where: Where) -> list[_Place]:
    """The places of everything that is matched under any of its names."""
    places = list(_places(model))
    matches = _matcher(where, [place.name for place in places])
    matched = {id(place.held) for place in places if matches(place.module, place.name)}
    if where is not None and not matched:
        raise ValueError(f"where={where!r} matches none of the model's {len(places)} parameters")
    chosen = [place for place in places if id(place.held) in matched]
    for place in chosen:
        _check(place)
    return chosen


def _matcher(where: Where, names: list[str]) -> Callable[[nn.Module, str], bool]:
    if where is None:
        return lambda module, name: True
    if callable(where):
        return where
    globs = [where] if isinstance(where, str) else list(where)
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(f"where holds {glob!r}: allowed are globs over names, or one function f(module, name)")
        if not fnmatch.filter(names, glob):
            near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the names are {names[:5]} ..."
            raise ValueError(f"where={glob!r} matches no parameter; {hint}")
    return lambda module, name: any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _check(place: _Place) -> None:
    if isinstance(place.held, nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"parameter {place.name!r} has no shape yet: run one batch through the model first")
    try:
        check_dtype(place.held.dtype)
    except ValueError as error:
        raise ValueError(f"parameter {place.name!r}: {error}; or leave it out by where=") from None


def _multiplied(place: _Place, components: int, dtype: torch.dtype | None, gradients: str) -> Tensor:
    old = place.held
    kind = dtype if dtype and place.is_parameter else old.dtype
    try:
        value = MCTensor.encode(old.detach(), components, kind, gradients=gradients)
        if not place.is_parameter:
            return value
        new = nn.Parameter(value, old.requires_grad)
        if old.grad is not None:
            grad = MCTensor.encode(old.grad.detach(), components, kind, gradients=gradients)
            new.grad = grad if gradients == COMPONENTS else grad.decode(kind)
    except ValueError as error:
        raise ValueError(f"parameter {place.name!r}: {error}") from None
    return _with_marks(new, old)


def _single(place: _Place, dtype: torch.dtype) -> Tensor:
    old = place.held
    value = old.detach().decode(dtype)
    if not value.is_meta and bool((value.isinf() & old.detach().decode().isfinite()).any()):
        raise ValueError(f"parameter {place.name!r} has values beyond {dtype}: give a wider dtype=")
    if not place.is_parameter:
        return value
    new = nn.Parameter(value, old.requires_grad)
    if old.grad is not None:
        grad = old.grad.detach()
        new.grad = grad.decode(dtype) if isinstance(grad, MCTensor) else grad.to(dtype)
    return _with_marks(new, old)


def _with_marks(new: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """What users hang on a parameter (marks for weight decay and the like) goes along."""
    own = ("_parts", "_scale", "_gradients", "_is_param")
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name not in own})
    return new
