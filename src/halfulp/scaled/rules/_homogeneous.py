"""Rules told by degree: which arguments enter as payloads, which as values, and what scale that gives the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels import present
from .. import _powers_of_two as _powers
from .._operands import encoded, first_scaled, logical_of, operand, storage_of, widened
from .._registry import implements
from .._scaled_tensor import ScaledTensor
from ._families import one, result, value_of
from .memory._constants import together


def by_degree(*operators: OpOverload, family: str, terms: Callable | None = None, **degrees: int) -> None:
    """Register operators with op(.., p_i s_i, ..) = op(.., p_i, ..) times the product of s_i^d_i.

    Args:
        operators: the overloads; floating tensors among their arguments that are not named enter as values.
        family: the heading in tables.
        terms: of the operator's arguments: a power of two that payloads are divided by, and the scale multiplied.
        degrees: by the name of the argument; the results have the storage and dtype of those of another degree than 0.
    """
    for operator in present(operators):
        implements(operator, family=family)(_of_degrees(operator, degrees, terms))


def _of_degrees(operator: OpOverload, degrees: dict[str, int], terms: Callable | None) -> Callable:
    names = [argument.name for argument in operator._schema.arguments]
    if missing := degrees.keys() - set(names):
        raise AssertionError(f"{operator} has no arguments {', '.join(sorted(missing))}")

    def rule(*arguments: Any, **options: Any) -> Any:
        like = first_scaled(tree_leaves((arguments, options)))
        carriers: list[Tensor] = []
        factors: list[Tensor] = []

        def entering(name: str, x: Any) -> Any:
            degree = degrees.get(name)
            if degree is None or not is_floating(x):
                return tree_map(value_of, x)
            scaled = operand(x, like)
            if degree:
                carriers.append(x)
                factors.extend([scaled._scale] * degree)
            return widened(scaled)

        entered = [entering(name, x) for name, x in zip(names, arguments)]
        named = {name: entering(name, x) for name, x in options.items()}
        spread = 1.0 if terms is None else terms(*arguments, **options)
        results = operator(*entered, **named)
        holders = carriers if any(isinstance(x, ScaledTensor) for x in carriers) else [like]
        return under(results, factors, holders, spread)

    return rule


def under(results: Any, factors: list[Tensor], holders: list[Any], spread: float = 1.0) -> Any:
    """Floating results, payloads under the product of scales, each under a scale of its own."""
    storage, dtype = storage_of(holders), logical_of(holders)
    if not factors:
        factors = [one(first_scaled(holders))]
    if len(factors) == 1 and spread == 1.0:
        scale, rest = factors[0], 1.0
    else:
        scale, rest = _powers.product(*factors, spread)

    def held(y: Any) -> Any:
        if not isinstance(y, Tensor) or not y.is_floating_point():
            return y
        return result(y if spread == 1.0 else y * (1.0 / spread), scale.clone(), rest, storage, dtype)

    return tree_map(held, results)


def is_floating(x: Any) -> bool:
    """Whether it is a tensor of floats, with a scale or plain."""
    return isinstance(x, Tensor) and x.is_floating_point()


def keeping(*operators: OpOverload, family: str, least: bool = False, keep: str = "self") -> None:
    """Register operators computed on values whose results keep the scale of one argument: x times a gate of x.

    Args:
        operators: the overloads.
        family: the heading in tables.
        least: results do not vanish where arguments do, so that their scale is at least 1: softplus.
        keep: the name of the argument.
    """
    for operator in present(operators):
        implements(operator, family=family)(_keeping(operator, keep, least))


def _keeping(operator: OpOverload, keep: str, least: bool) -> Callable:
    position = [argument.name for argument in operator._schema.arguments].index(keep)

    def rule(*arguments: Any, **options: Any) -> Any:
        flat = tree_leaves((arguments, options))
        kept = operand(arguments[position], first_scaled(flat))
        scale = _powers.larger(kept._scale, one(kept)) if least else kept._scale
        values = operator(*tree_map(value_of, arguments), **tree_map(value_of, options))
        holders = [x for x in flat if isinstance(x, Tensor)]
        return tree_map(lambda y: held_under(y, scale, storage_of(holders), logical_of(holders)), values)

    return rule


def held_under(y: Any, scale: Tensor, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """float32 values as a scaled tensor of a given scale; what is no float as it is."""
    if not is_floating(y):
        return y
    return result(y, scale.clone(), _powers.ratio(one(y), scale), storage, dtype)


def joining(*operators: OpOverload, family: str) -> None:
    """Register operators with op(s p, s q, ..) = s op(p, q, ..): every floating tensor under the largest scale.

    Numbers and plain tensors without dimensions are constants: see `together`.
    """
    for operator in present(operators):
        implements(operator, family=family)(_joining(operator))


def _joining(operator: OpOverload) -> Callable:
    def rule(*arguments: Any, **options: Any) -> Any:
        flat = tree_leaves((arguments, options))
        holders = [x for x in flat if isinstance(x, ScaledTensor)]
        payloads, scale = together([x for x in flat if is_floating(x)])
        found = iter(payloads)
        arguments, options = tree_map(lambda x: next(found) if is_floating(x) else x, (arguments, options))
        results = operator(*arguments, **options)
        return under(results, [scale], holders + [x for x in flat if is_floating(x) and x.dim()])

    return rule


def measured_like(y: Any, holders: list[Any]) -> Any:
    """Floating values with a measured scale, in the storage and dtype of holders."""
    return encoded(y, storage_of(holders), dtype=logical_of(holders)) if is_floating(y) else y
