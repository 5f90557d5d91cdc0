"""The structure of a forward pass's autograd graph: its nodes and links, recorded and matched."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from types import NoneType
from typing import Any

from ..eager._site_boundaries import LEAF

# Where a gradient goes on to: the place of a node in a walk, and which of that node's outputs.
Link = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The structure of an autograd graph, by which forward passes that do the same are recognised.

    Nodes are numbered in the order in which `walk` meets them.

    Attributes:
        roots: The nodes of the outputs.
        kinds: The class of each node; None of those that were there before the forward pass.
        links: Where the gradients that a node passes on go to, None where there is none; empty at the graph's ends.
    """

    roots: tuple[Link, ...]
    kinds: tuple[type | None, ...]
    links: tuple[tuple[Link | None, ...], ...]

    def bottom(self) -> list[int]:
        """The nodes of the forward pass from where gradients only leave the graph."""
        ends = [kind is None or is_leaf(kind) for kind in self.kinds]
        following = [[link[0] for link in links if link is not None] for links in self.links]
        return [i for i, places in enumerate(following) if not ends[i] and all(ends[place] for place in places)]


def is_leaf(kind: type | None) -> bool:
    """Whether nodes of a class belong to leaves."""
    return kind is not None and kind.__name__ == "AccumulateGrad"


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The boundary between a forward pass's nodes and those made before it.

    Attributes:
        begun: Autograd's sequence number when the forward pass began, in its thread.
        inputs: The nodes of what it was called with, by whichever thread these were made.
    """

    begun: int
    inputs: frozenset[Any]

    def has(self, node: Any) -> bool:
        """Whether a node that is no leaf was there before."""
        return node in self.inputs or node._sequence_nr() < self.begun


def walk(roots: Iterable[tuple[Any, int]], around: Surroundings, skipped: Collection = ()) -> tuple[Shape, list[Any]]:
    """Return a graph's shape and nodes, from outputs to leaves and to nodes made before the forward pass.

    ``skipped`` nodes have one link each and are passed by, as if they were not there.
    """
    places: dict[Any, int] = {}
    nodes: list[Any] = []
    kinds: list[type | None] = []
    links: list[tuple[Link | None, ...]] = []

    def link(node: Any, number: int) -> Link | None:
        while node in skipped:
            node, number = node.next_functions[0]
        if node is None:
            return None
        if node not in places:
            places[node] = len(nodes)
            nodes.append(node)
        return places[node], number

    found: list[Link] = []
    for root in roots:
        place = link(*root)
        assert place is not None  # an output has a node
        found.append(place)
    for node in nodes:
        leaf = node._sequence_nr() >= LEAF
        outside = not leaf and around.has(node)
        kinds.append(None if outside else type(node))
        links.append(() if leaf or outside else tuple(link(*one) for one in node.next_functions))
    return Shape(tuple(found), tuple(kinds), tuple(links)), nodes


class Matcher:
    """Recognises a shape in the graph of a later forward pass, at a fifth of the time of a `walk`.

    The walk is made as if the graph had the shape, and what was met is compared as a whole afterwards.

    Args:
        shape: What is looked for.
    """

    def __init__(self, shape: Shape) -> None:
        links = [shape.roots, *(links for links in shape.links if links)]
        flat = [link for one in links for link in one]
        places = [None if link is None else link[0] for link in flat]
        first = [places.index(place) for place in range(len(shape.kinds))]
        self._counts = [len(one) for one in links]
        self._kinds = [NoneType if place is None else shape.kinds[place] for place in places]
        self._expanded = [first[place] for place, one in enumerate(shape.links) if one]
        self._again = [(i, first[place]) for i, place in enumerate(places) if place is not None and i != first[place]]
        self._first = first
        self._outside = [place for place, kind in enumerate(shape.kinds) if kind is None]
        self._unknown = [i for i, place in enumerate(places) if place in self._outside]
        self._bottom = shape.bottom()

    def nodes(self, roots: list[tuple[Any, int]], around: Surroundings) -> list[Any] | None:
        """The nodes in the shape's order; None where the graph has another shape."""
        counts, met = [len(roots)], list(roots)
        try:
            for place in self._expanded:
                following = met[place][0].next_functions
                counts.append(len(following))
                met += following
        except (AttributeError, IndexError):
            # No node is there.
            return None
        flat = [node for node, _ in met]
        if counts != self._counts or any(flat[i] is not flat[j] for i, j in self._again):
            return None
        nodes = [flat[i] for i in self._first]
        before = self.outside(nodes)
        kinds: list[type | None] = list(map(type, flat))
        for i in self._unknown:
            kinds[i] = None
        return nodes if kinds == self._kinds and self._is_sound(nodes, before, around) else None

    def outside(self, nodes: list[Any]) -> list[Any]:
        """Those of the nodes that were there before the forward pass."""
        return [nodes[place] for place in self._outside]

    def _is_sound(self, nodes: list[Any], before: list[Any], around: Surroundings) -> bool:
        """Whether no node is in two places, and only those were there before that should.

        A node's gradient goes to older nodes only, so that of those within it is enough to look at the bottom.
        """
        return (
            len(set(nodes)) == len(nodes)
            and all(node is not None and around.has(node) for node in before)
            and not any(nodes[place]._sequence_nr() < around.begun for place in self._bottom)
            and (not around.inputs or around.inputs.isdisjoint(set(nodes).difference(before)))
        )
