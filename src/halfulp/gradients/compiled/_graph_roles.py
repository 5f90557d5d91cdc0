"""Roles: what each function of a backward graph is to the gradients that it reads."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

# Opening: linear, in the derivative of a function that reads parameters alone, whose gradients have its site.
Role = Literal["product", "opening", "linear", "part", "widening", "shape", "other"]

# Functions of a gradient and one more operand, by the places of both.
MATRIX = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "outer"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), (1, 2)),
}
_RECURRENT = ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward")
# Linear in all tensors of floating point together: none of them may be a constant but zero.
_MOVES = {
    *("add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "cat", "stack", "where", "masked_fill", "tril", "triu"),
    *("view", "_unsafe_view", "reshape", "_reshape_copy", "permute", "transpose", "t", "expand", "squeeze"),
    *("unsqueeze", "clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "contiguous", "view_of"),
    *("broadcast_in_dim", "slice", "select", "slice_scatter", "select_scatter", "diagonal", "diagonal_scatter"),
    *("unfold", "as_strided"),
    *("as_strided_scatter", "split", "split_with_sizes", "unbind", "flip", "roll", "repeat", "constant_pad_nd"),
    *(
        "index",
        "_unsafe_index",
        "index_fill",
        "index_select",
        "gather",
        "index_put",
        "_unsafe_index_put",
        "index_add",
        "scatter",
    ),
    *("scatter_add", "_to_copy", "convert_element_type", "trace", "diag_embed", "im2col", "col2im"),
    *("real", "imag", "complex", "conj", "_conj", "_conj_physical", "resolve_conj", "view_as_real", "view_as_complex"),
    *("_fft_r2c", "_fft_c2r", "_fft_c2c", "view_copy", "permute_copy", "expand_copy", "slice_copy", "select_copy"),
}
# Arguments that may be a number, and then fill in or are added: zero alone is linear.
_FILLS = {
    **dict.fromkeys(("add", "sub", "rsub"), (0, 1)),
    **{"where": (1, 2), "masked_fill": (2,), "constant_pad_nd": (2,), "scatter": (3,), "index_fill": (3,)},
}
# a * b + c, by the places of a, b and c.
_FUSED = {"fma": (0, 1, 2), "addcmul": (1, 2, 0)}
_SHAPES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "sym_size", "sym_stride")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "sym_numel", "sym_storage_offset", "new_empty_strided")
_VIEWS = ("view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "reshape", "_unsafe_view", "clone")
_CASTS = ("_to_copy", "convert_element_type")
HALF = (torch.float16, torch.bfloat16)


def role_of(node: Node, gradients: Mapping[Node, None]) -> Role:
    """Return how a function treats the gradients among its arguments."""
    if node.target is operator.getitem:
        return "part"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims", "mkldnn"):
        return "other"
    name = node.target._opname
    if name in _SHAPES or name in _NEW:
        return "shape"
    if not carries(node):
        return "other"
    if name in MATRIX:
        return "product" if _one_of(node, gradients, *MATRIX[name]) else "other"
    if name == "_trilinear":
        return "product" if sum(x in gradients for x in node.args[:3]) == 1 else "other"
    if name.endswith(("_backward", "_backward_data")) or name in ("_fused_rms_norm_backward",):
        if not _alone(node, gradients):
            return "other"
        product = name == "convolution_backward" or "attention" in name or name in _RECURRENT
        return "product" if product else "linear"
    if name in _FUSED:
        return "linear" if _one_of(node, gradients, *_FUSED[name][:2]) else "other"
    if name == "mul":
        return "linear" if (node.args[0] in gradients) != (node.args[1] in gradients) else "other"
    if name == "copy":
        return _copied(node, gradients)
    if name == "div":
        plain = "rounding_mode" not in node.kwargs or node.kwargs["rounding_mode"] is None
        return "linear" if plain and node.args[0] in gradients and node.args[1] not in gradients else "other"
    if name not in _MOVES or not _is_data_movement(node, name, gradients):
        return "other"
    return "widening" if _widens(node, gradients) else "linear"


def carries(node: Node) -> bool:
    """Return whether a node's value is a floating tensor, which may hold a gradient."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves)


def _alone(node: Node, gradients: Mapping[Node, None]) -> bool:
    """Return whether only the first tensor is a gradient."""
    nodes = [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node) and _is_tensor(x)]
    return nodes[0] in gradients and not any(x in gradients for x in nodes[1:])


def _one_of(node: Node, gradients: Mapping[Node, None], a: int, b: int) -> bool:
    """Return whether one of two factors is a gradient, and all addends of their product are gradients or zero."""
    if (node.args[a] in gradients) == (node.args[b] in gradients):
        return False
    added = [x for i, x in enumerate(node.args) if i not in (a, b) and isinstance(x, Node)]
    return all(x in gradients or _is_zero(x) for x in added if _is_tensor(x))


def _is_data_movement(node: Node, name: str, gradients: Mapping[Node, None]) -> bool:
    places = [node.args[i] for i in _FILLS.get(name, ()) if i < len(node.args)]
    if any(isinstance(x, int | float) and x != 0 for x in [*places, node.kwargs.get("value", 0)]):
        return False
    tensors = [
        x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node) and _is_tensor(x) and carries(x)
    ]
    return all(x in gradients or _is_zero(x) for x in tensors)


def _copied(node: Node, gradients: Mapping[Node, None]) -> Role:
    """The second argument in the shape of the first."""
    shape, source = node.args[:2]
    assert isinstance(shape, Node)
    assert isinstance(source, Node)
    if _is_zero(source):
        return "shape"
    same = shape.meta["val"].dtype == source.meta["val"].dtype
    return "linear" if source in gradients and same else "other"


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_zero(node: object) -> bool:
    """Return whether a tensor is made of zeros, possibly through views and copies."""
    if not isinstance(node, Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._opname
    if name in ("zeros", "zeros_like", "new_zeros"):
        return True
    if name in ("full", "full_like", "scalar_tensor"):
        value = node.args[0 if name == "scalar_tensor" else 1]
        return isinstance(value, int | float) and value == 0
    if name == "copy":
        return _is_zero(node.args[1])
    one = len(node.all_input_nodes) == 1 and name in _MOVES and name not in _FILLS
    return one and _is_zero(node.all_input_nodes[0])


def narrows(node: Node) -> bool:
    """Return whether a node casts a wider tensor to float16."""
    if getattr(node.target, "_opname", None) not in _CASTS or node.meta["val"].dtype != torch.float16:
        return False
    return node.all_input_nodes[0].meta["val"].dtype != torch.float16


def _widens(node: Node, gradients: Mapping[Node, None]) -> bool:
    if getattr(node.target, "_opname", None) not in _CASTS:
        return False
    narrow = node.all_input_nodes[0].meta["val"].dtype
    return narrow in HALF and node.meta["val"].dtype not in HALF


def base_of(node: Node) -> Node:
    """The tensor that a node is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _VIEWS:
        node = node.all_input_nodes[0]
    return node
