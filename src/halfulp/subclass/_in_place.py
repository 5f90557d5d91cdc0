"""Operators that write into an argument, and their functional forms."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload


def is_written(argument: Any) -> bool:
    """Return whether an operator writes into this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def functional_form(operator: OpOverload) -> OpOverload | None:
    """Return the overload that takes the same arguments, in any order, and writes none of them; None without one."""
    name = operator._schema.name.removeprefix("aten::")
    is_out = any(argument.is_out for argument in operator._schema.arguments)
    packet = getattr(torch.ops.aten, name if is_out else name.removesuffix("_"), None)
    if packet is None or operator.namespace != "aten" or not (is_out or name.endswith("_")):
        return None
    wanted = sorted((a.name, str(a.type)) for a in operator._schema.arguments if not a.is_out)
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        taken = sorted((a.name, str(a.type)) for a in candidate._schema.arguments)
        if taken == wanted and not candidate._schema.is_mutable:
            return candidate
    return None
