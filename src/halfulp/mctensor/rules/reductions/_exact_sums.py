"""Exact sums of MCTensors: all components of all terms in one integer accumulator, rounded at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....arithmetic import Parts, exact_partial, exact_round
from ....kernels import torch_operators
from ..._registry import implements
from ..._result_type import ResultType, float64_count, make_result, parts_of, result_type

operators = torch_operators("halfulp")


@implements(operators.exact_sum.default)
def exact_sum(x: Any, dim: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """The sum of all components."""
    return _rounded(partial(x, None, dim), x.shape, dim, keepdim, result_type((x,), dtype))


@implements(operators.exact_dot.default)
def exact_dot(a: Any, b: Any, dim: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """The sum of all products of components."""
    return _rounded(partial(a, b, dim), a.shape, dim, keepdim, result_type((a, b), dtype))


@implements(operators.exact_partial.default)
def partial(a: Any, b: Any, dim: list[int]) -> Tensor:
    """Return the accumulator's integers."""
    device = result_type((a, b)).device
    left = parts_of(a, device)
    right: list = [None] if b is None else list(parts_of(b, device))
    words = [exact_partial(x, y, dim) for x in left for y in right]
    # A NaN or an infinity is one in the first components; in the others it would count a second time.
    return torch.stack(words).sum(0)


def _rounded(words: Tensor, shape: torch.Size, dim: list[int], keepdim: bool, form: ResultType) -> Tensor:
    count, dtype = (float64_count(form), torch.float64) if form.scaled else (form.components, form.dtype)
    parts: list[Tensor] = []
    for _ in range(count):
        part = exact_round(words, dtype)
        parts.append(torch.where(parts[0].isfinite(), part, 0.0) if parts else part)
        words = words + exact_partial(-part.unsqueeze(-1), dim=-1)
    kept: Parts = tuple(parts)
    if keepdim:
        kept = tuple(part.reshape([1 if d in dim else size for d, size in enumerate(shape)]) for part in kept)
    return make_result(kept, form)
