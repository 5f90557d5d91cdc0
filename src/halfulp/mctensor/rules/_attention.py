"""Attention as single operators, in place of torch's fused kernels for plain dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ...kernels import torch_operators
from ...subclass._rule_table import map_arguments_by_name
from .._derivation import implements_beyond_float64, run_in_float64, run_in_steps
from .._mctensor import implements
from .._result_type import result_type

aten = torch_operators("aten")


def _compute_scores(query: Any, key: Any, causal: bool, mask: Any, scale: float | None) -> Any:
    scores = query @ key.transpose(-2, -1) * _find_score_factor(query, scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores


def _find_score_factor(query: Any, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _repeat_heads(query: Any, x: Any) -> Any:
    """Repeat the heads of keys or values for the query's groups (grouped-query attention, arXiv 2305.13245)."""
    if x.dim() < 3 or x.shape[-3] == query.shape[-3]:
        return x
    groups = query.shape[-3] // x.shape[-3]
    return x.unsqueeze(-3).expand(*x.shape[:-2], groups, *x.shape[-2:]).flatten(-4, -3)


def _sum_over_repeated_heads(x: Any, gradient: Any) -> Any:
    """Return the gradient of keys or values: the sum over the repeated ones."""
    if x.dim() < 3 or x.shape[-3] == gradient.shape[-3]:
        return gradient
    return gradient.unflatten(-3, (x.shape[-3], -1)).sum(-3)


def compute_attention(
    query: Any, key: Any, value: Any, causal: bool = False, mask: Any = None, scale: float | None = None
) -> tuple[Any, Any]:
    """softmax(query key^T scale + mask) value, and the logarithms of the sums."""
    key, value = _repeat_heads(query, key), _repeat_heads(query, value)
    scores = _compute_scores(query, key, causal, mask, scale)
    sums = scores.logsumexp(-1)
    return _compute_softmax(scores, sums) @ value, sums


def _compute_softmax(scores: Any, sums: Any) -> Any:
    """Return the softmax of scores; 0 in a row that is masked whole, as in torch's kernels."""
    return (scores - sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1)).exp()


def compute_attention_gradients(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    sums: Any,
    causal: bool = False,
    mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Return the gradients of query, key, value and mask."""
    narrow_key, narrow_value = key, value
    key, value = _repeat_heads(query, key), _repeat_heads(query, value)
    weights = _compute_softmax(_compute_scores(query, key, causal, mask, scale), sums[..., : query.shape[-2]])
    back = gradient @ value.transpose(-2, -1) - (gradient * out).sum(-1, keepdim=True)
    change = weights * back
    factor = _find_score_factor(query, scale)
    to_query, to_key = change @ key * factor, change.transpose(-2, -1) @ query * factor
    to_value = weights.transpose(-2, -1) @ gradient
    return (
        to_query,
        _sum_over_repeated_heads(narrow_key, to_key),
        _sum_over_repeated_heads(narrow_value, to_value),
        change,
    )


def _compute_in_float64_or_steps(function: Callable, *arguments: Any) -> Any:
    form = result_type(x for x in tree_leaves(arguments) if isinstance(x, Tensor))
    return run_in_float64(function, arguments, {}) if form.fits_float64 else run_in_steps(function, form, arguments, {})


def _read_arguments(operator: OpOverload, arguments: tuple, options: dict) -> tuple[list, list]:
    """Return a fused kernel's tensors, and whether it is causal, its mask, its scale."""
    given = map_arguments_by_name(operator, arguments, options)
    if given["dropout_p"]:
        raise NotImplementedError("fused attention of MCTensors has no dropout: choose sdpa_kernel(SDPBackend.MATH)")
    tensors = [given[name] for name in ("query", "key", "value", "out", "logsumexp") if name in given]
    gradients = [given[name] for name in ("grad_out", "grad_out_") if name in given]
    mask = given.get("attn_mask", given.get("attn_bias"))
    return [*gradients, *tensors], [given["is_causal"], mask, given["scale"]]


def _register_cpu_kernel(operator: OpOverload, function: Callable, count: int) -> None:
    """Register the CPU's fused kernel, or its gradients, as the first results of a function."""

    def rule(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        tensors, others = _read_arguments(operator, arguments, options)
        return function(*tensors, *others)[:count]

    implements_beyond_float64(operator)(rule)


_register_cpu_kernel(aten._scaled_dot_product_flash_attention_for_cpu.default, compute_attention, 2)
_register_cpu_kernel(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, compute_attention_gradients, 3)


def _run_on_accelerator(function: Callable, operator: OpOverload, arguments: tuple, options: dict) -> Any:
    tensors, others = _read_arguments(operator, arguments, options)
    return _compute_in_float64_or_steps(function, *tensors, *others)


@implements(aten._scaled_dot_product_efficient_attention.default)
def scaled_dot_product_efficient_attention(*given: Any, **options: Any) -> tuple[Any, ...]:
    """Return the accelerator's fused kernel."""
    out, sums = _run_on_accelerator(
        compute_attention, aten._scaled_dot_product_efficient_attention.default, given, options
    )
    unused = torch.empty((), dtype=torch.int64, device=out.device)
    return out, sums, unused, unused.clone()


@implements(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_attention_backward(*given: Any, **options: Any) -> tuple[Any, ...]:
    """Return the gradients of `scaled_dot_product_efficient_attention`."""
    operator = aten._scaled_dot_product_efficient_attention_backward.default
    *three, change = _run_on_accelerator(compute_attention_gradients, operator, given, options)
    named = map_arguments_by_name(operator, given, options)
    bias = named["attn_bias"]
    to_bias = change if bias is None else change.sum_to_size(bias.shape)
    return tuple(x if want else None for x, want in zip((*three, to_bias), named["grad_input_mask"]))


@implements(aten._scaled_dot_product_flash_attention.default)
def scaled_dot_product_flash_attention(query: Any, key: Any, *given: Any, **options: Any) -> tuple[Any, ...]:
    """Return the accelerator's fused kernel for 16-bit types."""
    operator = aten._scaled_dot_product_flash_attention.default
    out, sums = _run_on_accelerator(compute_attention, operator, (query, key, *given), options)
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    return out, sums, None, None, query.shape[-2], key.shape[-2], unused, unused.clone(), query.new_empty((0,))


@implements(aten._scaled_dot_product_flash_attention_backward.default)
def flash_attention_backward(*given: Any, **options: Any) -> tuple[Any, ...]:
    """Return the gradients of `scaled_dot_product_flash_attention`."""
    operator = aten._scaled_dot_product_flash_attention_backward.default
    return _run_on_accelerator(compute_attention_gradients, operator, given, options)[:3]
