"""Operators on lists of tensors, `torch._foreach_add` and its kin: torch's loops over the operator of one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ._rule_table import Rule


def make_foreach_rule(operator: OpOverload) -> Rule | None:
    """Return torch's loop over lists, which every operator on lists has; None for other operators."""
    name = operator._schema.name

    def sum_powers(tensors: list[Tensor], order: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [torch.linalg.vector_norm(x, order, dtype=dtype) ** order for x in tensors]

    def loop(*arguments: Any, **options: Any) -> Any:
        return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments, **options)

    if name == "aten::_foreach_powsum":  # whose operator of one tensor has no rule
        return sum_powers
    return loop if name.startswith("aten::_foreach_") else None
