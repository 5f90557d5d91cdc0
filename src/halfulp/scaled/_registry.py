"""The registry: which function computes which torch operator on scaled tensors, by families, and their dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch._ops import OpOverload

from .._names import describe_unknown_name
from ..kernels import list_present_operators
from ..subclass import RuleTable
from ..subclass._rule_table import Rule, RuleType

STORAGE_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)
LOGICAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHT_BIT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# With the range of float32, in which rules compute.
FULL_RANGE_STORAGES = (torch.float32, torch.bfloat16)


def check_storage_dtype(dtype: object) -> torch.dtype:
    """Raise unless payloads can have this dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in STORAGE_DTYPES:
        raise ValueError(f"dtype={dtype}: a payload is one of {', '.join(map(str, STORAGE_DTYPES))}")
    return dtype


def check_home_dtype(home: object) -> None:
    """Raise unless tensors can have this home."""
    if home not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"home={home}: allowed are torch.float16, torch.bfloat16 and None")


def check_logical_dtype(dtype: object) -> None:
    """Raise unless values can have this dtype."""
    if dtype not in LOGICAL_DTYPES:
        raise ValueError(f"dtype={dtype}: a logical dtype is one of {', '.join(map(str, LOGICAL_DTYPES))}")


OperandStorage = Literal["float32", "home", "widest", "rule"]
OPERAND_STORAGES = get_args(OperandStorage)


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


FAMILY_BY_NAME: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Make a family known by its name to `implements` and to the tables.

    Raises:
        ValueError: another family has the name, its words are missing, or `operands` is none of those allowed.

    >>> _ = register_family(Family("doc example", "op(p)", "s", operands="float32"))
    >>> FAMILY_BY_NAME.pop("doc example").operands
    'float32'
    """
    if family.name in FAMILY_BY_NAME:
        raise ValueError(f"a family is called {family.name!r} already: give another name")
    if not (family.name.strip() and family.payload.strip() and family.scale.strip()):
        raise ValueError(f"{family}: say in words what the payload and the scale of a result are")
    if family.operands not in OPERAND_STORAGES:
        raise ValueError(f"operands={family.operands!r}: allowed are {', '.join(map(repr, OPERAND_STORAGES))}")
    FAMILY_BY_NAME[family.name] = family
    return family


# Name, storage of operands, payload and scale of the result.
_BUILT_IN_FAMILIES: tuple[tuple[str, OperandStorage, str, str], ...] = (
    ("pass-through", "widest", "op(p)", "s"),
    ("bilinear", "home", "product: p₁ p₂; sum of K products: (Σ p₁ p₂) / c", "s₁ s₂; s₁ s₂ c with c = p2(√K)"),
    (
        "attention",
        "home",
        "torch's fused kernel of p_q s_q s_k, p_k, p_v",
        "s_v; gradients s_g s_v s_k/c, s_g s_v s_q/c, s_g",
    ),
    ("alignment", "widest", "op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    (
        "reduction",
        "float32",
        "sum of n, norm: op(p) / c; mean, deviation: op(p)",
        "s c with c = p2(√n); s; products: measured",
    ),
    ("gated", "widest", "f(p s) / s", "s; max(s, 1) where f(0) is not 0; gradients s_g"),
    (
        "unit output",
        "float32",
        "f(p s)",
        "1; min(s, 1) where f(x) is about x near 0; more where the largest result needs it",
    ),
    ("power law", "float32", "pⁿ, √p, √(2 p) for an odd power of two", "sⁿ, √s, √(s/2); measured for other exponents"),
    ("norm", "rule", "(p − mean) / √(var + eps/s²)", "1; gradients s_g/s, of weights s_g c"),
    ("loss", "float32", "by loss", "s or measured; gradients of a mean over n: about s_g/n"),
    ("recurrent", "home", "torch's fused layer on values", "measured"),
    ("indexing", "widest", "op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    ("pooling", "widest", "op(p)", "s"),
    ("order", "widest", "to whole numbers: op(p s) / scale; histograms: on values", "max(s, 1); measured"),
    ("random", "rule", "on values, by torch's generator", "measured; draws of 0 and 1: 1; dropout's gradient: s_g"),
    ("linear algebra", "float32", "on values", "measured"),
    ("special", "float32", "on values", "measured"),
    ("complex", "widest", "on values", "none: plain complex tensors"),
    ("comparison", "widest", "on values", "none: plain truth values and indices"),
    ("creation", "rule", "the constant over its power of two", "the power of two next to it; 2⁻¹²⁶ for zeros"),
    ("writing", "rule", "p s/s′", "s′ = s where all memory is written; else the scale that stands there"),
    ("rescaling", "rule", "p / 2ᵏ, rounded by a cast", "s 2ᵏ, 2ᵏ next to the payload's rms"),
    ("foreach", "rule", "the operator's own rule on each tensor", "by tensor"),
    ("collectives", "rule", "p s/s′, then the collective", "s′ = the largest of the ranks', times p2(√ranks) for sums"),
    ("own", "widest", "by its rule", "by its rule"),
)
for _name, _operands, _payload, _scale in _BUILT_IN_FAMILIES:
    register_family(Family(_name, _payload, _scale, _operands))


# Rules of operators that torch defines after this package is imported, by the operators' names.
RULES_OF_OPERATORS_DEFINED_LATER: dict[str, Rule] = {}

_rule_table = RuleTable()
RULES = _rule_table.rules
find_rule = _rule_table.find_rule
register_rule_derivation = _rule_table.register_derivation
# For tensors with a home: a rule is a function of the home, the arguments and the options.
_rule_table_of_tensors_with_home = RuleTable()
find_rule_with_home = _rule_table_of_tensors_with_home.find_rule
register_derivation_with_home = _rule_table_of_tensors_with_home.register_derivation
# The family of every registered operator.
FAMILY_BY_OPERATOR: dict[OpOverload, str] = {}


class ComplexOperandError(Exception):
    """Raised for a complex operand: the operator runs on plain values, and the result is plain."""


def implements(*operators: OpOverload, family: str = "own") -> Callable[[RuleType], RuleType]:
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
    if family not in FAMILY_BY_NAME:
        raise ValueError(describe_unknown_name("family", family, FAMILY_BY_NAME))
    known = list_present_operators(operators)
    register: Callable[[RuleType], RuleType] = _rule_table.implements(*known)

    def register_in_family(rule: RuleType) -> RuleType:
        for operator in known:
            FAMILY_BY_OPERATOR[operator] = family
            _rule_table_of_tensors_with_home.drop_derived_rule(operator)
        return register(rule)

    return register_in_family


def implements_each(*operators: OpOverload, family: str) -> Callable[[RuleType], RuleType]:
    """Register a function of an operator and of its arguments as the rule of several operators, as a decorator."""

    def register(rule: RuleType) -> RuleType:
        for operator in list_present_operators(operators):
            implements(operator, family=family)(functools.partial(rule, operator))
        return rule

    return register
