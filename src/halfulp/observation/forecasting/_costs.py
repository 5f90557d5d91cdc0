"""What each weight update costs in bytes, and whether it keeps updates of a given size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import optim

# The smallest constant update, over the weight, of which each keeps nearly all (docs/sixteen-bit-tables.md, small
# updates); 0: the smallest that was tried. None: half an ulp of the parameter.
_SMALLEST: dict[str, float | None] = {
    "nearest": None,
    "stochastic": 2.0**-23,
    "feedback": 2.0**-23,
    "split8": 2.0**-23,
    "kahan": 0.0,
    "kahan-stochastic": 0.0,
    "split": 2.0**-23,
    "split-stochastic": 0.0,
    "components": 2.0**-17,
    "master": 2.0**-23,
}
_ON_AVERAGE = ("stochastic", "feedback")
_ELEMENTS = 4096


@dataclass(frozen=True)
class Cost:
    """A way to store and update the weights.

    Attributes:
        weight_update: of halfulp's optimizers; "float32" for weights that stay float32.
        bytes_per_parameter: weight, what lies beside it, optimizer states and gradient.
        total: bytes of them for all parameters of 16 bits.
        keeps: "yes", "on average", or "no" for typical updates of the layer with the smallest.
    """

    weight_update: str
    bytes_per_parameter: float
    total: int
    keeps: str


def costs(rule: str, dtype: torch.dtype, elements: int, relative: float) -> tuple[Cost, ...]:
    """Return what each weight update of halfulp's optimizers takes for parameters of a dtype.

    The bytes are those that an optimizer of that rule reports of itself.

    Args:
        rule: of RULES.
        dtype: of the parameters, 16 bits.
        elements: how many parameters.
        relative: typical update over typical weight, by which it is judged what is kept.
    """
    found = []
    for name, smallest in _SMALLEST.items():
        try:
            size = _bytes(rule, dtype, name)
        except ValueError:
            continue  # "split" needs bfloat16, "feedback" a first moment
        floor = torch.finfo(dtype).eps / 2 if smallest is None else smallest
        keeps = "no" if relative < floor else "on average" if name in _ON_AVERAGE else "yes"
        found.append(Cost(name, size, round(size * elements), keeps))
    size = _bytes(rule, torch.float32, None)
    keeps = "no" if relative < torch.finfo(torch.float32).eps / 2 else "yes"
    found.append(Cost("float32", size, round(size * elements), keeps))
    return tuple(sorted(found, key=lambda cost: cost.bytes_per_parameter))


def _bytes(rule: str, dtype: torch.dtype, weight_update: str | None) -> float:
    kind: Any = optim.OPTIMIZERS[rule]
    parameter = torch.nn.Parameter(torch.zeros(_ELEMENTS, dtype=dtype, device="cpu"))
    return float(kind([parameter], lr=1e-3, weight_update=weight_update).bytes_per_parameter())
