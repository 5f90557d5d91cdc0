"""The registry: which function computes which torch operator on scaled tensors, and what the class calls by name."""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload

from .._names import unknown
from ..kernels import present
from ..subclass import RuleTable
from ..subclass._rule_table import Given, Rule
from ._families import FAMILIES

# Functions that need the tensor class and lie above it: the class, and this file below it, call them by their names.
CLASS_FUNCTIONS: dict[str, Rule] = {}
# Rules of operators that torch defines after this package is imported, by the operators' names.
LATER_RULES: dict[str, Rule] = {}

_table = RuleTable()
RULES = _table.rules
rule_of = _table.of
derives = _table.derives
_promoted: dict[OpOverload, Rule] = {}
# The family of every registered operator.
FAMILY_OF: dict[OpOverload, str] = {}


def promoted_rule_of(operator: OpOverload) -> Rule:
    """Return an operator's rule for tensors with a home, a function of the home, the arguments and the options."""
    rule = _promoted.get(operator)
    if rule is None:
        rule = _promoted[operator] = CLASS_FUNCTIONS["make_promoted_rule"](operator)
    return rule


def class_function(function: Given) -> Given:
    """Register a function in `CLASS_FUNCTIONS` under its own name, as a decorator."""
    CLASS_FUNCTIONS[function.__name__] = function
    return function


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
        raise ValueError(unknown("family", family, FAMILIES))
    register: Callable[[Given], Given] = _table.implements(*operators)

    def with_family(rule: Given) -> Given:
        FAMILY_OF.update(dict.fromkeys(present(operators), family))
        for operator in present(operators):
            _promoted.pop(operator, None)
        return register(rule)

    return with_family
