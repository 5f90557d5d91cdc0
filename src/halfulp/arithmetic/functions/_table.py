"""The list of element-wise functions of expansions: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...kernels import is_finite, select
from .. import _operators as nets
from .._error_free import Terms, distill
from . import _division as division
from . import _exp_log as elementary
from . import _trigonometric as trigonometric


@dataclass(frozen=True)
class Function:
    """One function: its number of operands and its network.

    Attributes:
        operands: how many expansions it takes.
        network: (operands as lists of terms, components) -> terms, complete with special values.
        any_precision: whether it also runs in float32 arithmetic.
    """

    operands: int
    network: Callable[[list[Terms], int], Terms]
    any_precision: bool = False


def _add(x: list[Terms], n: int) -> Terms:
    return nets.settled(x[0][0] + x[1][0], nets.added(x[0], x[1], n))


def _sub(x: list[Terms], n: int) -> Terms:
    return nets.settled(x[0][0] - x[1][0], nets.added(x[0], nets.negated(x[1]), n))


def _mul(x: list[Terms], n: int) -> Terms:
    return nets.settled(x[0][0] * x[1][0], nets.multiplied(x[0], x[1], n))


def _addcmul(x: list[Terms], n: int) -> Terms:
    """a + b c, with an error relative to |a| + |b c|, not to the result of a cancellation."""
    plain = x[0][0] + x[1][0] * x[2][0]
    if n == 2 and len(x[0]) == 2 and len(x[1]) == 1:
        return nets.settled(plain, nets.updated(x[0], x[1][0], x[2]))
    product = nets.multiplied(x[1], x[2], n if len(x[1]) + len(x[2]) > 2 else 2)
    return nets.settled(plain, nets.added(x[0], product, n))


def _same(x: list[Terms], n: int) -> Terms:
    """Return all terms unchanged, so that the stored result is rounded from the whole sum."""
    many = max(n, len(x[0]))
    return nets.gathered(x[0], many) if len(x[0]) > 1 else nets.fitted(x[0], n)


def _sign(x: list[Terms], n: int) -> Terms:
    """-1, 0 or 1 as x - y is; 2 for NaN."""
    a, b = x[0][0], x[1][0]
    difference = distill([*x[0], *nets.negated(x[1])], 1)[0]
    exact = is_finite(a) & is_finite(b)
    one = a * 0.0 + 1.0
    less = exact & (difference < 0.0) | ~exact & (a < b)
    more = exact & (difference > 0.0) | ~exact & (a > b)
    known = select(more, 1.0, select(less, -1.0, 0.0 * one))
    return nets.fitted([select((a != a) | (b != b), 2.0, known)], n)


FUNCTIONS: dict[str, Function] = {
    "add": Function(2, _add, True),
    "sub": Function(2, _sub, True),
    "mul": Function(2, _mul, True),
    "div": Function(2, lambda x, n: nets.quotient(x[0], x[1], n), True),
    "sqrt": Function(1, lambda x, n: nets.square_root_of(x[0], n), True),
    "reciprocal": Function(1, lambda x, n: nets.quotient([nets.one_like(x[0][0])], x[0], n), True),
    "addcmul": Function(3, _addcmul, True),
    "renormalize": Function(1, _same, True),
    "compare": Function(2, _sign, True),
    "exp": Function(1, elementary.exp),
    "expm1": Function(1, elementary.expm1),
    "log": Function(1, elementary.log),
    "log1p": Function(1, elementary.log1p),
    "sinh": Function(1, elementary.sinh),
    "cosh": Function(1, elementary.cosh),
    "tanh": Function(1, elementary.tanh),
    "asinh": Function(1, elementary.asinh),
    "acosh": Function(1, elementary.acosh),
    "sigmoid": Function(1, elementary.sigmoid),
    "pow": Function(2, elementary.powered),
    "sin": Function(1, trigonometric.sin),
    "cos": Function(1, trigonometric.cos),
    "atan": Function(1, trigonometric.atan),
    "erf": Function(1, elementary.erf),
    "erfc": Function(1, elementary.erfc),
    "hypot": Function(2, elementary.hypot),
}

# What ends a division whose remainder is known: functions of (a, r, b). `_pointwise` makes r by "remainder step".
STEP = "remainder step"
DIVISIONS: dict[str, Function] = {
    "fmod": Function(3, division.fmod),
    "remainder": Function(3, division.remainder),
    "trunc_divide": Function(3, division.trunc_divide),
    "floor_divide": Function(3, division.floor_divide),
}
NETWORKS = {**FUNCTIONS, **DIVISIONS, STEP: Function(2, division.step)}
