"""The table of rules of a tensor subclass, and counts of operators that had none and ran on plain tensors."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from .._messages import find_user_stack_level
from ..kernels import list_present_operators

fallback_totals: Counter[str] = Counter()
_warned_fallbacks: set[tuple[str, str]] = set()
# Process-wide and not per thread: a backward pass on an accelerator runs in threads of its own.
_fallback_recorders: list[Counter[str]] = []


class _LatestModelFallbackCounts:
    """The counts of the model whose forward pass began last."""

    # Only written while a compiled model is traced: to read them would be a guard, and each change a new graph.

    counts: Counter[str] | None = None


running_model_fallbacks = _LatestModelFallbackCounts()
_strict_contexts: list[bool] = []


class FallbackWarning(UserWarning):
    """An operator without a rule ran on plain tensors: MCTensors in float64, scaled tensors in float32."""


@contextmanager
def record_fallbacks() -> Iterator[Counter[str]]:
    """Return a block whose fallbacks are counted apart: operator names and how often, backward passes in it included.

    >>> with record_fallbacks() as counts:
    ...     pass
    >>> dict(counts)
    {}
    """
    counts: Counter[str] = Counter()
    _fallback_recorders.append(counts)
    try:
        yield counts
    finally:
        _fallback_recorders[:] = [other for other in _fallback_recorders if other is not counts]


@contextmanager
def strict() -> Iterator[None]:
    """Return a context in which an operator without a rule raises NotImplementedError and never uses plain tensors."""
    _strict_contexts.append(True)
    try:
        yield
    finally:
        _strict_contexts.pop()


def note_fallback(operator: OpOverload, why: str, remedy: str, loss: str) -> None:
    """Count a fallback; warn at an operator's first, of the rule to register and what is lost; raise where strict."""
    name = str(operator)
    advice = f"{name} has no rule for {why}: {remedy}"
    if _strict_contexts:
        raise NotImplementedError(f"{advice}, or leave halfulp.mctensor.strict()")
    fallback_totals[name] += 1
    for counts in (*_fallback_recorders, running_model_fallbacks.counts):
        if counts is not None:
            counts[name] += 1
    if (name, remedy) not in _warned_fallbacks:
        _warned_fallbacks.add((name, remedy))
        warnings.warn(f"{advice}. {loss}", FallbackWarning, stacklevel=find_user_stack_level())


Rule = Callable[..., Any]
RuleType = TypeVar("RuleType", bound=Rule)


class RuleTable:
    """The rules of a tensor subclass: registered ones, and those that were derived when first met."""

    def __init__(self) -> None:
        self.rules: dict[OpOverload, Rule] = {}
        self._derived: dict[OpOverload, Rule] = {}
        self._derive: Callable[[OpOverload], Rule] | None = None

    def register_derivation(self, derive: Callable[[OpOverload], Rule]) -> Callable[[OpOverload], Rule]:
        """Register, as a decorator, the function that makes the rule of an operator that has none."""
        self._derive = derive
        return derive

    def find_rule(self, operator: OpOverload) -> Rule:
        """Return an operator's rule; derived, and kept, where none is registered."""
        rule = self.rules.get(operator) or self._derived.get(operator)
        if rule is None:
            assert self._derive is not None  # the file of derivations is imported with the class
            rule = self._derived[operator] = self._derive(operator)
        return rule

    def drop_derived_rule(self, operator: OpOverload) -> None:
        """Drop an operator's derived rule, so that it is derived anew."""
        self._derived.pop(operator, None)

    def implements(self, *operators: OpOverload) -> Callable[[RuleType], RuleType]:
        """Return a decorator that registers a function as the rule of operators, of which torch may lack some."""
        known = list_present_operators(operators)
        for operator in known:
            if not isinstance(operator, OpOverload):
                raise TypeError(f"{operator!r} is not one overload of an operator: give torch.ops.aten.add.Tensor, say")
            if operator in self.rules:
                raise ValueError(f"{operator} has a rule already: no operator has two")

        def register(rule: RuleType) -> RuleType:
            for operator in known:
                self.rules[operator] = rule
                self.drop_derived_rule(operator)
            return rule

        return register


_get_graph_task_id = torch._C._current_graph_task_id
# 1 / (1 + exp(b - a)), 1 / (1 + x^2), a / (a^2 + b^2) and their like: beside a large x the 1 would vanish under one
# scale, and a finite gradient would be infinite.
_QUOTIENT_NODE_NAMES = frozenset(
    f"{name}Backward0"
    for name in (
        *("Logaddexp", "Logaddexp2", "Log1P", "Atan", "Atan2", "Asinh", "Acosh", "Atanh", "Asin", "Acos", "Sinc"),
        *("Hypot", "Addcdiv", "Xlogy", "SpecialXlog1Py", "Log2", "Log10", "Logcumsumexp"),
    )
)


def is_in_quotient_formula() -> bool:
    """Return whether the backward pass now runs a node whose formula is a quotient, as logaddexp's and atan's."""
    if _get_graph_task_id() == -1:
        return False
    node = torch._C._current_autograd_node()
    return node is not None and node.name() in _QUOTIENT_NODE_NAMES


# So many times the largest of the others the least outlier is: data of a wide range have no such gap.
_OUTLIER_GAP = 2.0**10


def find_outlier_mask(x: Tensor, least_magnitude: float, among_zeros: bool = True) -> Tensor:
    """Return where elements from a size on are outliers, which stand for infinity; nowhere if they are data."""
    # Outliers lie far beyond all other elements, and are one number or no more than the others: a column of time stamps
    # beside a padded zero is neither. Among zeros alone they may be, unless the tensor is a product's factor, whose
    # zeros are exact beside any number.
    magnitudes = torch.nan_to_num(x.detach().abs(), 0.0, 0.0, 0.0)
    large = magnitudes >= least_magnitude
    if not x.numel():
        return large
    others = torch.where(large, 0.0, magnitudes).amax()
    least, largest = torch.where(large, magnitudes, torch.inf).amin(), magnitudes.amax()
    are_few = 2 * large.count_nonzero() <= x.numel()
    decided = (least >= others * _OUTLIER_GAP) & ((least == largest) | are_few)
    return large & (decided if among_zeros else decided & (others > 0))
