"""The registry: which function computes which torch operator on scaled tensors, by families, and their dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch._ops import OpOverload

from .._names import describe_unknown_name
from ..kernels import list_present_operators
from ..subclass import RuleTable
from ..subclass._rule_table import Given, Rule

STORAGE_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)
LOGICAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_storage(dtype: object) -> torch.dtype:
    """Raise unless payloads can have this dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in STORAGE_DTYPES:
        raise ValueError(f"dtype={dtype}: a payload is one of {', '.join(map(str, STORAGE_DTYPES))}")
    return dtype


def check_home(home: object) -> torch.dtype | None:
    """Raise unless tensors can have this home."""
    if home is None:
        return None
    if not isinstance(home, torch.dtype) or home not in (torch.float16, torch.bfloat16):
        raise ValueError(f"home={home}: allowed are torch.float16, torch.bfloat16 and None")
    return home


def check_logical(dtype: object) -> None:
    """Raise unless values can have this dtype."""
    if dtype not in LOGICAL_DTYPES:
        raise ValueError(f"dtype={dtype}: a logical dtype is one of {', '.join(map(str, LOGICAL_DTYPES))}")


OperandStorage = Literal["float32", "home", "widest", "rule"]
OPERAND_STORAGES = ("float32", "home", "widest", "rule")


@dataclass(frozen=True, slots=True)
class Family:
    """A family of operators that treat payloads p and scales s alike.

    Attributes:
        name: the heading in tables, and what `implements(..., family=name)` takes.
        payload: of the result, for tables.
        scale: of the result, for tables.
        operands: the storage of operands where tensors have a home: "float32", as torch.autocast computes it; "home",
            as it computes products; "widest", that of the widest operand; "rule", left to the rule.
    """

    name: str
    payload: str
    scale: str
    operands: OperandStorage = "widest"


FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Make a family known by its name to `implements` and to the tables.

    Raises:
        ValueError: another family has the name, its words are missing, or `operands` is none of those allowed.

    >>> _ = register_family(Family("doc example", "op(p)", "s", operands="float32"))
    >>> FAMILIES.pop("doc example").operands
    'float32'
    """
    if family.name in FAMILIES:
        raise ValueError(f"a family is called {family.name!r} already: give another name")
    if not (family.name.strip() and family.payload.strip() and family.scale.strip()):
        raise ValueError(f"{family}: say in words what the payload and the scale of a result are")
    if family.operands not in OPERAND_STORAGES:
        raise ValueError(f"operands={family.operands!r}: allowed are {', '.join(map(repr, OPERAND_STORAGES))}")
    FAMILIES[family.name] = family
    return family


for _family in (
    Family("pass-through", "op(p)", "s"),
    Family(
        "bilinear",
        "product: p₁ p₂; sum of K products: (Σ p₁ p₂) / c",
        "s₁ s₂; s₁ s₂ c with c = p2(√K)",
        operands="home",
    ),
    Family(
        "attention",
        "torch's fused kernel of p_q s_q s_k, p_k, p_v",
        "s_v; gradients s_g s_v s_k/c, s_g s_v s_q/c, s_g",
        operands="home",
    ),
    Family("alignment", "op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    Family(
        "reduction",
        "sum of n, norm: op(p) / c; mean, deviation: op(p)",
        "s c with c = p2(√n); s; products: measured",
        operands="float32",
    ),
    Family("gated", "f(p s) / s", "s; max(s, 1) where f(0) is not 0; gradients s_g"),
    Family(
        "unit output",
        "f(p s)",
        "1; min(s, 1) where f(x) is about x near 0; more where the largest result needs it",
        operands="float32",
    ),
    Family(
        "power law",
        "pⁿ, √p, √(2 p) for an odd power of two",
        "sⁿ, √s, √(s/2); measured for other exponents",
        operands="float32",
    ),
    Family("norm", "(p − mean) / √(var + eps/s²)", "1; gradients s_g/s, of weights s_g c", operands="rule"),
    Family("loss", "by loss", "s or measured; gradients of a mean over n: about s_g/n", operands="float32"),
    Family("recurrent", "torch's fused layer on values", "measured", operands="home"),
    Family("indexing", "op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    Family("pooling", "op(p)", "s"),
    Family("order", "to whole numbers: op(p s) / scale; histograms: on values", "max(s, 1); measured"),
    Family(
        "random",
        "on values, by torch's generator",
        "measured; draws of 0 and 1: 1; dropout's gradient: s_g",
        operands="rule",
    ),
    Family("linear algebra", "on values", "measured", operands="float32"),
    Family("special", "on values", "measured", operands="float32"),
    Family("complex", "on values", "none: plain complex tensors"),
    Family("comparison", "on values", "none: plain truth values and indices"),
    Family(
        "creation",
        "the constant over its power of two",
        "the power of two next to it; 2⁻¹²⁶ for zeros",
        operands="rule",
    ),
    Family(
        "writing", "p s/s′", "s′ = s where all memory is written; else the scale that stands there", operands="rule"
    ),
    Family("rescaling", "p / 2ᵏ, rounded by a cast", "s 2ᵏ, 2ᵏ next to the payload's rms", operands="rule"),
    Family("foreach", "the operator's own rule on each tensor", "by tensor", operands="rule"),
    Family(
        "collectives",
        "p s/s′, then the collective",
        "s′ = the largest of the ranks', times p2(√ranks) for sums",
        operands="rule",
    ),
    Family("own", "by its rule", "by its rule"),
):
    register_family(_family)


# Rules of operators that torch defines after this package is imported, by the operators' names.
RULES_OF_OPERATORS_TO_COME: dict[str, Rule] = {}

_rule_table = RuleTable()
RULES = _rule_table.rules
find_rule = _rule_table.of
register_rule_derivation = _rule_table.derives
# For tensors with a home: a rule is a function of the home, the arguments and the options.
_promoted_rule_table = RuleTable()
find_promoted_rule = _promoted_rule_table.of
register_promotion_derivation = _promoted_rule_table.derives
# The family of every registered operator.
FAMILY_BY_OPERATOR: dict[OpOverload, str] = {}


class ComplexOperand(Exception):
    """Raised for a complex operand: the operator runs on plain values, and the result is plain."""


def implements(*operators: OpOverload, family: str = "own") -> Callable[[Given], Given]:
    """Register a function as the rule of torch operators for scaled tensors, as a decorator.

    The function takes the operator's own arguments, of which some are ScaledTensors, runs below autograd, and returns
    what the operator returns. `halfulp.testing.check_rule` holds it to the plain operator under random scales.

    Args:
        operators: overloads such as `torch.ops.aten.erfc.default` or `torch.ops.mylib.smooth.default`.
        family: the name of a registered `Family`: the heading in tables, and the operands' storage under a home.

    Raises:
        TypeError: an argument is not one overload of an operator.
        ValueError: an operator has a rule already, or the family is not registered.

    >>> import torch
    >>> from halfulp.scaled import ScaledTensor
    >>> _ = torch.library.define("halfulp_doc::thrice", "(Tensor x) -> Tensor")
    >>> @ScaledTensor.implements(torch.ops.halfulp_doc.thrice.default)
    ... def thrice(x):
    ...     return ScaledTensor(x.payload * 3, x.scale, x.dtype)
    >>> torch.ops.halfulp_doc.thrice(ScaledTensor.encode(torch.tensor([1.0, 2.0]))).tolist()
    [3.0, 6.0]
    """
    if family not in FAMILIES:
        raise ValueError(describe_unknown_name("family", family, FAMILIES))
    register: Callable[[Given], Given] = _rule_table.implements(*operators)

    def register_in_family(rule: Given) -> Given:
        FAMILY_BY_OPERATOR.update(dict.fromkeys(list_present_operators(operators), family))
        for operator in list_present_operators(operators):
            _promoted_rule_table.forget(operator)
        return register(rule)

    return register_in_family
