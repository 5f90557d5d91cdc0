"""Tensors that leave a model by other ways than its output, whose gradients would come back in the wrong units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ._site import Site

# Sequence numbers of nodes that accumulate into leaves, which many threads may share.
LEAF = 2**62


def mark(node: Any, anchor: Site, site: Site) -> None:
    """Note of a node at whose exponent its gradient arrives; ``anchor`` is the global site of the scaler."""
    node.metadata[anchor] = site


def is_exit(node: Any, anchor: Site) -> bool:
    """Whether that is the global one, so that the node's tensor may leave by any way."""
    return node.metadata.get(anchor) is anchor


def reached(nodes: Iterable[Any], ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Nodes and, each once, all that a backward pass from there reaches, not past those where it ``ends``."""
    seen: set[Any] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not ends(node):
            pending += [following for following, _ in node.next_functions]


def check_exits(node: Any, anchor: Site) -> None:
    """Follow what is read outside back to the forward passes it came from, which it must reach through their outputs.

    From any other tensor of a model every path leads over an edge, as only edges lead out of a site, and all of them
    are marked. Models of other scalers, whose edges do nothing, are passed through.

    Raises:
        ValueError: it reaches into one by another way.
    """
    for behind in reached([node], lambda one: anchor in one.metadata):
        site = behind.metadata.get(anchor, anchor)
        if site is not anchor:
            raise ValueError(
                f"a tensor from inside the model, at {site.key!r}, is read outside, by the loss or on its way into "
                "another forward pass, and is not part of the model's output, such as one kept in an attribute, or in "
                "an object other than a list, tuple, dict or data class: return it from forward in one of these "
                "(numbers that a function computed, as losses of their own, may be kept anywhere)"
            )
