"""Hooks of autograd's nodes that multiply the gradients which a node passes on."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..kernels import untraced
from ._backward import Backward
from ._strides import power_of_two, shifted

# Nodes whose gradients are new tensors, which nobody else reads: these are multiplied where they are.
_NEW = {
    *("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "ConvolutionBackward0"),
    *("NativeLayerNormBackward0", "NativeBatchNormBackward0"),
}


def multiplier(backward: Backward, kind: str, moves: tuple[tuple[int, int], ...]) -> Callable:
    """The hook of a node that multiplies some of its gradients by powers of two, in backward passes of a scaled loss.

    Args:
        backward: whose passes these are.
        kind: The node's name.
        moves: Which gradient, and by which power.
    """

    @untraced
    def multiply(gradients: tuple, given: tuple) -> tuple | None:
        if backward.shut():
            return None
        found = list(gradients)
        for slot, exponent in moves:
            if found[slot] is not None:
                found[slot] = shifted(found[slot], exponent)
        return tuple(found)

    if kind not in _NEW:
        return multiply
    factors = [(slot, power_of_two(exponent)) for slot, exponent in moves]
    return _of_three(backward, dict(factors), multiply) if len(factors) == 3 else _of_any(backward, factors, multiply)


def _of_any(backward: Backward, factors: list[tuple[int, Tensor]], otherwise: Callable) -> Callable:
    """The hook of a node with new gradients, multiplied where they are; ``otherwise`` where one is not new."""

    @untraced
    def multiply(gradients: tuple, given: tuple) -> tuple | None:
        if backward.shut():
            return None
        if gradients[0] is given[0]:
            # The gradient of what is added to a product is the product's own.
            return otherwise(gradients, given)
        for slot, factor in factors:
            gradient = gradients[slot]
            if gradient is not None:
                gradient.mul_(factor)
        return None

    return multiply


def _of_three(backward: Backward, factors: dict[int, Tensor], otherwise: Callable) -> Callable:
    """The same for a layer with input, weight and bias, without the loop: there are many, and small ones."""
    first, second, third = factors[0], factors[1], factors[2]

    @untraced
    def multiply(gradients: tuple, given: tuple) -> tuple | None:
        if backward.shut():
            return None
        a, b, c = gradients
        if a is given[0]:
            return otherwise(gradients, given)
        if a is not None:
            a.mul_(first)
        if b is not None:
            b.mul_(second)
        if c is not None:
            c.mul_(third)
        return None

    return multiply
