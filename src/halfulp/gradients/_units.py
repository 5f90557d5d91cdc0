"""Units: whether every gradient of a graph would arrive at the exponent that its node is meant for."""

from __future__ import annotations

from typing import Any

from ._escape import LEAF
from ._site import Site


def mark_edge(node: Any, above: Site, below: Site, anchor: Site) -> None:
    """Note of an edge that it takes a gradient at ``above``'s exponent to ``below``'s; whose, the global site tells."""
    node.metadata[anchor] = above, below


def check_units(node: Any, anchor: Site) -> None:
    """Follow a loss back to its leaves: both must be at the global exponent, and between edges nothing changes it.

    Raises:
        ValueError: a node is reached at two exponents, or an edge or a leaf at one that is not its own.
    """
    found: dict[Any, Site] = {}
    pending = [(node, anchor)]
    while pending:
        node, site = pending.pop()
        above, below = node.metadata.get(anchor, (site, site))
        wanted = anchor if node._sequence_nr() >= LEAF else found.get(node, above)
        if wanted is not site:
            name = "a leaf" if node._sequence_nr() >= LEAF else f"made by {node.name()}"
            raise ValueError(_words(name, wanted if site is anchor else site))
        if node not in found:
            found[node] = above
            pending += [(following, below) for following, _ in node.next_functions if following is not None]


def _words(tensor: str, site: Site) -> str:
    return (
        f"module {site.key!r} reads or gives a tensor ({tensor}) by another way than its arguments, results and own "
        "parameters, such as an attribute or an object other than a list, tuple, dict or data class, so that its "
        "gradient would have wrong units: pass it, return it, or take mode='function'"
    )
