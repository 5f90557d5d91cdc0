"""Which function computes which torch operator on MCTensors."""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload

RULES: dict[OpOverload, Callable] = {}
_DERIVED: dict[OpOverload, Callable] = {}


def rule_of(operator: OpOverload) -> Callable:
    """An operator's rule: registered, or derived from other operators' when it is met first."""
    rule = RULES.get(operator) or _DERIVED.get(operator)
    if rule is None:
        from ._derivation import derived  # the derivations need the tensor class, which needs this file

        rule = _DERIVED[operator] = derived(operator)
    return rule


def implements(*operators: OpOverload) -> Callable[[Callable], Callable]:
    """Register a function as the rule of torch operators for MCTensors, as a decorator.

    The function takes the operator's own arguments, runs below autograd, and returns what the operator returns.

    Args:
        operators: overloads such as `torch.ops.aten.erfc.default` or `torch.ops.mylib.smooth.default`.

    Raises:
        TypeError: an argument is not one overload of an operator.
        ValueError: an operator has a rule already.

    >>> import torch
    >>> from halfulp.tensors import MCTensor
    >>> _ = torch.library.define("halfulp_doc::twice", "(Tensor x) -> Tensor")
    >>> @MCTensor.implements(torch.ops.halfulp_doc.twice.default)
    ... def twice(x):
    ...     return x + x
    >>> torch.ops.halfulp_doc.twice(MCTensor.encode("0.1")).to_strings()
    '0.20000000000000'
    """
    for operator in operators:
        if not isinstance(operator, OpOverload):
            raise TypeError(f"{operator!r} is not one overload of an operator: give torch.ops.aten.add.Tensor, say")
        if operator in RULES:
            raise ValueError(f"{operator} has a rule already ({RULES[operator].__name__}): no operator has two")

    def register(rule: Callable) -> Callable:
        for operator in operators:
            RULES[operator] = rule
        return rule

    return register
