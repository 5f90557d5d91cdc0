"""Operators on lists of tensors, `torch._foreach_add` and its kin, as loops over the operator of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..kernels import torch_operators
from ._rule_table import Rule

aten = torch_operators("aten")
# Operators of one tensor whose name or arguments differ from those of the list.
_SINGLE_TENSOR_FORMS: dict[str, Callable[..., Any]] = {
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "powsum": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype) ** order,
    "max": lambda x: torch.amax(x),
    # torch.maximum and torch.minimum take no number.
    "maximum": lambda x, other: (torch.maximum if isinstance(other, Tensor) else torch.clamp_min)(x, other),
    "minimum": lambda x, other: (torch.minimum if isinstance(other, Tensor) else torch.clamp_max)(x, other),
    "copy": lambda x, source, non_blocking=False: aten.copy.default(x, source, non_blocking),
    "copy_": lambda x, source, non_blocking=False: x.copy_(source, non_blocking),
    "addcmul": lambda x, a, b, value=1: aten.addcmul.default(x, a, b, value=value),
    "addcdiv": lambda x, a, b, value=1: aten.addcdiv.default(x, a, b, value=value),
    "addcmul_": lambda x, a, b, value=1: aten.addcmul_.default(x, a, b, value=value),
    "addcdiv_": lambda x, a, b, value=1: aten.addcdiv_.default(x, a, b, value=value),
    "zero_": lambda x: x.zero_(),
}
_KEYWORD_NAMES = ("alpha", "dtype", "memory_format")


def make_foreach_rule(operator: OpOverload) -> Rule | None:
    """Return a loop over lists; None for an operator that is none on lists, or has no form for one tensor.

    A tensor of scalars is split where the overload takes one.
    """
    name = operator._schema.name.removeprefix("aten::_foreach_")
    single = _SINGLE_TENSOR_FORMS.get(name) or getattr(torch.ops.aten, name, None)
    if name == operator._schema.name or single is None:
        return None
    places = [(a.name, str(a.type)) for a in operator._schema.arguments]
    lists = {place for place, kind in places if kind.startswith("List[") or kind.endswith("[]")}
    of_scalars = next((p for p, kind in places if kind == "Tensor" and p == "scalars"), None)
    names = [place for place, _ in places]

    def loop(*arguments: Any, **options: Any) -> list[Tensor] | None:
        given = dict(zip(names, arguments)) | options
        if of_scalars in given:
            given[of_scalars] = given[of_scalars].tolist()
        split = lists | {of_scalars}
        count = max(len(given[place]) for place in lists if place in given)
        results = [
            _call_single_form(single, {place: x[i] if place in split else x for place, x in given.items()})
            for i in range(count)
        ]
        return None if name.endswith("_") else results

    return loop


def _call_single_form(single: Callable, given: dict[str, Any]) -> Tensor:
    """Call an operator, by position for arguments whose names differ between overloads, by name for others."""
    named = {key: x for key, x in given.items() if key in _KEYWORD_NAMES and x is not None}
    return single(*(x for key, x in given.items() if key not in _KEYWORD_NAMES), **named)
