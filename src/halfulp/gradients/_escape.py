"""Tensors that leave a model by other ways than its output, whose gradients would come back in the wrong units."""

from __future__ import annotations

from typing import Any

from ._site import Site

# Sequence numbers of nodes that accumulate into leaves, which many threads may share.
_LEAF = 2**62


def mark_exit(node: Any, anchor: Site) -> None:
    """Note of a node that its gradient has the global exponent, so that its tensor may leave by any way."""
    node.metadata[anchor] = True


def mark_edge(node: Any, anchor: Site) -> None:
    """Note of a node that it moves a gradient from a site to another."""
    node.metadata[anchor] = False


def is_exit(node: Any, anchor: Site) -> bool:
    """Whether `mark_exit` noted that."""
    return node.metadata.get(anchor, False)


def check_exits(node: Any, anchor: Site) -> None:
    """Follow a loss back to the forward passes it came from, which it must reach through their outputs.

    From any other tensor of a model every path leads over an edge, as only edges lead out of a site. Marks are kept by
    a scaler's global site: models of other scalers, whose edges do nothing, are passed through.

    Raises:
        ValueError: it reaches into one by another way.
    """
    seen, pending = set(), [(node, node)]
    while pending:
        node, entered = pending.pop()
        leaves = node.metadata.get(anchor)
        if leaves is False:
            raise ValueError(
                f"the loss reads a tensor from inside the model, which {entered.name()} or what follows it made, and "
                "that is not part of the model's output, such as one kept in an attribute, or in an object "
                "other than a list, tuple, dict or data class: return it from forward in one of these (numbers, as "
                "losses of their own, may be kept anywhere)"
            )
        if leaves is None and node not in seen and node._sequence_nr() < _LEAF:
            seen.add(node)
            pending += [(following, node) for following, _ in node.next_functions if following is not None]
