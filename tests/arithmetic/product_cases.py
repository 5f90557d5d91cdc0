"""Calls of torch functions that multiply, one per way to write a product; a new one joins the list."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Call(NamedTuple):
    """A function, the shapes of its operands, the terms of its longest sum, and whether it is linear in each operand.

    `terms` counts those of gradients too.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    terms: int
    kwargs: Mapping[str, Any] = MappingProxyType({})
    linear: bool = True

    def operands(self, dtype: torch.dtype) -> list[Tensor]:
        """Operands of a dtype, about 1 in size, from torch's generator."""
        return [torch.randn(shape).to(dtype) for shape in self.shapes]


ATTENTION = ((2, 3, 7, 8),) * 3
CALLS = [
    Call("matmul", torch.matmul, ((5, 33), (33, 6)), 33),
    Call("operator", torch.Tensor.__matmul__, ((2, 5, 33), (33, 6)), 33),
    Call("reflected operator", torch.Tensor.__rmatmul__, ((33, 6), (5, 33)), 33),
    Call("method", torch.Tensor.matmul, ((3, 1, 5, 33), (4, 33, 6)), 60),
    Call("linalg.matmul", torch.linalg.matmul, ((5, 33), (33, 6)), 33),
    Call("mm", torch.mm, ((9, 17), (17, 4)), 17),
    Call("bmm", torch.bmm, ((3, 9, 17), (3, 17, 4)), 17),
    Call("mv", torch.mv, ((9, 17), (17,)), 17),
    Call("dot", torch.dot, ((65,), (65,)), 65),
    Call("vdot", torch.vdot, ((65,), (65,)), 65),
    Call("inner", torch.inner, ((3, 33), (4, 33)), 33),
    Call("addmm", torch.addmm, ((4,), (9, 17), (17, 4)), 18, {"beta": 0.5, "alpha": 2.0}),
    Call("addmv", torch.addmv, ((9,), (9, 17), (17,)), 18),
    Call("addbmm", torch.addbmm, ((9, 4), (3, 9, 17), (3, 17, 4)), 52),
    Call("baddbmm", torch.baddbmm, ((3, 9, 4), (3, 9, 17), (3, 17, 4)), 18),
    Call("linear", functional.linear, ((2, 5, 33), (7, 33), (7,)), 34),
    Call("linear without bias", functional.linear, ((5, 33), (7, 33)), 33),
    Call("bilinear", functional.bilinear, ((5, 6), (5, 7), (4, 6, 7)), 42),
    Call("einsum", lambda *x: torch.einsum("bij,bkj->bik", *x), ((3, 4, 17), (3, 5, 17)), 17),
    Call("tensordot", torch.tensordot, ((3, 4, 5), (4, 5, 6)), 20),
    Call("conv1d", torch.conv1d, ((2, 4, 12), (6, 4, 3), (6,)), 48, {"padding": 1}),
    Call("conv2d", torch.conv2d, ((2, 4, 9, 8), (6, 2, 3, 3), (6,)), 200, {"stride": 2, "groups": 2}),
    Call("conv3d", functional.conv3d, ((2, 2, 5, 4, 4), (3, 2, 2, 2, 2)), 160, {"dilation": 2}),
    Call("depthwise conv2d", torch.conv2d, ((2, 4, 9, 8), (4, 1, 3, 3)), 200, {"groups": 4}),
    Call("conv_transpose1d", torch.conv_transpose1d, ((2, 4, 12), (4, 3, 3), (3,)), 48),
    Call("conv_transpose2d", torch.conv_transpose2d, ((2, 4, 5, 6), (4, 3, 3, 2), (3,)), 120, {"stride": 2}),
    Call("conv_transpose3d", functional.conv_transpose3d, ((1, 2, 3, 4, 3), (2, 3, 2, 2, 2)), 80),
    Call("attention", functional.scaled_dot_product_attention, ATTENTION, 8, {"is_causal": True}, linear=False),
    Call("attention, mask", functional.scaled_dot_product_attention, (*ATTENTION, (7, 7)), 8, {}, linear=False),
]


def lstm(dtype: torch.dtype) -> tuple[Callable[..., Any], tuple]:
    """torch's function of a recurrent layer, and its arguments, whose tensors lie in tuples and lists."""
    layer = torch.nn.LSTM(6, 5, num_layers=2).to(dtype)
    state = tuple(torch.randn(2, 3, 5).to(dtype) for _ in range(2))
    inputs = torch.randn(7, 3, 6).to(dtype)
    return torch._VF.lstm, (inputs, state, layer._flat_weights, True, 2, 0.0, True, False, False)
