"""Rules of normalisation, attention and recurrent layers, as torch's fused kernels compute them.

Statistics are kept in the payloads' space: mean under the scale s, reciprocal deviation under 1 / s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...kernels import torch_operators
from ...subclass._rule_table import arguments_by_name
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._operands import (
    first_scaled,
    logical_of,
    make_levelled,
    make_scaled,
    operand,
    payload_under,
    product_storage,
    storage_of,
)
from .._payloads import to_float32, to_storage
from .._registry import implements
from .._scaled_tensor import ScaledTensor, wrap
from .._write import write
from ._vocabulary import (
    data_movement,
    measured_scale,
    payloads_under,
    result_under,
    sqrt_of_count,
    value_of,
    values_under,
    values_under_one,
)

aten = torch_operators("aten")


def _scale_statistics(x: ScaledTensor, eps: float, mean: Tensor | None, deviation: Tensor) -> tuple[Any, ScaledTensor]:
    """Return a mean under x's scale s, and a reciprocal deviation under 1 / s, or under the root of 1 / eps if smaller.

    The gradient of x takes the deviation's scale.
    """
    largest = _powers.power_of(eps**-0.5, "down") if eps > 0 else _powers.LARGEST
    scale = x._scale.reciprocal().clamp(_powers.SMALLEST, largest)
    held = None if mean is None else values_under(mean, x._scale, torch.float32, torch.float32)
    return held, values_under(deviation, scale, torch.float32, torch.float32)


def _make_normalised(y: Tensor, *operands: Any) -> ScaledTensor:
    given = [x for x in operands if isinstance(x, Tensor)]
    return values_under_one(y, storage_of(given), logical_of(given))


def _operand_values(*tensors: Any) -> list[Any]:
    return [value_of(x) for x in tensors]


@implements(aten.native_layer_norm.default, family="norm")
def layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps) weight + bias under the scale 1."""
    p = operand(x, first_scaled((x, weight, bias)))
    y, *statistics = aten.native_layer_norm.default(*_operand_values(p), shape, *_operand_values(weight, bias), eps)
    return _make_normalised(y, x, weight, bias), *_scale_statistics(p, eps, *statistics)


@implements(aten.native_group_norm.default, family="norm")
def group_norm(x: Any, weight: Any, bias: Any, n: int, c: int, hw: int, group: int, eps: float) -> tuple:
    """(x - mean) / sqrt(var + eps) weight + bias under the scale 1, over groups of channels."""
    p = operand(x, first_scaled((x, weight, bias)))
    y, *statistics = aten.native_group_norm.default(*_operand_values(p, weight, bias), n, c, hw, group, eps)
    return _make_normalised(y, x, weight, bias), *_scale_statistics(p, eps, *statistics)


@implements(aten._fused_rms_norm.default, family="norm")
def rms_norm(x: Any, shape: Any, weight: Any, eps: float | None) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) weight under the scale 1."""
    # torch's default is that of the type in which it computes.
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    p = operand(x, first_scaled((x, weight)))
    values = value_of(p)
    deviation = (values.square().mean(list(range(-len(shape), 0)), keepdim=True) + eps).rsqrt()
    y = values * deviation
    y = y if weight is None else y * value_of(weight)
    return _make_normalised(y, x, weight), _scale_statistics(p, eps, None, deviation)[1]


def _norm_gradients(g: ScaledTensor, results: Any, rows: int, level: Tensor, holder: Any) -> tuple:
    """Put x's gradient under gs times the deviation's scale, and the summed gradients of weight and bias under gs c."""
    to_x, *others = results
    if to_x is not None:
        to_x = make_levelled(to_x, g._scale, level, storage_of([holder]), logical_of([holder]))
    sum_scale = sqrt_of_count(rows)
    return to_x, *(y if y is None else payloads_under(y, [g._scale], [holder], sum_scale) for y in others)


def _keep_requested(results: Any, mask: Any) -> list[Any]:
    return [y if wanted else None for y, wanted in zip(results, mask)]


@implements(aten.native_layer_norm_backward.default, family="norm")
def layer_norm_backward(
    gradient: Any, x: Any, shape: Any, mean: Any, deviation: Any, weight: Any, bias: Any, mask: Any
) -> tuple:
    """Return the gradients: to x under gs / xs."""
    like = first_scaled((gradient, x, weight))
    g, holder = operand(gradient, like), first_scaled((gradient, like))
    values, *saved = _operand_values(x, mean, deviation)
    results = aten.native_layer_norm_backward.default(
        to_float32(g), values, shape, *saved, *_operand_values(weight, bias), mask
    )
    rows = math.prod(x.shape[: x.dim() - len(shape)])
    return _norm_gradients(g, _keep_requested(results, mask), rows, operand(deviation, like)._scale, holder)


@implements(aten.native_group_norm_backward.default, family="norm")
def group_norm_backward(
    gradient: Any, x: Any, mean: Any, deviation: Any, weight: Any, n: int, c: int, hw: int, group: int, mask: Any
) -> tuple:
    """Return the gradients of group normalisation with respect to its input, weight and bias."""
    like = first_scaled((gradient, x, weight))
    g, holder = operand(gradient, like), first_scaled((gradient, like))
    values = _operand_values(x, mean, deviation, weight)
    results = aten.native_group_norm_backward.default(to_float32(g), *values, n, c, hw, group, mask)
    return _norm_gradients(g, _keep_requested(results, mask), n * hw, operand(deviation, like)._scale, holder)


@implements(aten._fused_rms_norm_backward.default, family="norm")
def rms_norm_backward(gradient: Any, x: Any, shape: Any, deviation: Any, weight: Any, mask: Any) -> tuple:
    """d (g w - xhat mean(g w xhat)) with xhat = x d: to x under gs / xs."""
    like = first_scaled((gradient, x, weight))
    g, holder = operand(gradient, like), first_scaled((gradient, like))
    values, inverse = _operand_values(x, deviation)
    xhat = values * inverse
    weighted = to_float32(g) if weight is None else to_float32(g) * value_of(weight)
    to_x = inverse * (weighted - xhat * (weighted * xhat).mean(list(range(-len(shape), 0)), keepdim=True))
    outer = list(range(x.dim() - len(shape)))
    to_weight = None
    if mask[1] and weight is not None:
        to_weight = to_float32(g) * xhat
        to_weight = to_weight.sum(outer) if outer else to_weight
    results, rows = (to_x if mask[0] else None, to_weight), math.prod(x.shape[: len(outer)])
    return _norm_gradients(g, results, rows, operand(deviation, like)._scale, holder)


def _normalise_batch(x: Any, weight: Any, bias: Any, eps: float) -> tuple:
    """Normalise over the batch; return the saved statistics too, and the mean and unbiased variance as values."""
    p = operand(x, first_scaled((x, weight, bias)))
    zeros = torch.zeros(x.shape[1], dtype=torch.float32, device=p.device)
    y, *statistics, mean, variance = aten._native_batch_norm_legit_functional.default(
        *_operand_values(p, weight, bias), zeros, zeros.clone(), True, 1.0, eps
    )
    return _make_normalised(y, x, weight, bias), *_scale_statistics(p, eps, *statistics), (mean, variance)


def _step_average(running: Any, batch: Tensor, momentum: float) -> Any:
    """Return a moving average after one step: scaled if the average is."""
    if not isinstance(running, ScaledTensor):
        return running * (1 - momentum) + batch.to(running.dtype) * momentum
    wide = wrap(to_float32(running), running._scale, running.dtype)
    mean: Any = wide * (1 - momentum) + batch * momentum
    return make_scaled(to_float32(mean), mean._scale, running._payload.dtype, running.dtype)


def _normalise_in_evaluation(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, eps: float) -> tuple:
    values = _operand_values(x, weight, bias, mean, variance)
    y, *_ = aten._native_batch_norm_legit_no_training.default(*values, 0.0, eps)
    empty = torch.empty(0, dtype=torch.float32, device=y.device)
    return _make_normalised(y, x, weight, bias, mean, variance), empty, empty.clone()


@implements(aten.native_batch_norm.default, aten._native_batch_norm_legit.default, family="norm")
def batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> tuple:
    """Normalised over the batch in training, the running statistics moved in place; else by those."""
    if not training:
        return _normalise_in_evaluation(x, weight, bias, mean, variance, eps)
    y, saved, deviation, batch = _normalise_batch(x, weight, bias, eps)
    for running, new in zip((mean, variance), batch):
        if running is not None:
            write(running, _step_average(running, new, momentum))
    return y, saved, deviation


@implements(aten._native_batch_norm_legit.no_stats, family="norm")
def batch_norm_without_running(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> tuple:
    """Normalise over the batch."""
    return batch_norm(x, weight, bias, None, None, True, momentum, eps)


@implements(aten._native_batch_norm_legit_functional.default, family="norm")
def batch_norm_functional(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> tuple:
    """Normalise like `native_batch_norm`, returning the moved running statistics as results."""
    if not training:
        return *_normalise_in_evaluation(x, weight, bias, mean, variance, eps), mean.clone(), variance.clone()
    y, saved, deviation, batch = _normalise_batch(x, weight, bias, eps)
    return y, saved, deviation, _step_average(mean, batch[0], momentum), _step_average(variance, batch[1], momentum)


def _register_variants() -> None:
    """Register the operators of other backends: the same results, of which some are followed by an empty reserve."""

    normal: Callable[..., tuple] = batch_norm
    functional: Callable[..., tuple] = batch_norm_functional

    def reserve(x: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=x.device)

    def functional_with_reserve(x: Any, *given: Any) -> tuple:
        results = functional(x, *given[:4], True, *given[4:])
        return *results[:3], reserve(x), *results[3:]

    def in_evaluation(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float) -> tuple:
        return _normalise_in_evaluation(x, weight, bias, mean, variance, eps)

    variants: dict[OpOverload, Callable[..., tuple]] = {
        aten.miopen_batch_norm.default: normal,
        aten.cudnn_batch_norm.default: lambda x, *given: (*normal(x, *given), reserve(x)),
        aten._native_batch_norm_legit_no_training.default: in_evaluation,
        aten._batch_norm_no_update.default: lambda x, *given: (*in_evaluation(x, *given), reserve(x)),
        aten._batch_norm_with_update.default: lambda x, *given: (
            *normal(x, *given[:4], True, *given[4:]),
            reserve(x),
        ),
        aten._batch_norm_with_update_functional.default: functional_with_reserve,
    }
    for operator, rule in variants.items():
        implements(operator, family="norm")(rule)


_register_variants()


@implements(aten.native_batch_norm_backward.default, family="norm")
def batch_norm_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    mean: Any,
    variance: Any,
    saved: Any,
    deviation: Any,
    train: bool,
    eps: float,
    mask: Any,
) -> tuple:
    """Return the gradients: to x under gs / xs, to weight and bias under gs c."""
    like = first_scaled((gradient, x, weight, mean, variance))
    g, holder = operand(gradient, like), first_scaled((gradient, like))
    values = _operand_values(x, weight, mean, variance, saved, deviation)
    results = aten.native_batch_norm_backward.default(to_float32(g), *values, train, eps, mask)
    level = deviation if train else (values[3] + eps).rsqrt()
    rows = x.numel() // max(x.shape[1], 1)
    return _norm_gradients(g, _keep_requested(results, mask), rows, operand(level, like)._scale, holder)


# The arguments of other backends' operators: with a reserve at the end, or with the input first and no mask.
_backward: Callable[..., tuple] = batch_norm_backward
implements(aten.batch_norm_backward.default, family="norm")(lambda *given: _backward(*given[:10]))
implements(aten.cudnn_batch_norm_backward.default, aten.miopen_batch_norm_backward.default, family="norm")(
    lambda x, gradient, *given: _backward(gradient, x, *given[:5], True, given[5], (True, True, True))
)


measured_scale(aten._weight_norm_interface_backward.default, family="norm")


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
        return result_under(output, (value._scale,), storage, dtype), *others

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
            "out": payload_under(output, value._scale, kernel),
            "logsumexp": value_of(given["logsumexp"]),
        }
        results = call_by_name(operator, given | payloads | bias)
        sg, sq, sk, sv = (x._scale for x in (gradient, query, key, value))
        to_query, to_key, to_value, *others = results
        sum_scale = sqrt_of_count(key.shape[-2])
        factors = {"number": 1.0 / sum_scale, "factor": sum_scale}
        to_key = to_key.to(torch.float32) / _powers.product(sq, sk)[0]
        if bias and others and isinstance(others[0], Tensor):
            dtype = next(given[name].dtype for name in bias)
            others[0] = result_under(others[0], (sg, sv), storage, dtype, **factors)
        return (
            result_under(to_query, (sg, sv, sk), storage, query.dtype, **factors),
            result_under(to_key, (sg, sv, sq), storage, key.dtype, **factors),
            result_under(to_value, (sg,), storage, value.dtype),
            *others,
        )

    implements(operator, family="attention")(attend_backward)


def _operands(tensors: Sequence[Any], given: dict[str, Any]) -> tuple:
    """Return tensors as payload x scale, then the storage of their result."""
    like = first_scaled([*tensors, *given.values()])
    scaled = [x for x in tensors if isinstance(x, ScaledTensor)]
    return *(operand(x, like) for x in tensors), product_storage(tuple(scaled) or (like,))


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
        own = fused.finish(query._payload, (query._scale, key._scale), kernel, "factor")[0]
    else:
        own = to_storage(to_float32(query) * _powers.product(query._scale, key._scale)[0], kernel)
    return {"query": own, **others}


def _narrow_payload(x: ScaledTensor, kernel: torch.dtype) -> Tensor:
    return x._payload if x._payload.dtype == kernel else to_storage(to_float32(x), kernel)


def _bias_values(given: dict[str, Any], kernel: torch.dtype) -> dict[str, Tensor]:
    """Return the logits' bias as values; boolean masks stay."""
    found = {name: given[name] for name in _BIAS if isinstance(given.get(name), Tensor)}
    return {name: value_of(x).to(kernel) if x.is_floating_point() else x for name, x in found.items()}


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


# Results after the states are for the backward pass, and stay plain.
measured_scale(aten.mkldnn_rnn_layer.default, aten._cudnn_rnn.default, family="recurrent", scaled=3)
measured_scale(aten._thnn_fused_lstm_cell.default, family="recurrent", scaled=2)
measured_scale(aten._thnn_fused_gru_cell.default, family="recurrent", scaled=1)
measured_scale(
    *(aten.mkldnn_rnn_layer_backward.default, aten._cudnn_rnn_backward.default),
    *(aten._thnn_fused_lstm_cell_backward_impl.default, aten._thnn_fused_gru_cell_backward.default),
    family="recurrent",
)
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
