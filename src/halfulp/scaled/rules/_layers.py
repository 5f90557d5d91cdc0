"""Rules of normalisation, attention and recurrent layers, as torch's fused kernels compute them.

Statistics are kept in the payloads' space: mean under the scale s, reciprocal deviation under 1 / s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...subclass._derivation import aten, map_arguments_by_name
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._float8 import has_cuda_capability
from .._operands import (
    bring_payload_under_scale,
    choose_product_storage,
    choose_storage,
    encode_operand,
    find_scaled_tensor,
    fit_payload,
    map_tree,
    move_power_to_scale,
    promote_dtypes,
    wrap_rounded_payload,
)
from .._registry import implements, implements_each
from .._scaled_tensor import ScaledTensor, get_float32_payload, round_to_storage, wrap_payload
from .._write import write_values
from ._vocabulary import (
    convert_argument_to_float32,
    encode_under_scale,
    make_scaled_result,
    make_scaled_results,
    make_unit_scale,
    round_root_to_power_of_two,
)


def _encode_norm_statistics(
    x: ScaledTensor, eps: float, mean: Tensor | None, deviation: Tensor
) -> tuple[Any, ScaledTensor]:
    """Return a mean under x's scale s, and a reciprocal deviation under 1 / s or the smaller root of 1 / eps."""
    largest = _powers.round_number_to_power(eps**-0.5, "down") if eps > 0 else _powers.LARGEST_SCALE
    scale = x._scale.reciprocal().clamp(_powers.SMALLEST_SCALE, largest)
    held = None if mean is None else encode_under_scale(mean, x._scale, torch.float32, torch.float32)
    return held, encode_under_scale(deviation, scale, torch.float32, torch.float32)


def _make_normalised_result(y: Tensor, *operands: Any) -> ScaledTensor:
    given = [x for x in operands if isinstance(x, Tensor)]
    return fit_payload(y, make_unit_scale(y), choose_storage(given), promote_dtypes(given))


@implements_each(aten.native_layer_norm.default, aten.native_group_norm.default, family="norm")
def normalize_layer_or_groups(operator: OpOverload, x: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps) weight + bias under the scale 1, over layers or groups of channels."""
    p = encode_operand(x, find_scaled_tensor((x, *arguments)))
    y, *statistics = operator(*map(convert_argument_to_float32, (p, *arguments)))
    eps = arguments[-1]
    return _make_normalised_result(y, x, *arguments), *_encode_norm_statistics(p, eps, *statistics)


@implements(aten._fused_rms_norm.default, family="norm")
def rms_norm(x: Any, shape: Any, weight: Any, eps: float | None) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) weight under the scale 1."""
    # torch's default is that of the type in which it computes.
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    p = encode_operand(x, find_scaled_tensor((x, weight)))
    values = convert_argument_to_float32(p)
    deviation = (values.square().mean(list(range(-len(shape), 0)), keepdim=True) + eps).rsqrt()
    y = values * deviation
    y = y if weight is None else y * convert_argument_to_float32(weight)
    return _make_normalised_result(y, x, weight), _encode_norm_statistics(p, eps, None, deviation)[1]


def _scale_norm_gradients(
    g: ScaledTensor, results: Any, mask: Any, rows: int, deviation: Any, like: ScaledTensor
) -> tuple:
    """Put x's gradient under gs times the deviation's scale, weight's and bias's under gs c; None if not asked for."""
    to_x, *others = (y if wanted else None for y, wanted in zip(results, mask))
    if to_x is not None:
        level = encode_operand(deviation, like)._scale
        to_x = move_power_to_scale(to_x, g._scale, level, like._payload.dtype, like.dtype)
    sum_scale = round_root_to_power_of_two(rows)
    return to_x, *(y if y is None else make_scaled_results(y, [g._scale], [like], sum_scale) for y in others)


def _run_norm_backward(operator: OpOverload, given: tuple, like: ScaledTensor, deviation: Any, rows: int) -> tuple:
    """Run a normalisation's backward kernel on the gradient's payload and other values: to x under gs / xs."""
    g = encode_operand(given[0], like)
    results = operator(get_float32_payload(g), *map(convert_argument_to_float32, given[1:]))
    return _scale_norm_gradients(g, results, given[-1], rows, deviation, like)


@implements(aten.native_layer_norm_backward.default, family="norm")
def layer_norm_backward(*given: Any) -> tuple:
    """Return the gradients of layer normalisation with respect to its input, weight and bias."""
    gradient, x, shape, _, deviation, weight, *_ = given
    like = find_scaled_tensor((gradient, x, weight))
    rows = math.prod(x.shape[: x.dim() - len(shape)])
    return _run_norm_backward(aten.native_layer_norm_backward.default, given, like, deviation, rows)


@implements(aten.native_group_norm_backward.default, family="norm")
def group_norm_backward(*given: Any) -> tuple:
    """Return the gradients of group normalisation with respect to its input, weight and bias."""
    gradient, x, _, deviation, weight, n, _, hw, *_ = given
    like = find_scaled_tensor((gradient, x, weight))
    return _run_norm_backward(aten.native_group_norm_backward.default, given, like, deviation, n * hw)


@implements(aten._fused_rms_norm_backward.default, family="norm")
def rms_norm_backward(gradient: Any, x: Any, shape: Any, deviation: Any, weight: Any, mask: Any) -> tuple:
    """d (g w - xhat mean(g w xhat)) with xhat = x d: to x under gs / xs."""
    like = find_scaled_tensor((gradient, x, weight))
    g, inverse = encode_operand(gradient, like), convert_argument_to_float32(deviation)
    xhat = convert_argument_to_float32(x) * inverse
    weighted = (
        get_float32_payload(g) if weight is None else get_float32_payload(g) * convert_argument_to_float32(weight)
    )
    to_x = inverse * (weighted - xhat * (weighted * xhat).mean(list(range(-len(shape), 0)), keepdim=True))
    outer = list(range(x.dim() - len(shape)))
    to_weight = None
    if mask[1] and weight is not None:
        to_weight = get_float32_payload(g) * xhat
        to_weight = to_weight.sum(outer) if outer else to_weight
    return _scale_norm_gradients(g, (to_x, to_weight), mask, math.prod(x.shape[: len(outer)]), deviation, like)


def _compute_running_average(running: Any, batch: Tensor, momentum: float) -> Any:
    """Return a moving average after one step: scaled if the average is; None without one."""
    if running is None:
        return None
    if not isinstance(running, ScaledTensor):
        return running * (1 - momentum) + batch.to(running.dtype) * momentum
    wide = wrap_payload(get_float32_payload(running), running._scale, running.dtype)
    mean: Any = wide * (1 - momentum) + batch * momentum
    return wrap_rounded_payload(get_float32_payload(mean), mean._scale, running._payload.dtype, running.dtype)


# By operator: whether it trains, where that is no argument; whether an empty tensor follows its results, as some
# backends have it; and whether it writes the running statistics, or returns them.
_BATCH_NORM_FLAGS_BY_OPERATOR: dict[OpOverload, tuple[bool | None, bool, bool]] = {
    aten.native_batch_norm.default: (None, False, True),
    aten._native_batch_norm_legit.default: (None, False, True),
    aten._native_batch_norm_legit_functional.default: (None, False, False),
    aten._native_batch_norm_legit.no_stats: (None, False, True),
    aten._native_batch_norm_legit_no_training.default: (False, False, True),
    aten._batch_norm_no_update.default: (False, True, True),
    aten._batch_norm_with_update.default: (True, True, True),
    aten._batch_norm_with_update_functional.default: (True, True, False),
    aten.miopen_batch_norm.default: (None, False, True),
    aten.cudnn_batch_norm.default: (None, True, True),
}


@implements_each(*_BATCH_NORM_FLAGS_BY_OPERATOR, family="norm")
def batch_norm(operator: OpOverload, *given: Any) -> tuple:
    """Normalise over the batch in training, else by running statistics; these move in place, or follow the results."""
    training, reserve, in_place = _BATCH_NORM_FLAGS_BY_OPERATOR[operator]
    if operator is aten._native_batch_norm_legit.no_stats:
        given = (*given[:3], None, None, True, *given[4:])
    elif training is not None:
        given = (*given[:5], training, *given[5:])
    x, weight, bias, mean, variance, training, momentum, eps = given
    moved = [mean, variance]
    if not training:
        values = map(convert_argument_to_float32, (x, weight, bias, mean, variance))
        y, *_ = aten._native_batch_norm_legit_no_training.default(*values, 0.0, eps)
        empty = torch.empty(0, dtype=torch.float32, device=y.device)
        results = [_make_normalised_result(y, x, weight, bias, mean, variance), empty, empty.clone()]
    else:
        p = encode_operand(x, find_scaled_tensor((x, weight, bias)))
        zeros = torch.zeros(x.shape[1], dtype=torch.float32, device=p.device)
        y, *statistics, batch_mean, batch_variance = aten._native_batch_norm_legit_functional.default(
            *map(convert_argument_to_float32, (p, weight, bias)), zeros, zeros.clone(), True, 1.0, eps
        )
        moved = [_compute_running_average(*one, momentum) for one in ((mean, batch_mean), (variance, batch_variance))]
        results = [_make_normalised_result(y, x, weight, bias), *_encode_norm_statistics(p, eps, *statistics)]
    if reserve:
        results.append(torch.empty(0, dtype=torch.uint8, device=x.device))
    if not in_place:
        return *results, *(moved if training else (one.clone() for one in moved))
    for running, new in zip((mean, variance), moved):
        if training and running is not None:
            write_values(running, new)
    return tuple(results)


def batch_norm_backward(*given: Any) -> tuple:
    """Return the gradients: to x under gs / xs, to weight and bias under gs c."""
    _, x, _, _, variance, _, deviation, train, eps, _ = given
    like = find_scaled_tensor(given[:5])
    used = deviation if train else (convert_argument_to_float32(variance) + eps).rsqrt()
    rows = x.numel() // max(x.shape[1], 1)
    return _run_norm_backward(aten.native_batch_norm_backward.default, given, like, used, rows)


implements(aten.native_batch_norm_backward.default, family="norm")(batch_norm_backward)
# The arguments of other backends' operators: with a reserve at the end, or with the input first and no mask.
implements(aten.batch_norm_backward.default, family="norm")(lambda *given: batch_norm_backward(*given[:10]))
implements(aten.cudnn_batch_norm_backward.default, aten.miopen_batch_norm_backward.default, family="norm")(
    lambda x, gradient, *given: batch_norm_backward(gradient, x, *given[:5], True, given[5], (True, True, True))
)


def _list_attention_operators(*kernels: str, suffixes: tuple[str, ...] = ("", "_backward")) -> list[OpOverload]:
    return [getattr(aten, f"_scaled_dot_product_{name}{suffix}").default for name in kernels for suffix in suffixes]


_ATTENTION_KERNELS = (
    *("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"),
    "fused_attention_overrideable",
)
_ATTENTION_INPUT_NAMES = ("query", "key", "value")
_ATTENTION_BIAS_NAMES = ("attn_mask", "attn_bias")
# Kernels that take 16-bit operands only; the others take float32.
_SIXTEEN_BIT_ATTENTION_OPERATORS = _list_attention_operators("flash_attention", "cudnn_attention")
# Kernels of either: torch chooses them by the logical dtype. With bfloat16 they are several times as fast, and it has
# float32's range; float16 would flush gradients of small logits.
_EFFICIENT_ATTENTION_OPERATORS = _list_attention_operators("efficient_attention")
_ATTENTION_ROW_ALIGNMENT = 8  # elements of 16 bits that the kernels' rows are a multiple of


@implements_each(*_list_attention_operators(*_ATTENTION_KERNELS, suffixes=("",)), family="attention")
def compute_attention(operator: OpOverload, *arguments: Any, **options: Any) -> tuple:
    """kernel(pq (sq sk), pk, pv) under the scale sv: logits are values, so the query takes its scale and the key's."""
    # The log-sum-exp that the backward kernel wants is plain.
    given = map_arguments_by_name(operator, arguments, options)
    inputs = [given[name] for name in _ATTENTION_INPUT_NAMES]
    query, key, value, storage = _encode_attention_operands(inputs, given)
    dtype = promote_dtypes(inputs)
    kernel = _choose_kernel_dtype(operator, storage, dtype, query, value)
    payloads = _make_attention_payloads(query, key, value, kernel) | _decode_attention_bias(given, kernel)
    output, *others = call_with_named_arguments(operator, given | payloads)
    return make_scaled_result(output, (value._scale,), storage, dtype), *others


@implements_each(*_list_attention_operators(*_ATTENTION_KERNELS, suffixes=("_backward",)), family="attention")
def differentiate_attention(operator: OpOverload, *arguments: Any, **options: Any) -> tuple:
    """Return the gradients of fused attention."""
    # With kernel(pg, pq (sq sk), pk, pv) = dq, dk, dv, db the gradients are sg sv sk dq, sg sv / sk dk, which is
    # sg sv sq (dk / (sq sk)), sg dv, and sg sv db for a bias. Those of logits are about 1 / n for n keys, and sums of n
    # of them about 1 / sqrt(n): that factor moves from the payloads into the scales.
    given = map_arguments_by_name(operator, arguments, options)
    of_output = next(name for name in given if name.startswith("grad_out"))
    tensors = [given[name] for name in (of_output, *_ATTENTION_INPUT_NAMES, "out")]
    gradient, query, key, value, output, storage = _encode_attention_operands(tensors, given)
    kernel = _choose_kernel_dtype(operator, storage, query.dtype, query, value)
    bias = _decode_attention_bias(given, kernel)
    payloads = _make_attention_payloads(query, key, value, kernel) | {
        of_output: _round_payload_to_dtype(gradient, kernel),
        "out": bring_payload_under_scale(output, value._scale, kernel),
        "logsumexp": convert_argument_to_float32(given["logsumexp"]),
    }
    to_query, to_key, to_value, *others = call_with_named_arguments(operator, given | payloads | bias)
    sg, sq, sk, sv = (x._scale for x in (gradient, query, key, value))
    sum_scale = round_root_to_power_of_two(key.shape[-2])
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


def _encode_attention_operands(tensors: Sequence[Any], given: dict[str, Any]) -> tuple:
    """Return attention's operands as scaled tensors, plain ones encoded, then the storage of its result."""
    like = find_scaled_tensor([*tensors, *given.values()])
    holders = tensors if any(isinstance(x, ScaledTensor) for x in tensors) else [like]
    return *(encode_operand(x, like) for x in tensors), choose_product_storage(holders)


def call_with_named_arguments(operator: OpOverload, given: dict[str, Any]) -> Any:
    """Call an operator with all of its arguments by name."""
    schema = operator._schema.arguments
    positional = [given[argument.name] for argument in schema if not argument.kwarg_only]
    return operator(*positional, **{argument.name: given[argument.name] for argument in schema if argument.kwarg_only})


def _choose_kernel_dtype(
    operator: OpOverload, storage: torch.dtype, dtype: torch.dtype, query: Tensor, value: Tensor
) -> torch.dtype:
    if operator in _EFFICIENT_ATTENTION_OPERATORS and storage == torch.bfloat16 and query.device.type == "cuda":
        is_aligned = all(x.shape[-1] % _ATTENTION_ROW_ALIGNMENT == 0 for x in (query, value))
        if is_aligned and has_cuda_capability(query.device, 8, 0):  # which multiplies bfloat16 matrices
            return storage
    if operator not in _SIXTEEN_BIT_ATTENTION_OPERATORS:
        return torch.float32
    return next((x for x in (storage, dtype) if x in (torch.float16, torch.bfloat16)), torch.float16)


def _make_attention_payloads(
    query: ScaledTensor, key: ScaledTensor, value: ScaledTensor, kernel: torch.dtype
) -> dict[str, Tensor]:
    others = {"key": _round_payload_to_dtype(key, kernel), "value": _round_payload_to_dtype(value, kernel)}
    if _powers.has_fused_kernels(query._payload):
        own = fused.multiply_payload(query._payload, (query._scale, key._scale), kernel, "factor")[0]
    else:
        own = round_to_storage(
            get_float32_payload(query) * _powers.multiply_scales(query._scale, key._scale)[0], kernel
        )
    return {"query": own, **others}


def _round_payload_to_dtype(x: ScaledTensor, kernel: torch.dtype) -> Tensor:
    return x._payload if x._payload.dtype == kernel else round_to_storage(get_float32_payload(x), kernel)


def _decode_attention_bias(given: dict[str, Any], kernel: torch.dtype) -> dict[str, Tensor]:
    """Return the logits' bias as values; boolean masks stay."""
    found = {name: given[name] for name in _ATTENTION_BIAS_NAMES if isinstance(given.get(name), Tensor)}
    return {
        name: convert_argument_to_float32(x).to(kernel) if x.is_floating_point() else x for name, x in found.items()
    }


@implements(aten._fused_sdp_choice.default, family="attention")
def fused_sdp_choice(*arguments: Any, **options: Any) -> int:
    """Return the kernel that torch chooses for plain tensors of these shapes and logical dtypes."""

    def make_plain(x: Any) -> Any:
        if not isinstance(x, ScaledTensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    return aten._fused_sdp_choice.default(*map_tree(make_plain, arguments), **map_tree(make_plain, options))


@implements(aten._pack_padded_sequence.default, family="pass-through")
def pack_padded_sequence(x: ScaledTensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the steps of all sequences one after the other, and how many there are of each."""
    payload, sizes = aten._pack_padded_sequence.default(x._payload, lengths, batch_first)
    return ScaledTensor(payload, x._scale.clone(), x.dtype), sizes


_SPLIT_BY_UNSAFE_SPLIT = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


@implements_each(*_SPLIT_BY_UNSAFE_SPLIT, family="pass-through")
def split_into_copies(operator: OpOverload, x: ScaledTensor, *arguments: Any) -> list[Tensor]:
    """Split into parts that are written in place, as gates are: each owns its memory and its scale."""
    return [part.clone() for part in _SPLIT_BY_UNSAFE_SPLIT[operator](x, *arguments)]
