"""Rules of recurrent layers: torch's fused layers and cells on values, gradients under a scale of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ....kernels import torch_operators
from ... import _powers_of_two as _powers
from ..._float8 import rms_scale_float32
from ..._operands import logical_of, make_scaled, operand, storage_of, to_float32
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor
from .._results import value_of
from .._vocabulary import data_movement
from ._attention import arguments_by_name, call_by_name

aten = torch_operators("aten")


def _layer(operator: OpOverload, states: int) -> None:
    """Register a fused layer computed on values; results after the states are for its backward, and stay plain."""

    def run(*arguments: Any, **options: Any) -> tuple:
        leaves = tree_leaves((arguments, options))
        storage, dtype = storage_of(leaves), logical_of(leaves)
        arguments, options = tree_map(value_of, (arguments, options))
        results = operator(*arguments, **options)
        one = torch.ones((), dtype=torch.float32, device=results[0].device)
        return *(_encode_measured(y, one, storage, dtype) for y in results[:states]), *results[states:]

    implements(operator, family="recurrent")(run)


def _layer_backward(operator: OpOverload) -> None:
    """Register a backward: linear in the gradients of its results, which are aligned to their largest scale."""

    def run_backward(*arguments: Any, **options: Any) -> Any:
        leaves = tree_leaves((arguments, options))
        storage, dtype = storage_of(leaves), logical_of(leaves)
        given = arguments_by_name(operator, arguments, options)
        names = [name for name, x in given.items() if name.startswith("grad_") and isinstance(x, Tensor)]
        like = next(x for x in leaves if isinstance(x, ScaledTensor))
        gradients = [operand(given[name], like) for name in names]
        scale = _powers.maximum_scale(*(x._scale for x in gradients))
        payloads = [_powers.times(to_float32(x), _powers.ratio(x._scale, scale)) for x in gradients]
        given = tree_map(value_of, given) | dict(zip(names, payloads))
        return tree_map(lambda y: _encode_measured(y, scale, storage, dtype), call_by_name(operator, given))

    implements(operator, family="recurrent")(run_backward)


def _encode_measured(y: Any, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """Encode float32 values, divided by a known scale, under a measured one."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return y
    level = rms_scale_float32(y, storage)
    scale, rest = _powers.product(scale, level)
    return make_scaled(_powers.times(y / level, rest), scale, storage, dtype)


_layer(aten.mkldnn_rnn_layer.default, 3)
_layer(aten._cudnn_rnn.default, 3)
_layer(aten._thnn_fused_lstm_cell.default, 2)
_layer(aten._thnn_fused_gru_cell.default, 1)
_layer_backward(aten.mkldnn_rnn_layer_backward.default)
_layer_backward(aten._cudnn_rnn_backward.default)
_layer_backward(aten._thnn_fused_lstm_cell_backward_impl.default)
_layer_backward(aten._thnn_fused_gru_cell_backward.default)
data_movement(aten._pack_padded_sequence_backward.default, family="pass-through")


@implements(aten._pack_padded_sequence.default, family="pass-through")
def pack_padded_sequence(x: ScaledTensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The steps of all sequences one after the other, and how many there are of each."""
    payload, sizes = aten._pack_padded_sequence.default(x._payload, lengths, batch_first)
    return ScaledTensor(payload, x._scale.clone(), x.dtype), sizes


def _chunks(operator: OpOverload, split: OpOverload) -> None:
    """Register a split whose parts are written in place, as gates are: each owns its memory and its scale."""

    def chunks(x: ScaledTensor, *arguments: Any) -> list[Tensor]:
        return [part.clone() for part in split(x, *arguments)]

    implements(operator, family="pass-through")(chunks)


_chunks(aten.unsafe_split.Tensor, aten.split.Tensor)
_chunks(aten.unsafe_split_with_sizes.default, aten.split_with_sizes.default)
