"""Data movement: operators that copy or rearrange elements, applied to every component."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import torch_operators
from ....subclass._in_backward import gives_plain_gradient
from ..._mctensor import MCTensor, wrap
from ..._registry import implements
from ..._result_type import align_components, result_type
from ..elementwise._comparison import map_components, round_operand

aten = torch_operators("aten")

# The value is the first argument; what they fill in is 0, in every component.
_ONE_VALUE = (
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default, aten.take.default),
    *(aten.masked_select.default, aten.repeat.default, aten.flip.default, aten.roll.default, aten.tril.default),
    *(aten.triu.default, aten.diag_embed.default, aten.rot90.default, aten.im2col.default, aten.pixel_shuffle.default),
    *(
        aten.pixel_unshuffle.default,
        aten.channel_shuffle.default,
        aten.select_backward.default,
        aten.slice_backward.default,
    ),
    *(aten.diagonal_backward.default, aten.reflection_pad1d.default, aten.reflection_pad2d.default),
    *(aten.reflection_pad3d.default, aten.replication_pad1d.default, aten.replication_pad2d.default),
    *(aten.replication_pad3d.default, aten.upsample_nearest1d.default, aten.upsample_nearest2d.default),
    *(aten.upsample_nearest3d.default, aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec),
    *(aten.upsample_nearest3d.vec, aten.embedding.default, aten.view_copy.default, aten.expand_copy.default),
    *(aten.permute_copy.default, aten.transpose_copy.int, aten.t_copy.default, aten.slice_copy.Tensor),
    *(aten.select_copy.int, aten.unsqueeze_copy.default, aten.squeeze_copy.default, aten.squeeze_copy.dim),
    *(aten.as_strided_copy.default, aten.alias_copy.default, aten.detach_copy.default, aten.unfold_copy.default),
    *(aten._reshape_copy.default, aten.diagonal_copy.default),
)


def _of_one_value(operator: OpOverload) -> Callable:
    def move(x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
        arguments = tuple(_index(value) for value in arguments)
        return map_components(x, lambda part: operator(part, *arguments, **options))

    return move


def _index(value: Any) -> Any:
    if isinstance(value, MCTensor):
        raise TypeError("an MCTensor is no index: give an integer tensor")
    return value


for _operator in _ONE_VALUE:
    implements(_operator)(_of_one_value(_operator))


# Positions of the arguments that are values; all come to one result type.
_SEVERAL_VALUES = {
    aten.scatter.src: (0, 3),
    aten.masked_scatter.default: (0, 2),
    aten.slice_scatter.default: (0, 1),
    aten.select_scatter.default: (0, 1),
    aten.diagonal_scatter.default: (0, 1),
    aten.as_strided_scatter.default: (0, 1),
    aten.index_copy.default: (0, 3),
    aten.index_fill.int_Tensor: (0, 3),
    aten.fill.Tensor: (0, 1),
    aten.copy.default: (0, 1),
}
# Overloads that take a number where another takes a tensor.
_NUMBER_OVERLOADS = {
    aten.scatter.value: (aten.scatter.src, 3),
    aten.index_fill.int_Scalar: (aten.index_fill.int_Tensor, 3),
    aten.fill.Scalar: (aten.fill.Tensor, 1),
}


def apply_to_components(operator: OpOverload, arguments: Sequence, positions: Sequence[int], **options: Any) -> Tensor:
    """Apply an operator on several values to every component of theirs, brought to one result type."""
    form = result_type(arguments[i] for i in positions)
    if gives_plain_gradient(form.gradients, form.has_gradient):
        plain = [round_operand(x, form) if i in positions else x for i, x in enumerate(arguments)]
        return operator(*plain, **options)
    parts, scale = align_components([arguments[i] for i in positions], form)
    results = []
    for some in zip(*parts, strict=True):
        here = dict(zip(positions, some))
        results.append(operator(*(here.get(i, x) for i, x in enumerate(arguments)), **options))
    return wrap(tuple(results), scale, form.gradients)


def _of_several_values(operator: OpOverload, positions: Sequence[int]) -> Callable:
    def move(*arguments: Any, **options: Any) -> Tensor:
        return apply_to_components(operator, arguments, positions, **options)

    return move


def _of_a_number(operator: OpOverload, position: int) -> Callable:
    def move(x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
        values = [x, *arguments]
        number = torch.scalar_tensor(values[position], dtype=torch.float64, device=x.device)
        values[position] = number.expand(values[2].shape) if operator is aten.scatter.src else number
        return apply_to_components(operator, values, (0, position), **options)

    return move


for _operator, _positions in _SEVERAL_VALUES.items():
    implements(_operator)(_of_several_values(_operator, _positions))
for _operator, (_target, _position) in _NUMBER_OVERLOADS.items():
    implements(_operator)(_of_a_number(_target, _position))


@implements(aten._pack_padded_sequence.default)
def pack_padded_sequence(x: MCTensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The steps of all sequences one after the other, and how many there are of each."""
    packed = [aten._pack_padded_sequence.default(part, lengths, batch_first) for part in x._parts]
    scale = None if x._scale is None else x._scale.clone()
    return wrap(tuple(rows for rows, _ in packed), scale, x._gradients), packed[0][1]


def _concatenation(operator: OpOverload) -> Callable:
    def concatenate(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Tensor:
        form = result_type(tensors)
        if gives_plain_gradient(form.gradients, form.has_gradient):
            return operator([round_operand(x, form) for x in tensors], *arguments, **options)
        parts, scale = align_components(tensors, form)
        results = tuple(operator(list(some), *arguments, **options) for some in zip(*parts, strict=True))
        return wrap(results, scale, form.gradients)

    return concatenate


for _operator in (aten.cat.default, aten.stack.default, aten.block_diag.default):
    implements(_operator)(_concatenation(_operator))


@implements(aten.constant_pad_nd.default)
def constant_pad_nd(x: MCTensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """The values with a border of one number."""
    if value == 0:
        return map_components(x, lambda part: aten.constant_pad_nd.default(part, pad, 0))
    inside = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    outside = ~aten.constant_pad_nd.default(inside, pad, False)
    return constant_pad_nd(x, pad).masked_fill(outside, value)
