"""The weight as an unevaluated sum of n narrow components (Yu et al., arXiv 2207.08867), grown by error-free sums."""

# ruff: noqa: F821  names that are free here (weight_load, fitting, ...) are bound when a kernel is written
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels.scalar._operations import select, sub
from ...mctensor import MCTensor
from ..stores._storage import Store
from ._kahan import Kahan, fit_bindings
from ._weight_update import (
    WeightUpdate,
    register_weight_update,
    rounding_name,
    store_bindings,
    weight_update,
)


@dataclass(frozen=True)
class Components(WeightUpdate):
    """p + c_1 + ... + c_(n-1), each at most half an ulp of the one before.

    n = 2 is Kahan's update; 3 bfloat16 components carry as many bits as a float32. All are rounded to nearest, but the
    last by `residual`. To nearest it loses what is below half its last place at every step: with two bfloat16
    components a drift of |u|/|w| = 2^-21 is kept to 17%. Rounded stochastically it keeps all, on average.

    An update of exactly 0 changes nothing. Components that do not fit the parameter beside them were left by an
    earlier one, which somebody else has overwritten, and count as 0.

    Args:
        n: 2, 3 or 4.
        residual: rounding of the last component, "nearest" or "stochastic", or the rounding object.

    >>> Components(3)
    Components(n=3, residual='nearest')
    """

    name: ClassVar[str] = "components"
    compensates: ClassVar[bool] = True
    n: int = 2
    residual: str = "nearest"

    def __post_init__(self) -> None:
        if self.n not in (2, 3, 4):
            raise ValueError(f"Components({self.n!r}): allowed are 2, 3 and 4")
        object.__setattr__(self, "residual", rounding_name(self.residual))

    def check(self, store: Store) -> None:
        """Refuse plain float32 parameters."""
        if store.name == "fp32":
            raise ValueError("weight_update 'components' is for narrow parameters: give 16-bit ones, or format=")

    def auxiliary_tensors(self, store: Store) -> tuple[tuple[str, torch.dtype], ...]:
        """Return the components behind the parameter."""
        names = ("residual",) if self.n == 2 else tuple(f"component_{k}" for k in range(1, self.n))
        return tuple((name, store.dtype) for name in names)

    def draws(self, store: Store) -> tuple[int, ...]:
        """Return one draw for the last component if it is rounded stochastically."""
        return (store.random_bits,) if self.residual == "stochastic" else ()

    def bindings(self, store: Store) -> dict[str, object]:
        """Return the device functions for n components."""
        if self.n == 2:
            return self._kahan.bindings(store)
        last = store.stochastic if self.residual == "stochastic" else store.nearest
        pieces = {"read_weight": read, "write_weight": write, "fill_weight": fill, "COUNT": self.n}
        return {**pieces, "residual_round": last, **fit_bindings(store, 0.5), **store_bindings(store, False)}

    @property
    def _kahan(self) -> Kahan:
        return Kahan(residual=self.residual)


ZERO = np.float32(0.0)


def two_sum(a, b):
    """Device function: a + b rounded, and the rounding's error exactly."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def normalized(high, low):
    """Device function: the same sum with the larger term first, which after a cancellation may be the errors.

    Behind an infinite sum stands a NaN, which counts as nothing.
    """
    return two_sum(high, select(low - low == ZERO, low, ZERO))


def component(address, i):
    """Device function: one component."""
    return weight_real(weight_load(address, i))


def cut(address, i, high, low, lost):
    """Device function: cut the leading component off high + low; behind an infinity or NaN follow zeros."""
    code = weight_nearest(high, high)
    code = select(lost == lost, code, sub(code, code))
    weight_save(address, i, code)
    rest = high - weight_real(code)
    high, low = two_sum(rest, low)
    return high, low, lost + (rest - rest)


def cut_last(address, i, high, lost, random):
    """Device function: round what the other components leave, and store it as the last one."""
    code = residual_round(select(lost == lost, high, lost), random)
    weight_save(address, i, select(lost == lost, code, sub(code, code)))


COUNT = 4  # of the components, bound


def read(a0, a1, a2, a3, i):
    """Device function: the sum, smallest first, and the components behind the parameter, 0 if they do not fit."""
    p, first = component(a0, i), component(a1, i)
    behind = [fitting(p, first)]
    for address in (a2, a3)[: COUNT - 2]:
        behind.append(select(behind[0] == first, component(address, i), ZERO))
    w = ZERO
    for number, c in enumerate(reversed(behind)):
        w = c + w if number else c
    return p + w, behind[0], behind[1], behind[-1]


def write(a0, a1, a2, a3, i, w, c1, c2, c3, u, r0, r1):
    """Device function: sweep up through the components, cut from the top."""
    parts, addresses = (component(a0, i), c1, c2, c3)[:COUNT], (a0, a1, a2, a3)[:COUNT]
    high, low = u, ZERO
    for number, part in enumerate(reversed(parts)):
        high, error = two_sum(part, high)
        low = low + error if number else error
    high, low = normalized(high, low)
    lost = ZERO
    for address, part in zip(addresses[:-1], parts):
        high, low, lost = cut(address, i, select(u == ZERO, part, high), low, lost)
    cut_last(addresses[-1], i, select(u == ZERO, parts[-1], high), lost, r0)
    return read(a0, a1, a2, a3, i)[0]


def fill(a0, a1, a2, a3, i, value):
    """Device function: components from the top."""
    high, low, lost, addresses = value, ZERO, ZERO, (a0, a1, a2, a3)[:COUNT]
    for address in addresses[:-1]:
        high, low, lost = cut(address, i, high, low, lost)
    cut_last(addresses[-1], i, high, lost, value)


register_weight_update(Components())


def update_of_components(group: Mapping[str, Any], parameter: MCTensor, name: str) -> WeightUpdate | None:
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
