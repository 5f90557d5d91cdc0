"""Hooks of autograd's nodes that multiply the gradients which a node passes on."""

from __future__ import annotations

from collections.abc import Callable

from ...kernels import untraced
from ._backward import Backward
from ._strides import power_of_two

# Nodes whose gradients are new tensors, which nobody else reads: these are multiplied where they are.
_NEW = {
    *("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "ConvolutionBackward0"),
    *("NativeLayerNormBackward0", "NativeBatchNormBackward0"),
}


def multiplier(backward: Backward, kind: str, moves: tuple[tuple[int, int, int], ...]) -> Callable:
    """The hook of a node that multiplies some of its gradients by powers of two, in backward passes of a scaled loss.

    Args:
        backward: whose passes these are.
        kind: The node's name.
        moves: Which gradient, by which power, and how often the pass's lift counts (see Following).
    """

    @untraced
    def multiply(gradients: tuple, given: tuple) -> tuple | None:
        if backward.is_shut():
            return None
        found = list(gradients)
        for slot, exponent, sign in moves:
            if found[slot] is not None:
                found[slot] = following.moved_by(found[slot], exponent, sign)
        return tuple(found)

    following = backward.following
    if kind not in _NEW:
        return multiply
    return _of_three(backward, moves, multiply) if len(moves) == 3 else _of_any(backward, moves, multiply)


def _of_any(backward: Backward, moves: tuple[tuple[int, int, int], ...], otherwise: Callable) -> Callable:
    """The hook of a node with new gradients, multiplied where they are; ``otherwise`` where one is not new."""

    @untraced
    def multiply(gradients: tuple, given: tuple) -> tuple | None:
        if backward.is_shut():
            return None
        if gradients[0] is given[0]:
            # The gradient of what is added to a product is the product's own.
            return otherwise(gradients, given)
        powers = [raised(exponent, sign) for _, exponent, sign in moves]
        if None in powers:
            return otherwise(gradients, given)
        for (slot, _, _), power in zip(moves, powers):
            gradient = gradients[slot]
            if gradient is not None and power:
                gradient.mul_(power_of_two(power))
        return None

    raised = backward.following.raised
    return multiply


def _of_three(backward: Backward, moves: tuple[tuple[int, int, int], ...], otherwise: Callable) -> Callable:
    """Return the hook of `_of_any` for three gradients, without the loop: many layers are small."""
    (_, *first), (_, *second), (_, *third) = sorted(moves)
    raised = backward.following.raised

    @untraced
    def multiply(gradients: tuple, given: tuple) -> tuple | None:
        if backward.is_shut():
            return None
        a, b, c = gradients
        if a is given[0]:
            return otherwise(gradients, given)
        by_a, by_b, by_c = raised(*first), raised(*second), raised(*third)
        if by_a is None or by_b is None or by_c is None:
            return otherwise(gradients, given)
        if a is not None:
            a.mul_(power_of_two(by_a))
        if b is not None:
            b.mul_(power_of_two(by_b))
        if c is not None:
            c.mul_(power_of_two(by_c))
        return None

    return multiply
