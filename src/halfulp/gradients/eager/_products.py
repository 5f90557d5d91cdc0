"""The functions that open a site: products, whose gradients have another magnitude than their inputs'."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodWrapperType
from typing import Any, Literal

from ...arithmetic.float32_products._product_functions import CELLS, PRODUCTS, name_of

OperatorKind = Literal["product", "cell", "shape", "apart", "fact", "in-place", "plain", "property"]

# Only their first argument has a gradient.
_SHAPES = {"view_as", "expand_as", "reshape_as", "type_as"}
# Each result is a view of one argument.
_APART = {"atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid"}
# What they give has no gradient, so that reading a parameter by them opens no site.
_FACTS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_same_size", "is_pinned", "data_ptr", "get_device"),
    *("type", "detach", "tolist", "item", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "register_hook", "retain_grad"),
    *("__repr__", "__format__", "__hash__", "__bool__", "__float__", "__int__", "backward", "grad"),
}
_KINDS: tuple[tuple[OperatorKind, set[str]], ...] = (
    ("product", PRODUCTS),
    ("cell", CELLS),  # all steps share a site, that of the state, which several parts of such a function read
    ("shape", _SHAPES),
    ("apart", _APART),
    ("fact", _FACTS),
)


@functools.cache
def kind_of(function: Callable[..., Any]) -> OperatorKind:
    """Return how a region treats a torch function.

    >>> import torch
    >>> kind_of(torch.matmul), kind_of(torch.conv2d), kind_of(torch.Tensor.add_), kind_of(torch.relu)
    ('product', 'product', 'in-place', 'plain')
    """
    if isinstance(function, MethodWrapperType):
        return "property"
    name = name_of(function)
    for kind, known in _KINDS:
        if name in known:
            return kind
    inplace = name.endswith("_") and not name.endswith("__")
    return "in-place" if inplace or name == "__setitem__" or name.startswith("__i") else "plain"
