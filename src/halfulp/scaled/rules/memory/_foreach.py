"""Rules of operators on lists of tensors: the operator's own rule on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import torch_operators
from ..._operands import plain
from ..._registry import implements
from ..._scaled_tensor import ScaledTensor

aten = torch_operators("aten")
# Operators of one tensor whose name or arguments differ from those of the list.
_SINGLE: dict[str, Callable[..., Any]] = {
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
_NAMED = ("alpha", "dtype", "memory_format")


def _register_loop(operator: OpOverload, name: str) -> None:
    """Register a loop over lists; a tensor of scalars is split where the overload takes one."""
    single = _SINGLE.get(name) or getattr(torch.ops.aten, name)
    places = [(a.name, str(a.type)) for a in operator._schema.arguments]
    lists = {place for place, kind in places if kind.startswith("List[") or kind.endswith("[]")}
    of_scalars = next((p for p, kind in places if kind == "Tensor" and p == "scalars"), None)
    names = [place for place, _ in places]

    def loop(*arguments: Any, **options: Any) -> list[Tensor] | None:
        given = dict(zip(names, arguments)) | options
        if of_scalars in given:
            scalars = given[of_scalars]
            given[of_scalars] = plain(scalars).tolist()
        split = lists | {of_scalars}
        count = max(len(given[place]) for place in lists if place in given)
        results = [
            _call(single, {place: x[i] if place in split else x for place, x in given.items()}) for i in range(count)
        ]
        return None if name.endswith("_") else results

    implements(operator, family="foreach")(loop)


def _call(single: Callable, given: dict[str, Any]) -> Tensor:
    """Call an operator, by position for arguments whose names differ between overloads, by name for others."""
    named = {key: x for key, x in given.items() if key in _NAMED and x is not None}
    return single(*(x for key, x in given.items() if key not in _NAMED), **named)


def _register() -> None:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::_foreach_") or overload.endswith("out"):
            continue
        single = packet.removeprefix("_foreach_")
        if single in _SINGLE or hasattr(torch.ops.aten, single):
            _register_loop(getattr(getattr(torch.ops.aten, packet), overload or "default"), single)


_register()


def _refused(operator: OpOverload) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"{operator} reads memory as plain numbers, and ScaledTensors have a scale: make the optimizer with "
            "fused=False, foreach=False, or take one of halfulp.optim"
        )

    implements(operator, family="foreach")(refuse)


for _name in ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"):
    for _packet in (getattr(aten, _name), getattr(aten, f"{_name}_")):
        for _overload in _packet.overloads():
            if not _overload.endswith("out"):
                _refused(getattr(_packet, _overload))


@implements(aten._amp_foreach_non_finite_check_and_unscale_.default, family="foreach")
def unscale_(gradients: Any, found: Tensor, inverse: Tensor) -> None:
    """Multiply gradients by a number, in place, and record whether one is infinite or NaN."""
    factor = plain(inverse)
    for gradient in gradients:
        payload = gradient._payload if isinstance(gradient, ScaledTensor) else gradient
        found.copy_(torch.maximum(found, (~payload.to(torch.float32).isfinite()).any().to(found.dtype)))
        gradient.mul_(factor)
