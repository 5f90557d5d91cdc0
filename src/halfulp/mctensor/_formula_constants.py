"""Constants in torch's formulas, such as ln 2, pi / 180 or 2 / 3, with all digits where torch has a float64.

Only where nobody else can have given the number: in torch's decomposition of an operator, whose arguments are known,
and in nodes of a backward pass whose formulas hold such a number. A user's 0.1 stays the float64 that it is.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ..arithmetic import MOST, pointwise

_graph_task = torch._C._current_graph_task_id
_here = threading.local()

IRRATIONAL = {
    "pi": "3.14159265358979323846264338327950288419716939937510582097494459230781641",
    "2 pi": "6.28318530717958647692528676655900576839433879875021164194988918461563281",
    "pi / 180": "0.0174532925199432957692369076848861271344287188854172545609719144017100911",
    "180 / pi": "57.2957795130823208767981548141051703324054724665643215491602438612028471",
    "log 2": "0.693147180559945309417232121458176568075500134360255254120680009493393622",
    "log 10": "2.30258509299404568401799145468436420760110148862877297603332790096757261",
    "1 / log 2": "1.44269504088896340735992468100189213742664595415298593413544940693110922",
    "1 / log 10": "0.434294481903251827651128918916605082294397005803666566114453783165864649",
    "2 / sqrt pi": "1.12837916709551257389615890312154517168810125865799771368817144342128494",
    "sqrt(pi) / 2": "0.886226925452758013649083741670572591398774728061193564106903894926455642",
    "sqrt(2 pi)": "2.50662827463100050241576528481104525300698674060993831662992357634229365",
    "1 / sqrt(2 pi)": "0.398942280401432677939946059934381868475858631164934657665925829670657926",
    "sqrt 2": "1.41421356237309504880168872420969807856967187537694807317667973799073248",
    "1 / sqrt 2": "0.707106781186547524400844362104849039284835937688474036588339868995366239",
    "sqrt(2 / pi)": "0.797884560802865355879892119868763736951717262329869315331851659341315852",
    "log sqrt(2 pi)": "0.918938533204672741780329736405617639861397473637783412817151540482765696",
    "log pi": "1.14472988584940017414342735135305871164729481291531157151362307147213777",
}
# The nodes of torch's graph whose formulas hold numbers of their own.
_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        *("Erf", "Erfc", "Erfinv", "SpecialErfcx", "SpecialNdtri", "SpecialLogNdtr", "Exp2", "Log2", "Log10"),
        *("Deg2Rad", "Rad2Deg", "Sinc", "Var", "VarMean", "Std", "StdMean", "LogitBackward", "Mvlgamma", "Logaddexp2"),
        *(
            "Logit",
            "NativeLayerNorm",
            "NativeGroupNorm",
            "LinalgVectorNorm",
            "Norm",
            "Lerp",
            "Pow",
            "Celu",
            "Elu",
            "Ldexp",
        ),
    )
)
# Where nodes keep the number that they were given and compute another one of.
_SAVED = ("_saved_exponent", "_saved_weight", "_saved_alpha", "_saved_ord", "_saved_p")
_POWER_OF_NUMBER = "PowBackward2"
_INVERTS = "CeluBackward0"
_FLOAT32 = 2.0**-22  # torch inverts celu's alpha in float32
_SELU = (
    "1.05070098735548049341933498529460635195898120437640454697787838780199462",
    "1.75809934084737685994021752081227957732350683716202164080477152424229113",
)
_LARGEST, _SMALL = 2**26, 64


@contextmanager
def formula(operator: OpOverload, given: Iterable) -> Iterator[None]:
    """A context in which torch's formula of an operator runs with these arguments."""
    before = getattr(_here, "literals", None)
    if before is None:  # else the numbers are those of a formula that this one is a step of
        _here.literals = {abs(x) for x in tree_leaves(given) if isinstance(x, float)} | _defaults(operator)
    try:
        yield
    finally:
        _here.literals = before


@functools.cache
def _defaults(operator: OpOverload) -> frozenset[float]:
    """Return the default values of an operator's floating-point arguments."""
    values = (a.default_value for a in operator._schema.arguments if a.has_default_value())
    return frozenset(abs(value) for value in values if isinstance(value, float))


def terms_of(value: float) -> tuple[float, ...] | None:
    """Return the constant of a formula that a float64 approximates here, as four float64; None where it is exact."""
    given = getattr(_here, "literals", None)
    if given is not None and (abs(value) not in given or abs(value) in _selu()):
        return _recovered(value)
    return _terms_in_backward(value) if _graph_task() != -1 else None


def _terms_in_backward(value: float) -> tuple[float, ...] | None:
    node = torch._C._current_autograd_node()
    name = "" if node is None else node.name()
    if name == _POWER_OF_NUMBER:
        return _logarithm(value, getattr(node, "_saved_self", None))
    if name not in _NODES:
        return None
    for attribute in _SAVED:
        saved = getattr(node, attribute, None)
        if isinstance(saved, (float, int)):
            return _derived(value, float(saved), name == _INVERTS)
    return _recovered(value) if getattr(_here, "literals", None) is None else None


def _derived(value: float, saved: float, inverts: bool) -> tuple[float, ...] | None:
    """Return p - 1, p - 2, 1 - p or 1 / p of a node's argument p, where the value approximates that."""
    if saved in (math.inf, -math.inf) or saved != saved:
        return None
    exact = Fraction(saved)
    found = {saved - 1: exact - 1, 1 - saved: 1 - exact, saved - 2: exact - 2}.get(value)
    if found is None and inverts and value != saved and abs(value * saved - 1) < _FLOAT32:
        found = 1 / exact
    return None if found is None or found == Fraction(value) else _float64s(found)


def _logarithm(value: float, base: object) -> tuple[float, ...] | None:
    """Return the logarithm of the base of a power."""
    if not isinstance(base, (int, float)) or not base > 0 or not math.isclose(value, math.log(base), rel_tol=2.0**-48):
        return None
    number = torch.tensor(base, dtype=torch.float64, device="cpu")
    return tuple(map(float, pointwise("log", (number,), components=MOST, dtype=torch.float64)))


@functools.lru_cache(1024)
def _recovered(value: float) -> tuple[float, ...] | None:
    if value != value or value in (0.0, float("inf"), float("-inf")):
        return None
    known = _table().get(abs(value))
    exact = known if known is not None else _ratio(abs(value))
    if exact is None or exact == abs(Fraction(value)):
        return None
    return _float64s(exact if value > 0 else -exact)


def _ratio(value: float) -> Fraction | None:
    """Return the quotient of an integer up to 64 and one up to 2^26, or its inverse, that rounds to a float64.

    Another float64 is mistaken for one with a chance of about 2^-20.
    """
    for exact in (Fraction(value), 1 / Fraction(value)):
        near = exact.limit_denominator(_SMALL)
        if near and near.numerator <= _LARGEST:
            found = near if exact == Fraction(value) else 1 / near
            if float(found) == value:
                return found
    return None


@functools.cache
def _table() -> dict[float, Fraction]:
    """The constants by the nearest float64 and its two neighbours, one of which torch has for log 10."""
    table: dict[float, Fraction] = {}
    for text in (*IRRATIONAL.values(), *_SELU):
        table |= {value: Fraction(text) for value in _neighbours(float(text))}
    return table


@functools.cache
def _selu() -> frozenset[float]:
    """Return SELU's scale, and scale * alpha, which torch passes to elu."""
    return frozenset(value for text in _SELU for value in _neighbours(float(text)))


def _neighbours(value: float) -> tuple[float, ...]:
    return math.nextafter(value, 0), math.nextafter(value, 100), value


def _float64s(value: Fraction) -> tuple[float, ...]:
    terms = []
    for _ in range(MOST):
        terms.append(float(value))
        value -= Fraction(terms[-1])
    return tuple(terms)
