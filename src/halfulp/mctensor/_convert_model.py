"""Converting a model's parameters to MCTensors (`multicomponent`) and back, and their entries in a state_dict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._messages import name_type
from ..arithmetic import MAX_COMPONENTS, PRECISION_BY_DTYPE
from ..subclass._in_backward import COMPONENTS_GRADIENTS_MODE, FIRST_GRADIENTS_MODE, check_gradients_mode
from ..subclass.models._conversion import (
    ParameterRef,
    ParameterSelector,
    check_is_module,
    check_module_takes_conversion,
    copy_attributes,
    decode_parameter,
    list_matching_parameters,
    list_module_parameters,
    replace_parameters,
)
from ..subclass.models._state_dict import StateDictLayout, check_is_state_dict, divide_by_scale_exactly, register_layout
from ._encode import check_component_count, check_dtype
from ._mctensor import MCTensor, decode_to_plain, wrap_components

# Layout of the entries below; a file of another layout is refused.
STATE_DICT_VERSION = 2
_ENTRY_SUFFIX_PATTERN = re.compile(r"\.(component_[1-3]|component_scale)$")
_SCALE_SUFFIX = "component_scale"


def plain_state_dict(state_dict: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a multi-component model's state_dict with plain tensors: every sum of components, rounded once.

    Args:
        state_dict: from `state_dict()`, torch.load or safetensors.
        dtype: of what was a sum; entries that were none stay as they are.

    Raises:
        TypeError: no mapping, such as a model instead of its state_dict.
        ValueError: a component without its first one, or another layout.

    >>> import torch
    >>> from halfulp.mctensor._convert_model import multicomponent
    >>> layer = torch.nn.Linear(3, 2)
    >>> saved = multicomponent(torch.nn.Linear(3, 2), dtype=torch.bfloat16).state_dict()
    >>> layer.load_state_dict(plain_state_dict(saved))
    <All keys matched successfully>
    """
    check_is_state_dict(state_dict, "plain_state_dict")
    bases = {_ENTRY_SUFFIX_PATTERN.sub("", name) for name in state_dict if _ENTRY_SUFFIX_PATTERN.search(name)}
    plain = {}
    for name, value in state_dict.items():
        base = _ENTRY_SUFFIX_PATTERN.sub("", name)
        if base not in bases:
            plain[name] = value
        elif name == base:
            whole = _read_mctensor_from_entries(state_dict, base)
            assert whole is not None  # `name` is one of its entries
            plain[name] = decode_to_plain(whole, dtype)
    for base in bases - plain.keys():
        _read_mctensor_from_entries(state_dict, base)
    return plain


def _make_state_dict_entries(name: str, value: MCTensor) -> dict[str, Tensor]:
    """Return the entries of a parameter: under its own name the leading component times the scale, for any loader."""
    first, *rest = value._parts
    entries = {name: first} | {f"{name}.component_{i}": part for i, part in enumerate(rest, 1)}
    if value._scale is not None:
        wide = first.double() * value._scale.double()
        narrow = wide.float()
        is_exact = first.dtype != torch.float64 and (first.is_meta or bool(((narrow == wide) | wide.isnan()).all()))
        entries |= {name: narrow if is_exact else wide, f"{name}.{_SCALE_SUFFIX}": value._scale}
    return entries


def _read_parameter_from_entries(state_dict: Mapping[str, Any], name: str, parameter: MCTensor) -> MCTensor | None:
    """Convert a parameter's entries in a file to an MCTensor of its dtype and components; None where there are none."""
    value = _read_mctensor_from_entries(state_dict, name, parameter.dtype)
    if value is None:
        return None
    count, own = len(value._parts), len(parameter._parts)
    holds, held = own * PRECISION_BY_DTYPE[parameter.dtype], count * PRECISION_BY_DTYPE[value.dtype]
    if count > 1 and held > holds:
        raise ValueError(
            f"{name!r} has {count} components of {value.dtype} in the file and {own} of {parameter.dtype} in the "
            f"model, which would lose digits: hu.multicomponent(model, components={count}, dtype={value.dtype}) first, "
            "or load hu.mctensor.plain_state_dict(state_dict)"
        )
    scaled = parameter._scale is not None
    if (count, value.dtype, value._scale is not None) == (own, parameter.dtype, scaled):
        # In memory of its own: a change of scale rewrites all of a component's memory.
        parts = tuple(p.clone() if scaled and p.untyped_storage().nbytes() != p.nbytes else p for p in value._parts)
        return wrap_components(parts, value._scale, parameter._gradients)
    scale = "auto" if scaled else "none"
    return MCTensor.encode(value, own, parameter.dtype, scale, gradients=parameter._gradients)


def _read_mctensor_from_entries(
    state_dict: Mapping[str, Any], name: str, dtype: torch.dtype | None = None
) -> MCTensor | None:
    """Return all entries of one parameter as an MCTensor; dtype: of a single component stored beside its scale."""
    first, scale = state_dict.get(name), state_dict.get(f"{name}.{_SCALE_SUFFIX}")
    rest = [state_dict.get(f"{name}.component_{i}") for i in range(1, MAX_COMPONENTS)]
    while rest and rest[-1] is None:
        rest.pop()
    if first is None:
        if rest or scale is not None:
            raise ValueError(f"the file has components or the scale of {name!r} and not {name!r} itself: it is damaged")
        return None
    if isinstance(first, MCTensor):
        return first.detach()
    if scale is not None:
        kind = rest[0].dtype if rest and rest[0] is not None else dtype
        part = None if kind is None else divide_by_scale_exactly(first, scale, kind)
        if kind is None:
            scale = None  # the leading component was stored alone, multiplied by it
        elif part is None:
            raise ValueError(
                f"{name!r} is no {kind} times {name}.{_SCALE_SUFFIX}: it was written without the entries beside it; "
                "take these away to load it as a plain tensor"
            )
        else:
            first = part
    parts = [part for part in (first, *rest) if isinstance(part, Tensor)]
    if len(parts) <= len(rest) or len({(part.shape, part.dtype) for part in parts}) != 1:
        raise ValueError(f"the components of {name!r} are not all there, or of several shapes: the file is damaged")
    if parts[0].dtype not in PRECISION_BY_DTYPE:
        raise ValueError(f"{name!r} is {parts[0].dtype} in the file: components are floating point")
    return wrap_components(tuple(part.detach() for part in parts), scale, "first")


register_layout(
    StateDictLayout(
        MCTensor,
        metadata_key="halfulp_components",
        version=STATE_DICT_VERSION,
        description="components",
        auxiliary_suffix=_ENTRY_SUFFIX_PATTERN,
        make_entries=_make_state_dict_entries,
        read_tensor=_read_parameter_from_entries,
    )
)


ModelType = TypeVar("ModelType", bound=nn.Module)
# Name of a module's record of the dtypes that its parameters had before.
_FORMER_DTYPES_KEY = "_halfulp_dtypes"


def multicomponent(
    model: ModelType,
    components: int = 2,
    dtype: torch.dtype | None = None,
    where: ParameterSelector = None,
    gradients: str = FIRST_GRADIENTS_MODE,
) -> ModelType:
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
            plain, of any floating dtype: they enter with all digits, and a wider dtype widens the results. Recurrent
            layers take inputs of the components' dtype, as torch's do: MCTensor.encode(x, components, dtype).
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
    check_is_module(model, "multicomponent")
    check_component_count(components)
    check_gradients_mode(gradients)
    if dtype is not None:
        check_dtype(dtype)
    found = list_matching_parameters(list_module_parameters(model, constants=True), where)
    for ref in found:
        _check_convertible_parameter(ref)
    replace_parameters(
        *(model, found, lambda ref: _convert_parameter_to_mctensor(ref, components, dtype, gradients)),
        "multicomponent",
        plain=False,
    )
    for ref in found:
        ref.module.__dict__.setdefault(_FORMER_DTYPES_KEY, {}).setdefault(ref.attribute_name, ref.value.dtype)
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
    found = [ref for ref in list_module_parameters(model, constants=True) if isinstance(ref.value, MCTensor)]

    def make_plain(ref: ParameterRef) -> Tensor:
        before = ref.module.__dict__.get(_FORMER_DTYPES_KEY, {}).get(ref.attribute_name, ref.value.dtype)
        return decode_parameter(ref, dtype if dtype and ref.is_parameter else before)

    replace_parameters(model, found, make_plain, "single_component", plain=True)
    for module in model.modules():
        module.__dict__.pop(_FORMER_DTYPES_KEY, None)
    return model


def _check_convertible_parameter(ref: ParameterRef) -> None:
    check_module_takes_conversion(ref)
    if not isinstance(ref.value, MCTensor) and hasattr(ref.value, "decode"):
        raise ValueError(
            f"parameter {ref.name!r} is {name_type(ref.value)}: make it plain first, by "
            "halfulp.scaled.unscalify(model), or leave it out by where="
        )
    try:
        check_dtype(ref.value.dtype)
    except ValueError as error:
        raise ValueError(f"parameter {ref.name!r}: {error}; or leave it out by where=") from None


def _convert_parameter_to_mctensor(
    ref: ParameterRef, components: int, dtype: torch.dtype | None, gradients: str
) -> Tensor:
    old = ref.value
    kind = dtype if dtype and ref.is_parameter else old.dtype
    try:
        value = MCTensor.encode(old.detach(), components, kind, gradients=gradients)
        if not ref.is_parameter:
            return value
        new = nn.Parameter(value, old.requires_grad)
        if old.grad is not None:
            grad = MCTensor.encode(old.grad.detach(), components, kind, gradients=gradients)
            new.grad = grad if gradients == COMPONENTS_GRADIENTS_MODE else grad.decode(kind)
    except ValueError as error:
        raise ValueError(f"parameter {ref.name!r}: {error}") from None
    return copy_attributes(new, old)
