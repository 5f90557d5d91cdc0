"""The torch functions that multiply and add up: products, and the cells of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# By name, where a function is met as a method, a function of torch and an operator of torch.ops alike.
PRODUCTS = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "addr"),
    *("linear", "bilinear", "inner", "outer", "ger", "dot", "vdot", "einsum", "tensordot", "chain_matmul"),
    *("linalg_matmul", "linalg_vecdot", "linalg_multi_dot"),
    *("multi_dot", "kron", "cdist", "smm", "sspaddmm", "hspmm", "_sparse_mm", "sparse_sampled_addmm", "matrix_power"),
    *("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_tbc"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("scaled_dot_product_attention", "multi_head_attention_forward", "_scaled_mm", "_grouped_mm"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
}
# One step in time.
CELLS = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}


def name_of(function: Callable[..., Any] | str) -> str:
    """Return the operator's name without its overload.

    >>> import torch
    >>> name_of(torch.ops.aten.mm.default), name_of(torch.conv2d)
    ('mm', 'conv2d')
    """
    name = getattr(function, "__name__", str(function))
    return name.split(".")[0].removeprefix("aten::")
