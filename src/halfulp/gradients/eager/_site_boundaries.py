"""Boundaries between sites, marked on autograd's nodes, and checks that no gradient goes round them."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._site import Site

# Sequence numbers of nodes that accumulate into leaves, which many threads may share.
LEAF = 2**62
# How many forward passes without edges are known.
_KEPT = 4096


def mark(node: Any, above: Site, below: Site, global_site: Site) -> None:
    """Mark a node with the sites at whose exponents its gradient arrives and leaves; one mark for each scaler."""
    node.metadata[global_site] = above, below


def is_exit(node: Any, global_site: Site) -> bool:
    """Whether a node's gradient arrives at the global exponent, so that its tensor may be read anywhere."""
    return node.metadata.get(global_site, (None, None))[0] is global_site


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


class Unmarked:
    """The latest forward passes without edges, as ranges of autograd's sequence numbers.

    Attributes:
        count: How many such forward passes there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._latest: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        # In ascending order, and apart from each other.
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> None:
        """Note a forward pass by autograd's sequence numbers before and after it."""
        self.count += 1
        self._latest.append((begin, end))
        if len(self._begins) < 2 * _KEPT:
            self._insert(begin, end)
            return
        self._begins, self._ends = [], []
        for one in self._latest:
            self._insert(*one)

    def _insert(self, begin: int, end: int) -> None:
        """Insert a range of sequence numbers, joined with those that it overlaps (threads count separately)."""
        first, last = bisect.bisect_right(self._ends, begin), bisect.bisect_left(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def has(self, node: Any) -> bool:
        """Return whether a node's sequence number lies in one of the ranges; each thread counts for itself."""
        number = node._sequence_nr()
        place = bisect.bisect(self._begins, number) - 1
        return place >= 0 and number < self._ends[place]


def check_exits(node: Any, global_site: Site, unmarked: Unmarked) -> bool:
    """Check that a tensor read outside of models depends on their forward passes through their outputs only.

    From any other tensor of a model every path leads over an edge, as only edges lead out of a site, and all of them
    are marked. Models of other scalers, whose edges do nothing, are passed through.

    Returns:
        Whether a forward pass without edges is reached so, which cannot be told from other ways by its marks.

    Raises:
        ValueError: it reaches into one by another way.
    """
    escaped = False
    for behind in reached([node], lambda one: global_site in one.metadata):
        site, _ = behind.metadata.get(global_site, (None, None))
        if site is None:
            escaped |= unmarked.has(behind)
        elif site is not global_site:
            raise ValueError(
                f"a tensor from inside the model, at {site.key!r}, is read outside, by the loss or on its way into "
                "another forward pass, and is not part of the model's output, such as one kept in an attribute, or in "
                "an object other than a list, tuple, dict or data class, or by a forward hook: return it from forward "
                "in one of these, or take AdaptiveGradScaler(mode='module'), where what modules return may be kept "
                "anywhere (as numbers that a function computed, losses of their own, may be in any mode)"
            )
    return escaped


def check_units(node: Any, global_site: Site) -> None:
    """Check that a loss and its leaves are at the global exponent, and that exponents change at boundaries only.

    Raises:
        ValueError: a node is reached at two exponents, or a boundary or a leaf at one that is not its own.
    """
    found: dict[Any, Site] = {}
    pending = [(node, global_site)]
    while pending:
        node, site = pending.pop()
        above, below = node.metadata.get(global_site, (site, site))
        wanted = global_site if node._sequence_nr() >= LEAF else found.get(node, above)
        if wanted is not site:
            name = "a leaf" if node._sequence_nr() >= LEAF else f"made by {node.name()}"
            raise ValueError(_words(name, wanted if site is global_site else site))
        if node not in found:
            found[node] = above
            pending += [(following, below) for following, _ in node.next_functions if following is not None]


def _words(tensor: str, site: Site) -> str:
    return (
        f"module {site.key!r} reads or gives a tensor ({tensor}) by another way than its arguments, results and own "
        "parameters, such as an attribute or an object other than a list, tuple, dict or data class, so that its "
        "gradient would have wrong units: pass it, return it, or take mode='function'"
    )
