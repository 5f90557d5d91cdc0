"""The weight update of MCTensors, which hold their own components: that of `Components(n)`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...mctensor import MCTensor
from ._components import Components
from ._weight_update import WeightUpdate, weight_update


def update_of_components(group: Mapping, parameter: MCTensor, name: str) -> WeightUpdate | None:
    """Return the weight update of an MCTensor's components; None for a single one, which keeps its group's update.

    Raises:
        ValueError: components that no kernel here steps, or an option that means something else for them.
    """
    count, dtype = len(parameter.components), parameter.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"parameter {name} is an MCTensor of {count} {dtype} components: updates here are computed in float32, so "
            "allowed are bfloat16 and float16 ones; torch.optim's optimizers (fused=False) step it with all its digits"
        )
    if parameter.scale is not None:
        raise ValueError(
            f"parameter {name} is an MCTensor with a scale, which no step here adapts: hold it in bfloat16 "
            "(hu.multicomponent(model, dtype=torch.bfloat16)), encode it with scale='none', or step it by the "
            "optimizers of torch.optim (fused=False)"
        )
    for option in ("param_dtype", "format"):
        if group[option] is not None:
            raise ValueError(
                f"{option}= is for plain parameters, and {name} is an MCTensor: choose the components' dtype by "
                "hu.multicomponent(model, dtype=...), and give such parameters a param group without it"
            )
    if count == 1:
        return None
    given = group["weight_update"]
    if given is not None and weight_update(given) != Components(count):
        raise ValueError(
            f"weight_update={given!r}, and parameter {name} is an MCTensor that holds {count} components itself: leave "
            f"weight_update out or give hu.Components({count}), in a param group of its own"
        )
    return Components(count)
