"""Products of groups: the layers of mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import arithmetic
from ....kernels import torch_operators
from ....subclass._in_backward import gives_plain_gradient
from ..._registry import implements
from ..._result_type import float64_count, make_result, parts_of, result_type

aten = torch_operators("aten")


@implements(aten._grouped_mm.default)
def grouped_mm(
    a: Any, b: Any, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A product for each group of rows or columns; those behind the last group become 0."""
    if bias is not None:
        raise NotImplementedError("grouped_mm takes no bias yet, as in torch: add it to the result")
    form = result_type((a, b), out_dtype)
    left, right = parts_of(a, form.device), parts_of(b, form.device)
    if form.scaled:
        return make_result(arithmetic.grouped_matmul(left, right, offs, float64_count(form), torch.float64), form)
    count = 1 if gives_plain_gradient(form.gradients, form.has_gradient) else form.components
    return make_result(arithmetic.grouped_matmul(left, right, offs, count, form.dtype), form)
