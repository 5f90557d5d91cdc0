"""The table of rules of a tensor subclass: the function that computes each torch operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._ops import OpOverload

from ..kernels import present

Rule = Callable[..., Any]
Given = TypeVar("Given", bound=Rule)


class RuleTable:
    """The rules of a tensor subclass: registered ones, and those that were derived when first met.

    derive: makes the rule of an operator that has none; or `derives` registers it, from a file that imports the class.
    """

    def __init__(self, derive: Callable[[OpOverload], Rule] | None = None) -> None:
        self.rules: dict[OpOverload, Rule] = {}
        self._derived: dict[OpOverload, Rule] = {}
        self._derive = derive

    def derives(self, derive: Callable[[OpOverload], Rule]) -> Callable[[OpOverload], Rule]:
        """Register, as a decorator, the function that makes the rule of an operator that has none."""
        self._derive = derive
        return derive

    def of(self, operator: OpOverload) -> Rule:
        """Return an operator's rule; derived, and kept, where none is registered."""
        rule = self.rules.get(operator) or self._derived.get(operator)
        if rule is None:
            assert self._derive is not None  # the file of derivations is imported with the class
            rule = self._derived[operator] = self._derive(operator)
        return rule

    def implements(self, *operators: OpOverload) -> Callable[[Given], Given]:
        """A decorator that registers a function as the rule of operators, of which torch may lack some.

        Raises:
            TypeError: an argument is not one overload of an operator.
            ValueError: an operator has a rule already.
        """
        known = present(operators)
        for operator in known:
            if not isinstance(operator, OpOverload):
                raise TypeError(f"{operator!r} is not one overload of an operator: give torch.ops.aten.add.Tensor, say")
            if operator in self.rules:
                name = self.rules[operator].__name__
                raise ValueError(f"{operator} has a rule already ({name}): no operator has two")

        def register(rule: Given) -> Given:
            for operator in known:
                self.rules[operator] = rule
                self._derived.pop(operator, None)
            return rule

        return register
