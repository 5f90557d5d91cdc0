"""Weight updates without a residual: nearest, stochastic, a float32 master copy, and plain float32 parameters."""

# ruff: noqa: F821  names that are free here (weight_load, fitting, ...) are bound when a kernel is written
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...kernels._operations import load32, select, store32, word
from .._storage import F32, Store, decode_float32_word
from ._weight_update import WeightUpdate, make_store_bindings, read_plain, register_weight_update, write_plain


@dataclass(frozen=True)
class Rounded(WeightUpdate):
    """p = Q(w + u), as frameworks do for narrow parameters; small updates are cancelled."""

    name: ClassVar[str] = "nearest"
    scales: ClassVar[bool] = True
    stochastic: ClassVar[bool] = False

    def list_random_bits_per_draw(self, store: Store) -> tuple[int, ...]:
        return (store.random_bits,) if self.stochastic else ()

    def make_bindings(self, store: Store) -> dict[str, object]:
        functions: dict[str, object] = {"read_weight": read_plain, "write_weight": write_plain}
        return functions | make_store_bindings(store, self.stochastic)


@dataclass(frozen=True)
class StochasticallyRounded(Rounded):
    """p = Q_SR(w + u): right on average, with noise of up to one ulp per step (arXiv 2010.06192)."""

    name: ClassVar[str] = "stochastic"
    stochastic: ClassVar[bool] = True


@dataclass(frozen=True)
class Exact(Rounded):
    """w += u in plain float32 parameters."""

    name: ClassVar[str] = "exact"

    def check_store(self, store: Store) -> None:
        if store.name != F32.name:
            raise ValueError("weight_update 'exact' is for float32 parameters: choose 'split' for exact bfloat16 ones")


@dataclass(frozen=True)
class Master(WeightUpdate):
    """w += u in a float32 copy; p = Q(w) (Micikevicius et al., arXiv 1710.03740). Four more bytes per parameter.

    The parameter has the last word: an element that is not its copy's nearest value was written by somebody else (a
    checkpoint loaded into the model, say), and the copy follows it.
    """

    name: ClassVar[str] = "master"
    scales: ClassVar[bool] = True

    def describe_auxiliary_tensors(self, store: Store) -> tuple[tuple[str, torch.dtype], ...]:
        return (("master", torch.float32),)

    def make_bindings(self, store: Store) -> dict[str, object]:
        functions = {
            "read_weight": read_master_weight,
            "write_weight": write_master_weight,
            "fill_weight": fill_master_weight,
        }
        return functions | make_store_bindings(store, False)

    def make_neutral_values(self, store: Store, payload: torch.Tensor) -> torch.Tensor:
        return store.decode(payload.contiguous())


def read_master_weight(a0, a1, a2, a3, i):
    """Device function: the float32 copy where the parameter is its nearest value, else the parameter."""
    copy, code = load32(a1, i), weight_load(a0, i)
    same = code == weight_nearest(decode_float32_word(copy), copy)
    w = select(same, decode_float32_word(copy), weight_real(code))
    return w, w, w, w


def write_master_weight(a0, a1, a2, a3, i, w, h0, h1, h2, u, r0, r1):
    """Device function: the sum into the copy, its nearest narrow value into the parameter."""
    fill_master_weight(a0, a1, a2, a3, i, w + u)
    return w + u


def fill_master_weight(a0, a1, a2, a3, i, value):
    """Device function: the copy, and its nearest narrow value in the parameter."""
    store32(a1, i, word(value))
    weight_save(a0, i, weight_nearest(value, value))


@dataclass(frozen=True)
class Feedback(StochasticallyRounded):
    """p = Q_SR(w + u), and the lost part e = w + u - p goes into the first moment (the idea of arXiv 2601.22101).

    The moment is changed so that the updates it causes over its memory add up to e. It costs no byte and leaves 6 to
    12 times less noise than plain stochastic rounding. The pending error is stored in units of the learning rate: a
    rate that jumps returns it in the wrong size, so the optimizer warns when the rate more than doubles or halves
    between two steps, and nothing is stored while it is 0. Rules that take a sign (Lion) or keep no first moment refuse
    it. The first moment is stored by stochastic rounding: rounding to nearest would lose the pending error.
    """

    name: ClassVar[str] = "feedback"
    feeds_back: ClassVar[bool] = True
    scales: ClassVar[bool] = False


for _update in (Rounded(), StochasticallyRounded(), Feedback(), Exact(), Master()):
    register_weight_update(_update)
