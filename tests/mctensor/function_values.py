"""Every element-wise function of MCTensors: hard arguments over its whole domain, its value by mpmath, its bound."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import mpmath
import torch
from mpmath.libmp import from_man_exp

from halfulp.mctensor import MCTensor

from ..arithmetic.expansion_values import PRECISION, SMALLEST, followed, nearest, stacked
from .exact_values import exact

KINDS = [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 2), (torch.float64, 2), (torch.float32, 3)]
_REACH = {torch.float64: (-1074, 1023), torch.float16: (-24, 15)}
_BITS = 1500  # beyond the binades of float64, so that angles of any size keep their digits


def _mpf(value: Fraction) -> mpmath.mpf:
    """A binary fraction, with all its bits."""
    return mpmath.mp.make_mpf(from_man_exp(value.numerator, 1 - value.denominator.bit_length()))


def _log(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.log1p(mpmath.fsub(x, 1, exact=True)) if abs(x - 1) < 0.25 else mpmath.log(x)


def _asinh(x: mpmath.mpf) -> mpmath.mpf:
    size = abs(x)
    return mpmath.sign(x) * mpmath.log1p(size + size * size / (1 + mpmath.sqrt(1 + size * size)))


def _power(x: mpmath.mpf, y: mpmath.mpf) -> mpmath.mpf:
    return mpmath.exp(y * _log(abs(x))) * (-1 if x < 0 and int(y) % 2 else 1)


@dataclass(frozen=True)
class Case:
    """One function.

    Attributes:
        call: of MCTensors.
        value: of mpmath numbers; of Fractions where `rational`.
        operands: how many.
        domain: whether arguments belong to it.
        near: arguments where it is hard, beside random ones.
        bound: of the relative error, in units u^2 for two components; None for the elementary functions' bound.
        rational: whether exact arithmetic gives the value.
    """

    call: Callable
    value: Callable
    operands: int = 1
    domain: Callable = lambda *x: True
    near: str = "plain"
    bound: float | None = None
    rational: bool = False


def _function(name: str, value: Callable | None = None, **options) -> Case:
    return Case(getattr(torch, name), value or getattr(mpmath, name), **options)


CASES: dict[str, Case] = {
    "add": Case(torch.add, lambda a, b: a + b, 2, near="cancelling", bound=3, rational=True),
    "sub": Case(torch.sub, lambda a, b: a - b, 2, near="equal", bound=3, rational=True),
    "mul": Case(torch.mul, lambda a, b: a * b, 2, bound=5, rational=True),
    "div": Case(torch.div, lambda a, b: a / b, 2, bound=15, rational=True),
    "addcmul": Case(
        lambda a, b: torch.addcmul(a * 0, a, b), lambda a, b: a * b, 2, bound=8, rational=True
    ),  # sums are relative to |a| + |b c|: no cancellation here
    "sqrt": _function("sqrt", domain=lambda x: x >= 0, bound=4),
    "rsqrt": _function("rsqrt", lambda x: 1 / mpmath.sqrt(x), domain=lambda x: x > 0),
    "reciprocal": _function("reciprocal", lambda x: 1 / x, bound=15, rational=True),
    "exp": _function("exp", near="exponents"),
    "expm1": _function("expm1", near="exponents"),
    "tanh": _function("tanh", near="exponents"),
    "sigmoid": _function("sigmoid", lambda x: 1 / (1 + mpmath.exp(-x)), near="exponents"),
    "log": _function("log", _log, domain=lambda x: x > 0, near="one"),
    "log2": _function("log2", lambda x: _log(x) / mpmath.ln2, domain=lambda x: x > 0, near="one"),
    "log10": _function("log10", lambda x: _log(x) / mpmath.ln10, domain=lambda x: x > 0, near="one"),
    "log1p": _function("log1p", domain=lambda x: x > -1, near="one"),
    "asinh": _function("asinh", _asinh),
    "sin": _function("sin", domain=lambda x: abs(x) < 2**20, near="angles"),
    "cos": _function("cos", domain=lambda x: abs(x) < 2**20, near="angles"),
    "pow": _function("pow", _power, operands=2, domain=lambda x, y: x > 0, near="powers"),
    "floor": _function("floor", lambda x: Fraction(math.floor(x)), near="integers", bound=1, rational=True),
    "ceil": _function("ceil", lambda x: Fraction(math.ceil(x)), near="integers", bound=1, rational=True),
    "trunc": _function("trunc", lambda x: Fraction(math.trunc(x)), near="integers", bound=1, rational=True),
    "frac": _function("frac", lambda x: x - math.trunc(x), near="integers", bound=3, rational=True),
}


def bound(case: Case, dtype: torch.dtype, n: int) -> Fraction:
    """The stated bound of the relative error."""
    p = PRECISION[dtype]
    if case.bound is None:
        return Fraction(1, 2 ** (2 * p - 6 if n == 2 else n * p - 10))
    return Fraction(case.bound) / 4**p if n == 2 else Fraction(1, 2 ** (n * p - 4))


def _signed(x: float) -> float:
    return random.choice((1, -1)) * x


def _rounded(value: Fraction, n: int, dtype: torch.dtype) -> list[float]:
    """The n components nearest to a value."""
    row = []
    for _ in range(n):
        row.append(nearest(float(value), dtype) if abs(value) < Fraction(torch.finfo(dtype).max) else math.inf)
        if math.isinf(row[-1]):
            break
        value -= Fraction(row[-1])
    return row


def _head(near: str, n: int, dtype: torch.dtype) -> list[float]:
    """Leading components of one argument."""
    low, high = _REACH.get(dtype, (-140, 127))
    kind = random.random()
    if kind < 0.35:
        return [nearest(_signed(math.ldexp(random.uniform(1, 2), random.randint(low, high - 1))), dtype)]
    if kind < 0.4:
        return [nearest(_signed(math.ldexp(random.randint(1, 9), low)), dtype)]
    if near == "angles" and kind < 0.8:
        with mpmath.workprec(_BITS):
            k = random.choice(
                (random.randint(1, 9), random.randint(1, 2**22), random.getrandbits(max(high - 2, 3)) + 1)
            )
            angle = mpmath.pi / 2 * k
            return _rounded(Fraction(int(angle * mpmath.mpf(2) ** 200), 2**200), random.randint(1, n), dtype)
    if near == "exponents" and kind < 0.8:
        return [nearest(_signed(random.choice((random.uniform(0, 30), random.uniform(0, 750)))), dtype)]
    if near == "one" and kind < 0.8:
        tiny = _signed(2.0 ** -random.uniform(1, 100))
        return [nearest(random.choice((1.0, -1.0)), dtype), nearest(tiny, dtype)][: random.choice((1, n))]
    if near == "integers" and kind < 0.9:
        whole = random.choice((random.randint(0, 9), random.getrandbits(random.randint(3, 60)))) + random.choice(
            (0, 0.5)
        )
        return _rounded(Fraction(_signed(whole)), random.randint(1, n), dtype)
    return [nearest(_signed(random.uniform(0.01, 20)), dtype)]


def _argument(near: str, n: int, dtype: torch.dtype) -> list[float]:
    """An argument whose components are canonical, full or with a gap."""
    while True:
        head = _head(near, n, dtype)
        for keep in range(1, len(head)):
            if abs(head[keep]) > 2.0 ** -PRECISION[dtype] * abs(head[keep - 1]):
                head = head[:keep]
                break
        row = followed(head, n, dtype)
        if math.isfinite(row[0]) and row[0] != 0:
            return row


def _second(near: str, row: list[float], n: int, dtype: torch.dtype) -> list[float]:
    """A second argument, chosen with the first in mind."""
    if near in ("cancelling", "equal") and random.random() < 0.6:
        sign = -1 if near == "cancelling" else 1
        return followed([sign * part for part in row[: random.randint(1, n)]], n, dtype)
    if near == "multiples" and random.random() < 0.6:
        value = sum(map(Fraction, row)) / random.randint(1, 2 ** random.randint(1, 30))
        made = _rounded(value, n, dtype)
        return made if made[0] else row
    if near == "powers" and random.random() < 0.8:
        most = 1100 / max(abs(math.log2(abs(row[0]))), 2.0**-20)
        return followed([nearest(random.uniform(-1, 1) * min(most, 60000.0), dtype)], n, dtype)
    return _argument("plain", n, dtype)


def drawn(case: Case, kind: tuple[torch.dtype, int], count: int) -> list[MCTensor]:
    """As many arguments of each operand; float16 components under a scale of its own every time."""
    dtype, n = kind
    rows: list[list[list[float]]] = []
    scale = 2.0 ** random.choice((0, 0, random.randint(-60, 60))) if dtype == torch.float16 else None
    factor, tries = Fraction(scale or 1), 0
    while len(rows) < count:
        tries += 1
        if tries == 50 and not rows:
            scale, factor = None, Fraction(1)  # under that scale no number near 1, say, is in the domain
        row = _argument(case.near, n, dtype)
        together = [row] if case.operands == 1 else [row, _second(case.near, row, n, dtype)]
        values = [sum(map(Fraction, some)) * factor for some in together]
        if all(some[0] != 0 and math.isfinite(some[0]) for some in together) and case.domain(*values):
            rows.append(together)
    return [MCTensor.from_components(list(stacked(list(some), dtype)), scale=scale) for some in zip(*rows)]


def judged(name: str, operands: list[MCTensor], found: MCTensor) -> tuple[float, list[str]]:
    """The largest error in units of the bound, and a line for every value beyond it."""
    case, (dtype, n) = CASES[name], (operands[0].dtype, len(operands[0].components))
    scale = Fraction(1 if found.scale is None else float(found.scale))
    smallest = scale * Fraction(2) ** SMALLEST[dtype]
    largest = Fraction(torch.finfo(dtype).max) * (1 if found.scale is None else Fraction(2) ** 127)
    worst, wrong, limit = 0.0, [], bound(case, dtype, n)
    for arguments, value in zip(zip(*map(exact, operands)), exact(found)):
        if not all(arguments) or not case.domain(*map(Fraction, arguments)):
            continue  # a last component below the subnormal numbers is gone
        wanted, size = _wanted(case, tuple(map(Fraction, arguments)))
        if size > largest:
            fine = isinstance(value, float) and math.isinf(value)
            if not fine and size > largest * (1 + 2 * limit):
                wrong.append(f"{name}{_shown(arguments)} = {_text(value)}, not infinite")
            continue
        if isinstance(value, float) and not math.isfinite(value):
            wrong.append(f"{name}{_shown(arguments)} = {value}, not about {_text(wanted)}")
            continue
        value = Fraction(value)
        error = abs(_mpf(value) - wanted) if isinstance(wanted, mpmath.mpf) else abs(value - wanted)
        if isinstance(error, mpmath.mpf):
            share = error / (_mpf_any(limit) * abs(wanted) + 4 * _mpf_any(smallest))
        else:
            share = error / (limit * abs(wanted) + 4 * smallest)
        worst = max(worst, float(share))
        if share > 1:
            wrong.append(f"{name}{_shown(arguments)} = {_text(value)}, off by {float(share):.3g} bounds")
    return worst, wrong


def _wanted(case: Case, arguments: tuple) -> tuple:
    """The value, and its magnitude for a comparison with Fractions."""
    if case.rational:
        value = case.value(*arguments)
        return value, abs(value)
    with mpmath.workprec(_BITS):
        value = case.value(*map(_mpf, arguments))
    _, mantissa, place, bits = value._mpf_
    if not mantissa:
        return mpmath.mpf(0), Fraction(0)
    # What is out of every range by far is not written out.
    if place + bits > 2000:
        return value, Fraction(2) ** 2000
    if place + bits < -2000:
        return mpmath.mpf(0), Fraction(0)
    return value, Fraction(int(mantissa)) * Fraction(2) ** place


def _mpf_any(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


def _text(value) -> str:
    return mpmath.nstr(_mpf_any(value) if isinstance(value, Fraction) else mpmath.mpf(value), 20)


def _shown(arguments: tuple) -> str:
    return "(" + ", ".join(_text(value) for value in arguments) + ")"
