"""The table of rules: the function that computes a torch operator on MCTensors."""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload

from ..subclass._rule_table import Given, RuleTable

_table = RuleTable()
RULES = _table.rules
rule_of = _table.of
derives = _table.derives


def implements(*operators: OpOverload) -> Callable[[Given], Given]:
    """Register a function as the rule of torch operators for MCTensors, as a decorator.

    The function takes the operator's own arguments, runs below autograd, and returns what the operator returns.

    Args:
        operators: overloads such as `torch.ops.aten.erfc.default` or `torch.ops.mylib.smooth.default`.

    Raises:
        TypeError: an argument is not one overload of an operator.
        ValueError: an operator has a rule already.

    >>> import torch
    >>> from halfulp.mctensor import MCTensor
    >>> _ = torch.library.define("halfulp_doc::twice", "(Tensor x) -> Tensor")
    >>> @MCTensor.implements(torch.ops.halfulp_doc.twice.default)
    ... def twice(x):
    ...     return x + x
    >>> torch.ops.halfulp_doc.twice(MCTensor.encode("0.1")).to_strings()
    '0.20000000000000'
    """
    return _table.implements(*operators)
