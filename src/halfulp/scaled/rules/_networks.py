"""Rules of attention and of recurrent layers, as torch's fused kernels compute them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels import torch_operators
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._operands import first_scaled, logical_of, make_scaled, operand, storage_of
from .._payloads import rms_scale_float32, to_float32, to_storage
from .._registry import implements
from .._scaled_tensor import ScaledTensor, wrap
from ._products import product_over, product_storage
from ._results import make_result, sqrt_of_count, value_of
from ._vocabulary import data_movement, measured_scale

aten = torch_operators("aten")

_INPUTS = ("query", "key", "value")
_BIAS = ("attn_mask", "attn_bias")
# Kernels that take 16-bit operands only; the others take float32.
_NARROW = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}
# Kernels of either: torch chooses them by the logical dtype. With bfloat16 they are several times as fast, and it has
# float32's range; float16 would flush gradients of small logits.
_EFFICIENT = {
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
_ALIGNMENT = 8  # elements of 16 bits that the kernels' rows are a multiple of


def _has_bfloat16_kernel(query: Tensor, value: Tensor) -> bool:
    sides = (query.shape[-1], value.shape[-1])
    return query.device.type == "cuda" and has_bfloat16(query.device) and all(n % _ALIGNMENT == 0 for n in sides)


@functools.cache
def has_bfloat16(device: torch.device) -> bool:
    """Return whether a CUDA device multiplies bfloat16 matrices: compute capability 8.0 and above."""
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _attention(operator: OpOverload) -> None:
    """Register a forward kernel: logits are values, so the query takes its own scale and the key's; v keeps sv.

    kernel(pq (sq sk), pk, pv) under the scale sv. The log-sum-exp that the backward kernel wants is plain.
    """

    def attend(*arguments: Any, **options: Any) -> tuple:
        given = arguments_by_name(operator, arguments, options)
        inputs = [given[name] for name in _INPUTS]
        query, key, value, storage = _operands(inputs, given)
        dtype = logical_of(inputs)
        kernel = _kernel_dtype(operator, storage, dtype, query, value)
        output, *others = call_by_name(
            operator, given | _payloads(query, key, value, kernel) | _bias_values(given, kernel)
        )
        if fused.engaged(output):
            return _fused_output(output, value._scale, storage, dtype), *others
        return make_result(output.to(torch.float32), value._scale.clone(), 1.0, storage, dtype), *others

    implements(operator, family="attention")(attend)


def _attention_backward(operator: OpOverload) -> None:
    """Register a backward kernel.

    With kernel(pg, pq (sq sk), pk, pv) = dq, dk, dv, db the gradients are sg sv sk dq, sg sv / sk dk, which is
    sg sv sq (dk / (sq sk)), sg dv, and sg sv db for a bias. Those of logits are about 1 / n for n keys, and sums of n
    of them about 1 / sqrt(n): that factor moves from the payloads into the scales.
    """

    def attend_backward(*arguments: Any, **options: Any) -> tuple:
        given = arguments_by_name(operator, arguments, options)
        of_output = next(name for name in given if name.startswith("grad_out"))
        tensors = [given[name] for name in (of_output, *_INPUTS, "out")]
        gradient, query, key, value, output, storage = _operands(tensors, given)
        kernel = _kernel_dtype(operator, storage, query.dtype, query, value)
        bias = _bias_values(given, kernel)
        payloads = _payloads(query, key, value, kernel) | {
            of_output: _narrow_payload(gradient, kernel),
            "out": _output_under(output, value._scale, kernel),
            "logsumexp": value_of(given["logsumexp"]),
        }
        results = call_by_name(operator, given | payloads | bias)
        sg, sq, sk, sv = (x._scale for x in (gradient, query, key, value))
        sum_scale = sqrt_of_count(key.shape[-2])
        if fused.engaged(results[0]) and not bias:
            one = 1.0 / sum_scale
            to_query, to_key, to_value, *others = results
            return (
                wrap(*fused.finish(to_query, (sg, sv, sk), storage, "product", one, sum_scale), query.dtype),
                wrap(*fused.finish(to_key, (sg, sv, sq, sk), storage, "paired", one, sum_scale), key.dtype),
                _fused_output(to_value, sg, storage, value.dtype),
                *others,
            )
        parts = [
            ((sg, sv, sk, 1.0 / sum_scale), (sum_scale,), query.dtype),
            ((sg, sv, sq, 1.0 / sum_scale), (sum_scale, 1.0 / product_over(sq, sk)), key.dtype),
            ((sg,), (), value.dtype),
            ((sg, sv, 1.0 / sum_scale), (sum_scale,), next((given[name].dtype for name in bias), None)),
        ]
        return tuple(_gradient(y, *part, storage) for y, part in zip(results, parts))

    implements(operator, family="attention")(attend_backward)


def _operands(tensors: Sequence[Any], given: dict[str, Any]) -> tuple:
    """Return tensors as payload x scale, then the storage of their result."""
    like = first_scaled([*tensors, *given.values()])
    scaled = [x for x in tensors if isinstance(x, ScaledTensor)]
    return *(operand(x, like) for x in tensors), product_storage(tuple(scaled) or (like,))


def arguments_by_name(operator: OpOverload, arguments: Sequence[Any], options: dict) -> dict[str, Any]:
    schema = operator._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return given | dict(zip((argument.name for argument in schema), arguments)) | options


def call_by_name(operator: OpOverload, given: dict[str, Any]) -> Any:
    schema = operator._schema.arguments
    positional = [given[argument.name] for argument in schema if not argument.kwarg_only]
    return operator(*positional, **{argument.name: given[argument.name] for argument in schema if argument.kwarg_only})


def _kernel_dtype(
    operator: OpOverload, storage: torch.dtype, dtype: torch.dtype, query: Tensor, value: Tensor
) -> torch.dtype:
    if operator in _EFFICIENT and storage == torch.bfloat16 and _has_bfloat16_kernel(query, value):
        return storage
    if operator not in _NARROW:
        return torch.float32
    return next((x for x in (storage, dtype) if x in (torch.float16, torch.bfloat16)), torch.float16)


def _payloads(query: ScaledTensor, key: ScaledTensor, value: ScaledTensor, kernel: torch.dtype) -> dict[str, Tensor]:
    others = {"key": _narrow_payload(key, kernel), "value": _narrow_payload(value, kernel)}
    if fused.engaged(query._payload):
        return {"query": fused.finish(query._payload, (query._scale, key._scale), kernel, "factor")[0], **others}
    payload = _powers.times(to_float32(query), product_over(query._scale, key._scale))
    return {"query": to_storage(payload, kernel), **others}


def _narrow_payload(x: ScaledTensor, kernel: torch.dtype) -> Tensor:
    return x._payload if x._payload.dtype == kernel else to_storage(to_float32(x), kernel)


def _output_under(output: ScaledTensor, scale: Tensor, kernel: torch.dtype) -> Tensor:
    """Return the output's payload under the scale of values."""
    if fused.engaged(output._payload):
        return fused.finish(output._payload, (output._scale, scale), kernel, "ratio")[0]
    return to_storage(_powers.times(to_float32(output), product_over(output._scale, scale=scale)), kernel)


def _fused_output(y: Tensor, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> ScaledTensor:
    if y.dtype == storage:
        return wrap(y, scale.clone(), dtype)
    return wrap(*fused.finish(y, (scale,), storage), dtype)


def _bias_values(given: dict[str, Any], kernel: torch.dtype) -> dict[str, Tensor]:
    """Return the logits' bias as values; boolean masks stay."""
    found = {name: given[name] for name in _BIAS if isinstance(given.get(name), Tensor)}
    return {name: value_of(x).to(kernel) if x.is_floating_point() else x for name, x in found.items()}


def _gradient(y: Any, scales: tuple, factors: tuple, dtype: torch.dtype | None, storage: torch.dtype) -> Any:
    if not isinstance(y, Tensor):
        return y
    scale, rest = _powers.product(*scales)
    values = y.to(torch.float32)
    for factor in factors:
        values = _powers.times(values, factor)
    return make_result(values, scale, rest, storage, dtype or y.dtype)


for _operator in (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
):
    _attention(_operator)

for _operator in (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
):
    _attention_backward(_operator)

# The fused attention of torch.nn's inference: on values.
measured_scale(
    *(aten._native_multi_head_attention.default, aten._transformer_encoder_layer_fwd.default), family="attention"
)


@implements(aten._fused_sdp_choice.default, family="attention")
def fused_sdp_choice(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> int:
    """Return the kernel that torch chooses for plain tensors of these shapes and logical dtypes."""

    def plain(x: Any) -> Any:
        if not isinstance(x, ScaledTensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    options = {name: plain(x) for name, x in options.items()}
    return aten._fused_sdp_choice.default(*map(plain, (query, key, value, *arguments)), **options)


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
    """Return the steps of all sequences one after the other, and how many there are of each."""
    payload, sizes = aten._pack_padded_sequence.default(x._payload, lengths, batch_first)
    return ScaledTensor(payload, x._scale.clone(), x.dtype), sizes


def _chunks(operator: OpOverload, split: OpOverload) -> None:
    """Register a split whose parts are written in place, as gates are: each owns its memory and its scale."""

    def chunks(x: ScaledTensor, *arguments: Any) -> list[Tensor]:
        return [part.clone() for part in split(x, *arguments)]

    implements(operator, family="pass-through")(chunks)


_chunks(aten.unsafe_split.Tensor, aten.split.Tensor)
_chunks(aten.unsafe_split_with_sizes.default, aten.split_with_sizes.default)
