"""Weight updates that keep residuals: Kahan's compensated sum, and n narrow components (arXiv 2207.08867)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...arithmetic._operators import two_sum
from ...kernels._operations import real, select, sub, word
from ...mctensor import MCTensor
from .._storage import Store, floor_to_binade_word
from ._weight_update import (
    WeightUpdate,
    find_weight_update,
    make_store_bindings,
    read_rounding_name,
    register_weight_update,
)

# ruff: noqa: F821  names that are free here (weight_load, fitting, ...) are bound when a kernel is written


ZERO, NEGATIVE_ZERO, ZERO_WORD = np.float32(0.0), np.float32(-0.0), np.uint32(0)

# Bound per store and weight update.
RESIDUAL_PER_BINADE, RESIDUAL_OFFSET = np.float32(0.0), np.float32(0.0)


def zero_oversized_finite_residual(p, c):
    """Device function: a residual, or 0 if it is infinite or larger than its weight update leaves beside p."""
    # The bound lies between two numbers of bfloat16, but of an infinite p, beside which nothing is to be kept.
    return select(abs(c) < real(floor_to_binade_word(word(p))) * RESIDUAL_PER_BINADE, c, ZERO)


def zero_oversized_residual(p, c):
    """Device function: a residual, or 0 if it is larger than its weight update leaves beside p, or p + c overflows."""
    w = p + c
    fits = (abs(c) <= real(floor_to_binade_word(word(p))) * RESIDUAL_PER_BINADE + RESIDUAL_OFFSET) & (w - w == ZERO)
    return select(fits, c, ZERO)


def make_residual_bound_bindings(store: Store, ulps: float, is_single: bool = False) -> dict[str, Any]:
    """Return the bindings of `fitting`, for residuals of at most `ulps` units in the last place of p.

    A single one of bfloat16 takes less: half an ulp above the largest number is finite in float32, which has a number
    between any two of bfloat16.
    """
    wide = store.emin == -126
    # A residual's own last place is at least the store's least number. Beside float32's exponents that is added as a
    # binade, for a subnormal operand in every sum may cost.
    least = np.float32(0.0 if wide else 2.0**store.emin * compute_ulp_of_one(store))
    share = np.float32(ulps * compute_ulp_of_one(store))
    binade = np.uint32(store.emin + 127 + (wide and ulps < 1) << 23)
    is_quick = is_single and store.dtype == torch.bfloat16 and ulps < 1
    fitting = zero_oversized_finite_residual if is_quick else zero_oversized_residual
    share *= np.float32(1 + compute_ulp_of_one(store) / 2) if is_quick else np.float32(1)
    return {"fitting": fitting, "LOWEST_BINADE_WORD": binade, "RESIDUAL_PER_BINADE": share, "RESIDUAL_OFFSET": least}


def compute_ulp_of_one(store: Store) -> float:
    """Return the unit in the last place of 1."""
    return 2.0**-store.mantissa_bits


@dataclass(frozen=True)
class Kahan(WeightUpdate):
    """y = u + c; s = Q(p + y); c = Q'((p - s) + y); p = s (Kahan, CACM 8 (1965) 40; arXiv 2010.06192).

    The weight is p + c. Sums are taken in float32 registers and rounded where they are stored. A residual rounded to
    nearest stalls below |u|/|w| = 2^-16 (it kept 19% of a drift at 2^-21); rounded stochastically it keeps all of it.
    An update of exactly 0 changes nothing, unless the scale of a scaled parameter changes with it. A residual that is
    larger than this equation leaves beside a parameter was left by an earlier one: somebody else has written the
    parameter since, and it counts as 0.

    Args:
        weight: rounding of the parameter, "nearest" or "stochastic", or the rounding object.
        residual: rounding of the residual.
        literal: the paper's algorithm with every intermediate rounded to the parameter's format, nearest.

    >>> import halfulp as hu
    >>> hu.Kahan(residual=hu.Nearest())
    Kahan(weight='nearest', residual='nearest', literal=False)
    """

    name: ClassVar[str] = "kahan"
    compensates: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    weight: str = "nearest"
    residual: str = "stochastic"
    literal: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", read_rounding_name(self.weight))
        object.__setattr__(self, "residual", "nearest" if self.literal else read_rounding_name(self.residual))
        if self.literal and self.weight != "nearest":
            raise ValueError("Kahan(literal=True) is the paper's algorithm, which rounds to nearest: leave weight out")

    def describe_auxiliary_tensors(self, store: Store) -> tuple[tuple[str, torch.dtype], ...]:
        return (("residual", store.dtype),)

    def list_random_bits_per_draw(self, store: Store) -> tuple[int, ...]:
        """Return one draw for each stochastic rounding: the weight, then the residual."""
        return (store.random_bits,) * [self.weight, self.residual].count("stochastic")

    def make_bindings(self, store: Store) -> dict[str, object]:
        stochastic = self.residual == "stochastic"
        functions: dict[str, object] = {
            "read_weight": read_literal_kahan_weight if self.literal else read_kahan_weight,
            "write_weight": write_literal_kahan_weight if self.literal else write_kahan_weight,
            "fill_weight": fill_kahan_weight,
            "residual_round": store.round_stochastically if stochastic else store.round_to_nearest,
            "RESIDUAL_DRAW_NUMBER": int(stochastic and self.weight == "stochastic"),
        }
        # The largest residual, its own last place included.
        ulps = (1.5 if self.literal else 1.0 if self.weight == "stochastic" else 0.5) * (1 + compute_ulp_of_one(store))
        return (
            functions
            | make_residual_bound_bindings(store, ulps, is_single=True)
            | make_store_bindings(store, self.weight == "stochastic")
        )


def read_kahan_weight(a0, a1, a2, a3, i):
    """Device function: the weight p + c, then p, c and c again."""
    p = weight_real(weight_load(a0, i))
    c = fitting(p, weight_real(weight_load(a1, i)))
    return p + c, p, c, c


def fill_kahan_weight(a0, a1, a2, a3, i, value):
    """Device function: the nearest narrow value, and its rounding error."""
    code = weight_nearest(value, value)
    shown = weight_real(code)
    rest = select(shown - shown == ZERO, value - shown, ZERO)
    weight_save(a0, i, code)
    weight_save(a1, i, weight_nearest(rest, rest))


RESIDUAL_DRAW_NUMBER = 0  # which random word rounds the residual, bound


def write_kahan_weight(a0, a1, a2, a3, i, w, p, c, held, u, r0, r1):
    """Device function: the equation of Kahan; a weight that became infinite or NaN keeps no residual."""
    # A residual that is not as it was read is under another scale, in whose last places it may be too large for p;
    # under a smaller one both may be far larger than their sum, beside which u would be lost.
    still, whole = word(c) == word(held), p + c
    c = select(still, c, c - (whole - p))
    p = select(still, p, whole)
    y = u + c
    code = weight_round(p + select((u == ZERO) & still, NEGATIVE_ZERO, y), r0)
    s = weight_real(code)
    none = s - s
    left = residual_round((p - s) + y, (r0, r1)[RESIDUAL_DRAW_NUMBER])
    left = select(none == none, left, ZERO_WORD)
    weight_save(a0, i, code)
    weight_save(a1, i, left)
    return s + weight_real(left)


def read_literal_kahan_weight(a0, a1, a2, a3, i):
    """Device function: p + c, both, and p again, by which the write knows whether the scale changes."""
    p = weight_real(weight_load(a0, i))
    c = fitting(p, weight_real(weight_load(a1, i)))
    return p + c, p, c, p


def write_literal_kahan_weight(a0, a1, a2, a3, i, w, p, c, held, u, r0, r1):
    """Device function: the paper's algorithm, each intermediate rounded; Kahan's equation where the scale changes."""
    y = weight_real(weight_nearest(weight_real(weight_nearest(u, r0)) + c, r0))
    same, whole = p == held, p + c
    y = select(same, y, u + (c - (whole - p)))
    p = select(same, p, whole)
    code = weight_nearest(p + select((u == ZERO) & same, NEGATIVE_ZERO, y), r0)
    s = weight_real(code)
    none = s - s
    lost = select(same, weight_real(weight_nearest(p - s, r0)), p - s)
    left = weight_nearest(lost + y, r0)
    left = select(none == none, left, sub(word(none), word(none)))
    weight_save(a0, i, code)
    weight_save(a1, i, left)
    return s + weight_real(left)


@dataclass(frozen=True)
class KahanStochastic(Kahan):
    """Kahan with weight and residual both rounded stochastically: what survives at 10 bits (arXiv 2010.06192)."""

    name: ClassVar[str] = "kahan-stochastic"
    weight: str = "stochastic"


for _update in (Kahan(), KahanStochastic()):
    register_weight_update(_update)


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
        object.__setattr__(self, "residual", read_rounding_name(self.residual))

    def describe_auxiliary_tensors(self, store: Store) -> tuple[tuple[str, torch.dtype], ...]:
        names = ("residual",) if self.n == 2 else tuple(f"component_{k}" for k in range(1, self.n))
        return tuple((name, store.dtype) for name in names)

    def list_random_bits_per_draw(self, store: Store) -> tuple[int, ...]:
        """Return one draw for the last component if it is rounded stochastically."""
        return (store.random_bits,) if self.residual == "stochastic" else ()

    def make_bindings(self, store: Store) -> dict[str, object]:
        if self.n == 2:
            return Kahan(residual=self.residual).make_bindings(store)
        functions: dict[str, object] = {
            "read_weight": read_components_weight,
            "write_weight": write_components_weight,
            "fill_weight": fill_components_weight,
            "COMPONENT_COUNT": self.n,
            "residual_round": store.round_stochastically if self.residual == "stochastic" else store.round_to_nearest,
        }
        return functions | make_residual_bound_bindings(store, 0.5) | make_store_bindings(store, False)


def load_component(address, i):
    """Device function: one component."""
    return weight_real(weight_load(address, i))


def cut_off_and_store_component(address, i, high, low, lost):
    """Device function: cut the leading component off high + low; behind an infinity or NaN follow zeros."""
    code = weight_nearest(high, high)
    code = select(lost == lost, code, sub(code, code))
    weight_save(address, i, code)
    rest = high - weight_real(code)
    high, low = two_sum(rest, low)
    return high, low, lost + (rest - rest)


def store_last_component(address, i, high, lost, random):
    """Device function: round what the other components leave, and store it as the last one."""
    code = residual_round(select(lost == lost, high, lost), random)
    weight_save(address, i, select(lost == lost, code, sub(code, code)))


COMPONENT_COUNT = 4  # of the components, bound


def read_components_weight(a0, a1, a2, a3, i):
    """Device function: the sum, smallest first, and the components behind the parameter, 0 if they do not fit."""
    p, first = load_component(a0, i), load_component(a1, i)
    behind = [fitting(p, first)]
    for address in (a2, a3)[: COMPONENT_COUNT - 2]:
        behind.append(select(behind[0] == first, load_component(address, i), ZERO))
    w = ZERO
    for number, c in enumerate(reversed(behind)):
        w = c + w if number else c
    return p + w, behind[0], behind[1], behind[-1]


def write_components_weight(a0, a1, a2, a3, i, w, c1, c2, c3, u, r0, r1):
    """Device function: sweep up through the components, cut from the top."""
    parts, addresses = (load_component(a0, i), c1, c2, c3)[:COMPONENT_COUNT], (a0, a1, a2, a3)[:COMPONENT_COUNT]
    high, low = u, ZERO
    for number, part in enumerate(reversed(parts)):
        high, error = two_sum(part, high)
        low = low + error if number else error
    # The larger term first, which after a cancellation may be the errors; behind an infinite sum stands a NaN.
    high, low = two_sum(high, select(low - low == ZERO, low, ZERO))
    lost = ZERO
    for address, part in zip(addresses[:-1], parts):
        high, low, lost = cut_off_and_store_component(address, i, select(u == ZERO, part, high), low, lost)
    store_last_component(addresses[-1], i, select(u == ZERO, parts[-1], high), lost, r0)
    return read_components_weight(a0, a1, a2, a3, i)[0]


def fill_components_weight(a0, a1, a2, a3, i, value):
    """Device function: components from the top."""
    high, low, lost, addresses = value, ZERO, ZERO, (a0, a1, a2, a3)[:COMPONENT_COUNT]
    for address in addresses[:-1]:
        high, low, lost = cut_off_and_store_component(address, i, high, low, lost)
    store_last_component(addresses[-1], i, high, lost, value)


register_weight_update(Components())


def choose_mctensor_update(group: Mapping[str, Any], parameter: MCTensor, name: str) -> WeightUpdate | None:
    """Return the weight update of an MCTensor's components; None for a single one, which keeps its group's update."""
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
    if given is not None and find_weight_update(given) != Components(count):
        raise ValueError(
            f"weight_update={given!r}, and parameter {name} is an MCTensor that holds {count} components itself: leave "
            f"weight_update out or give hu.Components({count}), in a param group of its own"
        )
    return Components(count)
