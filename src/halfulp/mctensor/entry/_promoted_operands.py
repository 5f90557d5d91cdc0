"""Operators that torch refuses for operands of several dtypes: MCTensors and plain ones meet in the promoted dtype.

A float32 image enters a convolution of two bfloat16 with all digits, as it does a sum: the result has components of
float32. Where torch checks nothing, a plain operand of another dtype is encoded, as its gradients' products need that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels import torch_operators
from .._mctensor import MCTensor
from .._plain_operands import encode_plain_operands, is_plain
from .._result_type import result_type

aten = torch_operators("aten")

# Those whose operands must all have one dtype.
PROMOTED = (
    *(aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default),
    *(aten.conv3d.padding, aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
    *(aten.convolution.default, aten.conv_tbc.default, aten.prelu.default, aten.bilinear.default),
    *(aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default),
    *(aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addbmm.default, aten.addr.default),
    *(aten.inner.default, aten.tensordot.default, aten.outer.default, aten.vdot.default),
)


def of_several_dtypes(arguments: Iterable[Any]) -> bool:
    """Return whether arguments, apart from nested ones, hold tensors of several dtypes."""
    first = None
    for x in arguments:
        if isinstance(x, Tensor):
            first = first or x.dtype
            if x.dtype is not first:
                return True
    return False


def in_one_dtype(arguments: Any) -> Any:
    """Return an operator's arguments, nested ones too, with all floating tensors as MCTensors of the promoted dtype.

    They stay as they are where they have one dtype, or none is an MCTensor.
    """
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.is_floating_point()]
    first = tensors[0].dtype if tensors else None
    if all(x.dtype is first for x in tensors) or not any(isinstance(x, MCTensor) for x in tensors):
        return arguments
    form = result_type(tensors)

    def promoted(x: Any) -> Any:
        if isinstance(x, MCTensor):
            return x.to(form.dtype) if x.dtype != form.dtype else x
        return encode_plain_operands(x, form, with_gradients=True) if is_plain(x) else x

    return tree_map(promoted, arguments)
