"""Tensors that leave a model by other ways than its output, whose gradients would come back in the wrong units."""

from __future__ import annotations

from typing import Any

from ._backward import Stay

# Sequence numbers of nodes that accumulate into leaves.
_LEAF = 2**62


def check_exits(node: Any, stays: list[Stay]) -> None:
    """Follow a loss back to the forward passes it came from, which it must reach through their outputs.

    Raises:
        ValueError: it reaches into one by another way.
    """
    seen, pending = set(), [node]
    while pending:
        node = pending.pop()
        number = node._sequence_nr()
        if number >= _LEAF or number in seen:
            continue
        seen.add(number)
        stay = next((stay for stay in stays if stay.begun <= number < stay.ended), None)
        if stay is None:
            pending += [following for following, _ in node.next_functions if following is not None]
        elif number not in stay.exits:
            raise ValueError(
                f"the loss reads a tensor that {node.name()} made inside the model and that is not part of the model's "
                "output, such as one kept in an attribute: return it from forward as well (numbers, as losses of "
                "their own, may be kept anywhere)"
            )
