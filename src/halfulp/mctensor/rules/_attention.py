"""Scaled dot-product attention as single operators, in place of torch's fused kernels for plain dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...kernels import torch_operators
from .._derivation import beyond_float64, in_float64, run_in_steps
from .._mctensor import implements
from .._result_type import result_type

aten = torch_operators("aten")


def _scores(query: Any, key: Any, causal: bool, mask: Any, scale: float | None) -> Any:
    scores = query @ key.transpose(-2, -1) * _factor(query, scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores


def _factor(query: Any, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _repeated_heads(query: Any, x: Any) -> Any:
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


def attention(
    query: Any, key: Any, value: Any, causal: bool = False, mask: Any = None, scale: float | None = None
) -> tuple[Any, Any]:
    """softmax(query key^T scale + mask) value, and the logarithms of the sums."""
    key, value = _repeated_heads(query, key), _repeated_heads(query, value)
    scores = _scores(query, key, causal, mask, scale)
    sums = scores.logsumexp(-1)
    return _weights(scores, sums) @ value, sums


def _weights(scores: Any, sums: Any) -> Any:
    """Return the softmax of scores; 0 in a row that is masked whole, as in torch's kernels."""
    return (scores - sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1)).exp()


def attention_backward(
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
    key, value = _repeated_heads(query, key), _repeated_heads(query, value)
    weights = _weights(_scores(query, key, causal, mask, scale), sums[..., : query.shape[-2]])
    back = gradient @ value.transpose(-2, -1) - (gradient * out).sum(-1, keepdim=True)
    change = weights * back
    factor = _factor(query, scale)
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
    return in_float64(function, arguments, {}) if form.fits_float64 else run_in_steps(function, form, arguments, {})


def _check_dropout(dropout: float) -> None:
    if dropout:
        raise NotImplementedError("fused attention of MCTensors has no dropout: choose sdpa_kernel(SDPBackend.MATH)")


@beyond_float64(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_on_cpu(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """Return the CPU's fused kernel."""
    _check_dropout(dropout_p)
    return attention(query, key, value, is_causal, attn_mask, scale)


@beyond_float64(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_on_cpu_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    sums: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of `flash_on_cpu`."""
    return attention_backward(gradient, query, key, value, out, sums, is_causal, attn_mask, scale)[:3]


@implements(aten._scaled_dot_product_efficient_attention.default)
def efficient(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return the accelerator's fused kernel."""
    _check_dropout(dropout_p)
    out, sums = _compute_in_float64_or_steps(attention, query, key, value, is_causal, bias, scale)
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    return out, sums, unused, unused.clone()


@implements(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    out: Any,
    sums: Any,
    seed: Any,
    offset: Any,
    dropout_p: float,
    wanted: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of `efficient`."""
    *three, change = _compute_in_float64_or_steps(
        attention_backward, gradient, query, key, value, out, sums, is_causal, bias, scale
    )
    to_bias = change if bias is None else change.sum_to_size(bias.shape)
    return tuple(x if want else None for x, want in zip((*three, to_bias), wanted))


@implements(aten._scaled_dot_product_flash_attention.default)
def flash(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return the accelerator's fused kernel for 16-bit types."""
    _check_dropout(dropout_p)
    out, sums = _compute_in_float64_or_steps(attention, query, key, value, is_causal, None, scale)
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    return out, sums, None, None, query.shape[-2], key.shape[-2], unused, unused.clone(), query.new_empty((0,))


@implements(aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    sums: Any,
    cumulative_query: Any,
    cumulative_key: Any,
    longest_query: Any,
    longest_key: Any,
    dropout_p: float,
    is_causal: bool,
    seed: Any,
    offset: Any,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of `flash`."""
    return _compute_in_float64_or_steps(
        attention_backward, gradient, query, key, value, out, sums, is_causal, None, scale
    )[:3]
