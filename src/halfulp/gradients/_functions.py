"""Torch functions: which of them open a site, the operands of their derivatives, and the tensors in their arguments."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MethodWrapperType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..arithmetic import _float32_products
from ..arithmetic._float32_products import PRODUCT_FUNCTION_NAMES, RECURRENT_CELL_NAMES

# A region asks at every call.
get_function_name = functools.cache(_float32_products.read_operator_name)
OperatorKind = Literal["product", "cell", "shape", "fact", "in-place", "plain", "property"]

# Only their first argument has a gradient.
_FUNCTIONS_SHAPED_BY_SECOND_ARGUMENT = {"view_as", "expand_as", "reshape_as", "type_as"}
# What they give has no gradient, so that reading a parameter by them opens no site.
_FUNCTIONS_WITHOUT_GRADIENT = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_same_size", "is_pinned", "data_ptr", "get_device"),
    *("type", "detach", "tolist", "item", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "register_hook", "retain_grad"),
    *("__repr__", "__format__", "__hash__", "__bool__", "__float__", "__int__", "backward", "grad"),
}


@functools.cache
def classify_function(function: Callable[..., Any]) -> OperatorKind:
    """Return which kind of operator a torch function is, by which a region treats it.

    >>> import torch
    >>> [classify_function(function) for function in (torch.matmul, torch.conv2d, torch.Tensor.add_, torch.relu)]
    ['product', 'product', 'in-place', 'plain']
    """
    if isinstance(function, MethodWrapperType):
        return "property"
    name = get_function_name(function)
    if name in PRODUCT_FUNCTION_NAMES:
        return "product"
    if name in RECURRENT_CELL_NAMES:
        # All steps share a site, that of the state, which several parts of such a function read.
        return "cell"
    if name in _FUNCTIONS_SHAPED_BY_SECOND_ARGUMENT:
        return "shape"
    if name in _FUNCTIONS_WITHOUT_GRADIENT:
        return "fact"
    inplace = name.endswith("_") and not name.endswith("__")
    return "in-place" if inplace or name == "__setitem__" or name.startswith("__i") else "plain"


# The places of the two factors.
_FACTOR_POSITIONS_BY_MATRIX_PRODUCT = {
    **dict.fromkeys(("linear", "matmul", "__matmul__", "mm", "bmm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
}
_CONVOLUTION_NAMES = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_CONVOLUTION_GROUPS_POSITION = 6


@dataclasses.dataclass(frozen=True)
class BackwardProductOperands:
    """The operands of a product in backward, as sums over k of gradient[..., k] weight[k, ...]."""

    gradient: Tensor
    weight: Tensor
    # How many terms each sum has: K, times the kernel's size and through the groups for convolutions.
    fan: int


@dataclasses.dataclass(frozen=True)
class SecondFactor:
    """The second operand of a product in backward, by which a gradient is multiplied."""

    # With the summed dimension first.
    weight: Tensor
    # The summed dimension of the gradient.
    summed_gradient_dimension: int
    fan: int

    def align_operands(self, gradient: Tensor) -> BackwardProductOperands:
        """Return gradient and weight with the summed dimensions last and first; complex ones as real numbers."""
        gradient, weight, fan = gradient.detach().movedim(self.summed_gradient_dimension, -1), self.weight, self.fan
        if gradient.is_complex():
            gradient, weight = torch.cat([gradient.real, gradient.imag], -1), torch.cat([weight.real, weight.imag])
            fan *= 2
        return BackwardProductOperands(gradient, weight, fan)


def list_second_factors(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[SecondFactor]:
    """Return the factors by which a product's gradient is multiplied, one for each argument that it is passed on to.

    None where there is no one such factor, as in a fused attention or a recurrent layer.
    """
    name = get_function_name(function)
    given = [*args, *kwargs.values()]
    first, second = _FACTOR_POSITIONS_BY_MATRIX_PRODUCT.get(name, (0, 1))
    if (name not in _FACTOR_POSITIONS_BY_MATRIX_PRODUCT and name not in _CONVOLUTION_NAMES) or len(given) <= second:
        return
    a, b = given[first], given[second]
    if not all(isinstance(x, Tensor) and x.dim() > 1 for x in (a, b)):
        return
    left, right = a.detach(), b.detach()
    if name in _CONVOLUTION_NAMES:
        position = _CONVOLUTION_GROUPS_POSITION
        groups = kwargs.get("groups", args[position] if len(args) > position else 1)
        if "transpose" in name:
            right = right.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        yield SecondFactor(right, 1 - right.dim(), right.shape[0] // groups * math.prod(right.shape[2:]))
        return
    # A layer's input counts even where nothing is passed on to it.
    if not is_leaf_parameter(a) and (a.requires_grad or is_leaf_parameter(b)):
        # A linear layer's weight is stored transposed already.
        summed = -2 if name == "linear" else -1
        yield SecondFactor(right.movedim(summed, 0), -1, right.shape[summed])
    if not is_leaf_parameter(b) and (b.requires_grad or is_leaf_parameter(a)):
        yield SecondFactor(left.movedim(-2, 0), -2, left.shape[-2])


def is_leaf_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter and a leaf, at which its gradient ends."""
    return isinstance(tensor, nn.Parameter) and tensor.is_leaf


# tensors in nested arguments ---------------------------------------------------------------------------------

_TYPES_WITHOUT_TENSORS = (int, float, bool, str, type(None), torch.dtype, slice)


def list_differentiable_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments that require gradients."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from list_differentiable_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from list_differentiable_tensors(item)
    elif type(value) not in _TYPES_WITHOUT_TENSORS and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from list_differentiable_tensors(getattr(value, field.name, None))


def memoize_by_tensor(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function cached per tensor, so that a tensor given twice stays one tensor."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def change_tensor_once(x: Tensor) -> Tensor:
        if id(x) not in made:
            made[id(x)] = x, change(x)
        return made[id(x)][1]

    return change_tensor_once


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], differentiable_only: bool = True) -> Any:
    """Apply a function to every tensor of a structure that requires gradients; return it unchanged if none changes."""
    if type(value) in _TYPES_WITHOUT_TENSORS:
        return value
    if isinstance(value, Tensor):
        return change(value) if value.requires_grad or not differentiable_only else value
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change, differentiable_only) for item in reversed(value)][::-1]
        if all(a is b for a, b in zip(items, value)):
            return value
        # Named and structured ones keep their class, too.
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    assign: Callable[[Any, Any, Any], None] = operator.setitem
    if isinstance(value, dict):
        before = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        assign = object.__setattr__  # a frozen one has no other
    else:
        return value
    found = {key: map_tensors(item, change, differentiable_only) for key, item in before.items()}
    if all(found[key] is item for key, item in before.items()):
        return value
    # A subclass (outputs of transformers) in a copy.
    changed = {} if type(value) is dict else copy.copy(value)
    for key, item in found.items():
        assign(changed, key, item)
    return changed
