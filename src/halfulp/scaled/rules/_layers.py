"""Rules of normalisation, attention and recurrent layers, as torch's fused kernels compute them.

Statistics are kept in the payloads' space: mean under the scale s, reciprocal deviation under 1 / s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...kernels import find_torch_operators
from ...subclass._rule_table import map_arguments_by_name
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._float8 import has_capability
from .._operands import (
    bring_payload_under,
    choose_product_storage,
    choose_storage,
    find_scaled,
    make_operand,
    make_scaled,
    make_scaled_to_fit,
    move_level_to_scale,
    promote_dtypes,
)
from .._registry import implements
from .._scaled_tensor import ScaledTensor, to_float32, to_storage, wrap
from .._write import write_values
from ._vocabulary import decode_value, make_scaled_result, make_unit_scale, round_root, scale_payloads, scale_values

aten = find_torch_operators("aten")


def _scale_statistics(x: ScaledTensor, eps: float, mean: Tensor | None, deviation: Tensor) -> tuple[Any, ScaledTensor]:
    """Return a mean under x's scale s, and a reciprocal deviation under 1 / s, or under the root of 1 / eps if smaller.

    The gradient of x takes the deviation's scale.
    """
    largest = _powers.round_number(eps**-0.5, "down") if eps > 0 else _powers.LARGEST_SCALE
    scale = x._scale.reciprocal().clamp(_powers.SMALLEST_SCALE, largest)
    held = None if mean is None else scale_values(mean, x._scale, torch.float32, torch.float32)
    return held, scale_values(deviation, scale, torch.float32, torch.float32)


def _make_normalised(y: Tensor, *operands: Any) -> ScaledTensor:
    given = [x for x in operands if isinstance(x, Tensor)]
    return make_scaled_to_fit(y, make_unit_scale(y), choose_storage(given), promote_dtypes(given))


def _decode_operands(*tensors: Any) -> list[Any]:
    return [decode_value(x) for x in tensors]


@implements(aten.native_layer_norm.default, family="norm")
def layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps) weight + bias under the scale 1."""
    p = make_operand(x, find_scaled((x, weight, bias)))
    y, *statistics = aten.native_layer_norm.default(*_decode_operands(p), shape, *_decode_operands(weight, bias), eps)
    return _make_normalised(y, x, weight, bias), *_scale_statistics(p, eps, *statistics)


@implements(aten.native_group_norm.default, family="norm")
def group_norm(x: Any, weight: Any, bias: Any, n: int, c: int, hw: int, group: int, eps: float) -> tuple:
    """(x - mean) / sqrt(var + eps) weight + bias under the scale 1, over groups of channels."""
    p = make_operand(x, find_scaled((x, weight, bias)))
    y, *statistics = aten.native_group_norm.default(*_decode_operands(p, weight, bias), n, c, hw, group, eps)
    return _make_normalised(y, x, weight, bias), *_scale_statistics(p, eps, *statistics)


@implements(aten._fused_rms_norm.default, family="norm")
def rms_norm(x: Any, shape: Any, weight: Any, eps: float | None) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) weight under the scale 1."""
    # torch's default is that of the type in which it computes.
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    p = make_operand(x, find_scaled((x, weight)))
    values = decode_value(p)
    deviation = (values.square().mean(list(range(-len(shape), 0)), keepdim=True) + eps).rsqrt()
    y = values * deviation
    y = y if weight is None else y * decode_value(weight)
    return _make_normalised(y, x, weight), _scale_statistics(p, eps, None, deviation)[1]


def _scale_norm_gradients(g: ScaledTensor, results: Any, mask: Any, rows: int, level: Tensor, holder: Any) -> tuple:
    """Put x's gradient under gs times the deviation's scale, and the summed gradients of weight and bias under gs c.

    Those that are not asked for are None.
    """
    to_x, *others = (y if wanted else None for y, wanted in zip(results, mask))
    if to_x is not None:
        to_x = move_level_to_scale(to_x, g._scale, level, choose_storage([holder]), promote_dtypes([holder]))
    sum_scale = round_root(rows)
    return to_x, *(y if y is None else scale_payloads(y, [g._scale], [holder], sum_scale) for y in others)


@implements(aten.native_layer_norm_backward.default, family="norm")
def layer_norm_backward(
    gradient: Any, x: Any, shape: Any, mean: Any, deviation: Any, weight: Any, bias: Any, mask: Any
) -> tuple:
    """Return the gradients: to x under gs / xs."""
    like = find_scaled((gradient, x, weight))
    g, holder = make_operand(gradient, like), find_scaled((gradient, like))
    values, *saved = _decode_operands(x, mean, deviation)
    results = aten.native_layer_norm_backward.default(
        to_float32(g), values, shape, *saved, *_decode_operands(weight, bias), mask
    )
    rows = math.prod(x.shape[: x.dim() - len(shape)])
    return _scale_norm_gradients(g, results, mask, rows, make_operand(deviation, like)._scale, holder)


@implements(aten.native_group_norm_backward.default, family="norm")
def group_norm_backward(
    gradient: Any, x: Any, mean: Any, deviation: Any, weight: Any, n: int, c: int, hw: int, group: int, mask: Any
) -> tuple:
    """Return the gradients of group normalisation with respect to its input, weight and bias."""
    like = find_scaled((gradient, x, weight))
    g, holder = make_operand(gradient, like), find_scaled((gradient, like))
    values = _decode_operands(x, mean, deviation, weight)
    results = aten.native_group_norm_backward.default(to_float32(g), *values, n, c, hw, group, mask)
    return _scale_norm_gradients(g, results, mask, n * hw, make_operand(deviation, like)._scale, holder)


@implements(aten._fused_rms_norm_backward.default, family="norm")
def rms_norm_backward(gradient: Any, x: Any, shape: Any, deviation: Any, weight: Any, mask: Any) -> tuple:
    """d (g w - xhat mean(g w xhat)) with xhat = x d: to x under gs / xs."""
    like = find_scaled((gradient, x, weight))
    g, holder = make_operand(gradient, like), find_scaled((gradient, like))
    values, inverse = _decode_operands(x, deviation)
    xhat = values * inverse
    weighted = to_float32(g) if weight is None else to_float32(g) * decode_value(weight)
    to_x = inverse * (weighted - xhat * (weighted * xhat).mean(list(range(-len(shape), 0)), keepdim=True))
    outer = list(range(x.dim() - len(shape)))
    to_weight = None
    if mask[1] and weight is not None:
        to_weight = to_float32(g) * xhat
        to_weight = to_weight.sum(outer) if outer else to_weight
    rows = math.prod(x.shape[: len(outer)])
    return _scale_norm_gradients(g, (to_x, to_weight), mask, rows, make_operand(deviation, like)._scale, holder)


def _step_running_average(running: Any, batch: Tensor, momentum: float) -> Any:
    """Return a moving average after one step: scaled if the average is; None without one."""
    if running is None:
        return None
    if not isinstance(running, ScaledTensor):
        return running * (1 - momentum) + batch.to(running.dtype) * momentum
    wide = wrap(to_float32(running), running._scale, running.dtype)
    mean: Any = wide * (1 - momentum) + batch * momentum
    return make_scaled(to_float32(mean), mean._scale, running._payload.dtype, running.dtype)


def _compute_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> tuple[tuple, list]:
    """Return the normalised values with the statistics that are saved, and the running statistics after the step."""
    if not training:
        values = _decode_operands(x, weight, bias, mean, variance)
        y, *_ = aten._native_batch_norm_legit_no_training.default(*values, 0.0, eps)
        empty = torch.empty(0, dtype=torch.float32, device=y.device)
        return (_make_normalised(y, x, weight, bias, mean, variance), empty, empty.clone()), [mean, variance]
    p = make_operand(x, find_scaled((x, weight, bias)))
    zeros = torch.zeros(x.shape[1], dtype=torch.float32, device=p.device)
    y, *statistics, batch_mean, batch_variance = aten._native_batch_norm_legit_functional.default(
        *_decode_operands(p, weight, bias), zeros, zeros.clone(), True, 1.0, eps
    )
    moved = [_step_running_average(*one, momentum) for one in ((mean, batch_mean), (variance, batch_variance))]
    return (_make_normalised(y, x, weight, bias), *_scale_statistics(p, eps, *statistics)), moved


def _make_reserve(x: Tensor, is_wanted: bool) -> list[Tensor]:
    """Return the empty tensor that follows the results of some backends' operators."""
    return [torch.empty(0, dtype=torch.uint8, device=x.device)] if is_wanted else []


def batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any, reserve: bool = False
) -> tuple:
    """Normalised over the batch in training, the running statistics moved in place; else by those."""
    results, moved = _compute_batch_norm(x, weight, bias, mean, variance, training, *rest)
    for running, new in zip((mean, variance), moved):
        if training and running is not None:
            write_values(running, new)
    return *results, *_make_reserve(x, reserve)


def batch_norm_functional(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any, reserve: bool = False
) -> tuple:
    """Normalise like `native_batch_norm`, returning the moved running statistics as results."""
    results, moved = _compute_batch_norm(x, weight, bias, mean, variance, training, *rest)
    return *results, *_make_reserve(x, reserve), *(moved if training else (one.clone() for one in moved))


_batch_norm_rules: dict[OpOverload, Callable[..., tuple]] = {
    aten.native_batch_norm.default: batch_norm,
    aten._native_batch_norm_legit.default: batch_norm,
    aten._native_batch_norm_legit_functional.default: batch_norm_functional,
    # Those of other backends, or without some of the arguments.
    aten.miopen_batch_norm.default: batch_norm,
    aten.cudnn_batch_norm.default: lambda *given: batch_norm(*given, reserve=True),
    aten._native_batch_norm_legit.no_stats: lambda *given: batch_norm(*given[:3], None, None, True, *given[4:]),
    aten._native_batch_norm_legit_no_training.default: lambda *given: batch_norm(*given[:5], False, *given[5:]),
    aten._batch_norm_no_update.default: lambda *given: batch_norm(*given[:5], False, *given[5:], reserve=True),
    aten._batch_norm_with_update.default: lambda *given: batch_norm(*given[:5], True, *given[5:], reserve=True),
    aten._batch_norm_with_update_functional.default: lambda *given: batch_norm_functional(
        *given[:5], True, *given[5:], reserve=True
    ),
}
for _operator, _rule in _batch_norm_rules.items():
    implements(_operator, family="norm")(_rule)


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
    like = find_scaled((gradient, x, weight, mean, variance))
    g, holder = make_operand(gradient, like), find_scaled((gradient, like))
    values = _decode_operands(x, weight, mean, variance, saved, deviation)
    results = aten.native_batch_norm_backward.default(to_float32(g), *values, train, eps, mask)
    level = deviation if train else (values[3] + eps).rsqrt()
    rows = x.numel() // max(x.shape[1], 1)
    return _scale_norm_gradients(g, results, mask, rows, make_operand(level, like)._scale, holder)


# The arguments of other backends' operators: with a reserve at the end, or with the input first and no mask.
_batch_norm_backward_rule: Callable[..., tuple] = batch_norm_backward
implements(aten.batch_norm_backward.default, family="norm")(lambda *given: _batch_norm_backward_rule(*given[:10]))
implements(aten.cudnn_batch_norm_backward.default, aten.miopen_batch_norm_backward.default, family="norm")(
    lambda x, gradient, *given: _batch_norm_backward_rule(gradient, x, *given[:5], True, given[5], (True, True, True))
)


_ATTENTION_INPUT_NAMES = ("query", "key", "value")
_ATTENTION_BIAS_NAMES = ("attn_mask", "attn_bias")
# Kernels that take 16-bit operands only; the others take float32.
_SIXTEEN_BIT_ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}
# Kernels of either: torch chooses them by the logical dtype. With bfloat16 they are several times as fast, and it has
# float32's range; float16 would flush gradients of small logits.
_EFFICIENT_ATTENTION = {
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
_ROW_ALIGNMENT = 8  # elements of 16 bits that the kernels' rows are a multiple of


def _register_attention(operator: OpOverload) -> None:
    """Register a forward kernel: logits are values, so the query takes its own scale and the key's; v keeps sv.

    kernel(pq (sq sk), pk, pv) under the scale sv. The log-sum-exp that the backward kernel wants is plain.
    """

    def attend(*arguments: Any, **options: Any) -> tuple:
        given = map_arguments_by_name(operator, arguments, options)
        inputs = [given[name] for name in _ATTENTION_INPUT_NAMES]
        query, key, value, storage = _scale_attention_operands(inputs, given)
        dtype = promote_dtypes(inputs)
        kernel = _choose_kernel_dtype(operator, storage, dtype, query, value)
        output, *others = call_with_named_arguments(
            operator,
            given | _make_attention_payloads(query, key, value, kernel) | _decode_attention_bias(given, kernel),
        )
        return make_scaled_result(output, (value._scale,), storage, dtype), *others

    implements(operator, family="attention")(attend)


def _register_attention_backward(operator: OpOverload) -> None:
    """Register a backward kernel.

    With kernel(pg, pq (sq sk), pk, pv) = dq, dk, dv, db the gradients are sg sv sk dq, sg sv / sk dk, which is
    sg sv sq (dk / (sq sk)), sg dv, and sg sv db for a bias. Those of logits are about 1 / n for n keys, and sums of n
    of them about 1 / sqrt(n): that factor moves from the payloads into the scales.
    """

    def attend_backward(*arguments: Any, **options: Any) -> tuple:
        given = map_arguments_by_name(operator, arguments, options)
        of_output = next(name for name in given if name.startswith("grad_out"))
        tensors = [given[name] for name in (of_output, *_ATTENTION_INPUT_NAMES, "out")]
        gradient, query, key, value, output, storage = _scale_attention_operands(tensors, given)
        kernel = _choose_kernel_dtype(operator, storage, query.dtype, query, value)
        bias = _decode_attention_bias(given, kernel)
        payloads = _make_attention_payloads(query, key, value, kernel) | {
            of_output: _round_payload(gradient, kernel),
            "out": bring_payload_under(output, value._scale, kernel),
            "logsumexp": decode_value(given["logsumexp"]),
        }
        results = call_with_named_arguments(operator, given | payloads | bias)
        sg, sq, sk, sv = (x._scale for x in (gradient, query, key, value))
        to_query, to_key, to_value, *others = results
        sum_scale = round_root(key.shape[-2])
        factors = {"number": 1.0 / sum_scale, "factor": sum_scale}
        to_key = to_key.to(torch.float32) / _powers.multiply_scales(sq, sk)[0]
        if bias and others and isinstance(others[0], Tensor):
            dtype = next(given[name].dtype for name in bias)
            others[0] = make_scaled_result(others[0], (sg, sv), storage, dtype, **factors)
        return (
            make_scaled_result(to_query, (sg, sv, sk), storage, query.dtype, **factors),
            make_scaled_result(to_key, (sg, sv, sq), storage, key.dtype, **factors),
            make_scaled_result(to_value, (sg,), storage, value.dtype),
            *others,
        )

    implements(operator, family="attention")(attend_backward)


def _scale_attention_operands(tensors: Sequence[Any], given: dict[str, Any]) -> tuple:
    """Return tensors as payload x scale, then the storage of their result."""
    like = find_scaled([*tensors, *given.values()])
    scaled = [x for x in tensors if isinstance(x, ScaledTensor)]
    return *(make_operand(x, like) for x in tensors), choose_product_storage(tuple(scaled) or (like,))


def call_with_named_arguments(operator: OpOverload, given: dict[str, Any]) -> Any:
    schema = operator._schema.arguments
    positional = [given[argument.name] for argument in schema if not argument.kwarg_only]
    return operator(*positional, **{argument.name: given[argument.name] for argument in schema if argument.kwarg_only})


def _choose_kernel_dtype(
    operator: OpOverload, storage: torch.dtype, dtype: torch.dtype, query: Tensor, value: Tensor
) -> torch.dtype:
    if operator in _EFFICIENT_ATTENTION and storage == torch.bfloat16 and query.device.type == "cuda":
        is_aligned = all(x.shape[-1] % _ROW_ALIGNMENT == 0 for x in (query, value))
        if is_aligned and has_capability(query.device, 8, 0):  # which multiplies bfloat16 matrices
            return storage
    if operator not in _SIXTEEN_BIT_ATTENTION:
        return torch.float32
    return next((x for x in (storage, dtype) if x in (torch.float16, torch.bfloat16)), torch.float16)


def _make_attention_payloads(
    query: ScaledTensor, key: ScaledTensor, value: ScaledTensor, kernel: torch.dtype
) -> dict[str, Tensor]:
    others = {"key": _round_payload(key, kernel), "value": _round_payload(value, kernel)}
    if _powers.is_fused(query._payload):
        own = fused.finish_payload(query._payload, (query._scale, key._scale), kernel, "factor")[0]
    else:
        own = to_storage(to_float32(query) * _powers.multiply_scales(query._scale, key._scale)[0], kernel)
    return {"query": own, **others}


def _round_payload(x: ScaledTensor, kernel: torch.dtype) -> Tensor:
    return x._payload if x._payload.dtype == kernel else to_storage(to_float32(x), kernel)


def _decode_attention_bias(given: dict[str, Any], kernel: torch.dtype) -> dict[str, Tensor]:
    """Return the logits' bias as values; boolean masks stay."""
    found = {name: given[name] for name in _ATTENTION_BIAS_NAMES if isinstance(given.get(name), Tensor)}
    return {name: decode_value(x).to(kernel) if x.is_floating_point() else x for name, x in found.items()}


for _operator in (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
):
    _register_attention(_operator)

for _operator in (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
):
    _register_attention_backward(_operator)


@implements(aten._fused_sdp_choice.default, family="attention")
def fused_sdp_choice(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> int:
    """Return the kernel that torch chooses for plain tensors of these shapes and logical dtypes."""

    def plain(x: Any) -> Any:
        if not isinstance(x, ScaledTensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    options = {name: plain(x) for name, x in options.items()}
    return aten._fused_sdp_choice.default(*map(plain, (query, key, value, *arguments)), **options)


@implements(aten._pack_padded_sequence.default, family="pass-through")
def pack_padded_sequence(x: ScaledTensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the steps of all sequences one after the other, and how many there are of each."""
    payload, sizes = aten._pack_padded_sequence.default(x._payload, lengths, batch_first)
    return ScaledTensor(payload, x._scale.clone(), x.dtype), sizes


def _register_chunks(operator: OpOverload, split: OpOverload) -> None:
    """Register a split whose parts are written in place, as gates are: each owns its memory and its scale."""

    def chunks(x: ScaledTensor, *arguments: Any) -> list[Tensor]:
        return [part.clone() for part in split(x, *arguments)]

    implements(operator, family="pass-through")(chunks)


_register_chunks(aten.unsafe_split.Tensor, aten.split.Tensor)
_register_chunks(aten.unsafe_split_with_sizes.default, aten.split_with_sizes.default)
