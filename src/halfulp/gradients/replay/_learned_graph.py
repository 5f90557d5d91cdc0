"""LearnedGraph: the sites of the nodes in a forward pass's graph, as a region saw it, for passes without a region."""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from .._site import Site
from ..eager._backward import Backward
from ..eager._node_hooks import multiplier
from ..policies._operand_statistics import is_parameter
from ._graph_walk import Matcher, Shape, Surroundings, is_leaf, walk

# Nodes that hand a gradient on in another shape, as the transposition of a linear layer's weight.
_VIEWS = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"}
# Where a region's edge would change what is written into, or a node has a backward pass of its own.
_REFUSED = {"CopySlices", "AsStridedBackward0", "AsStridedBackward1", "CompiledFunctionBackward"}


class Names(Protocol):
    """Which module a parameter belongs to."""

    def of(self, parameter: Tensor) -> str | None:
        """Its qualified name; None where the model does not list the parameter."""

    def sharded(self) -> bool:
        """Whether the model is FSDP's."""


class Recording:
    """A record of a forward pass in a region: which call made each node, at which site, and which nodes are edges.

    Attributes:
        failed: Whether the forward pass had something that only a region can handle.
    """

    def __init__(self) -> None:
        self.failed = False
        self.opened: dict[Site, None] = {}
        self.edges: set[Any] = set()
        self._begins: list[int] = []
        self._calls: list[tuple[int, Site]] = []
        self._numbers: list[weakref.ref] = []

    def run(self, site: Site, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Call a function whose nodes are at a site."""
        begun = torch._C._autograd._get_sequence_nr()
        out = function(*args, **kwargs)
        end = torch._C._autograd._get_sequence_nr()
        if end > begun:
            self._begins.append(begun)
            self._calls.append((end, site))
        return out

    def number(self, tensor: Tensor) -> None:
        """Note a 0-d result, which the model may keep besides its outputs (see `learn`)."""
        self._numbers.append(weakref.ref(tensor))

    def learn(self, outputs: list[Tensor], around: Surroundings, backward: Backward) -> LearnedGraph | None:
        """The learned graph; None where a region is needed, as a 0-d result is kept besides the outputs."""
        kept = {id(x) for x in outputs}
        if self.failed or any(one() is not None and id(one()) not in kept for one in self._numbers):
            return None
        shape, nodes = walk(((x.grad_fn, x.output_nr) for x in outputs), around, self.edges)
        if any(kind is not None and kind.__name__ in _REFUSED for kind in shape.kinds) or self._sums_in_16_bits(nodes):
            return None
        global_site = backward.sites.global_site
        ends = [not links or kind is None for kind, links in zip(shape.kinds, shape.links)]
        found = [global_site if end else self._site_of(node) for node, end in zip(nodes, ends)]
        sites = [site for site in found if site is not None]
        return None if len(sites) < len(found) else LearnedGraph(shape, nodes, sites, list(self.opened), backward)

    def _sums_in_16_bits(self, nodes: list[Any]) -> bool:
        """Whether several nodes read one number, whose gradients in 16 bits a region sums before it moves them.

        Hooks of nodes move each of them before the sum, which overflows and underflows elsewhere.
        """
        readers = Counter(one for node in nodes for one, _ in node.next_functions if one in self.edges)
        return any(count > 1 and edge._input_metadata[0].dtype.itemsize == 2 for edge, count in readers.items())

    def _site_of(self, node: Any) -> Site | None:
        number = node._sequence_nr()
        call = bisect.bisect_right(self._begins, number) - 1
        if call < 0:
            return None
        end, site = self._calls[call]
        return site if number < end else None


class LearnedGraph:
    """The sites of a graph's nodes, and the hooks that take gradients from one to the next.

    A gradient that a node passes on is multiplied by 2^(difference of exponents) on its way, in a hook of that node,
    as in a region, so that in the graph itself nothing changes.

    Attributes:
        shape: Of the graph.
        places: Which of the nodes are parameters'.
        parameters: These, by identity: a graph of the same shape may be another part's, at other sites.
        order: The sites that products open, in forward's order.
    """

    def __init__(
        self, shape: Shape, nodes: list[Any], sites: list[Site], order: list[Site], backward: Backward
    ) -> None:
        self.shape = shape
        self.order = dict.fromkeys(order)
        self._backward = backward
        self._matcher = Matcher(shape)
        self._sites = _settled(shape, sites, backward.sites.global_site)
        self._all_sites = list(dict.fromkeys([backward.sites.global_site, *self._sites]))
        self._leaves = [i for i, kind in enumerate(shape.kinds) if is_leaf(kind)]
        self._readers = _readers(shape, sites)
        # Other leaves, as inputs whose gradient is wanted, are new in each pass.
        self.parameter_leaves = [place for place in self._leaves if is_parameter(nodes[place].variable)]
        self.parameters = self.parameters_of(nodes)
        self._exponents: list[tuple[int, bool]] = []
        self._hooks: list[tuple[int, Callable]] = []

    def match(self, roots: list[tuple[Any, int]], around: Surroundings) -> list[Any] | None:
        """The nodes of a graph of this shape; None of another one."""
        return self._matcher.nodes(roots, around)

    def is_like(self, other: LearnedGraph) -> bool:
        """Whether another graph differs in its parameters at most."""
        return self.shape == other.shape and self.parameter_leaves == other.parameter_leaves

    def parameters_of(self, nodes: list[Any]) -> tuple[int, ...]:
        """Which parameters a graph of this shape reads."""
        return tuple([id(nodes[place].variable) for place in self.parameter_leaves])

    def before(self, nodes: list[Any]) -> list[Any]:
        """Those of the nodes that were there before the forward pass."""
        return self._matcher.outside(nodes)

    def takes(self, nodes: list[Any]) -> bool:
        """Whether no leaf is float16, whose gradient needs an edge of its own."""
        return torch.float16 not in {nodes[place].variable.dtype for place in self._leaves}

    def note_reads(self, nodes: list[Any], names: Names) -> None:
        """Note at which sites parameters are read."""
        for place in self.parameter_leaves:
            parameter = nodes[place].variable
            self._backward.note_read(parameter, self._readers[place], listed=names.of(parameter) is not None)

    def attach(self, nodes: list[Any]) -> list[Site]:
        """Hook the nodes for the present exponents; return the sites of the outputs' gradients."""
        exponents = [(site.exponent, site.follows_global) for site in self._all_sites]
        if exponents != self._exponents:
            self._exponents = exponents
            self._hooks = list(self._make_hooks())
        for place, hook in self._hooks:
            nodes[place].register_hook(hook)
        return [self._sites[place] for place, _ in self.shape.roots]

    def _make_hooks(self) -> Iterable[tuple[int, Callable]]:
        made: dict[tuple, Callable] = {}
        for place, (kind, links) in enumerate(zip(self.shape.kinds, self.shape.links)):
            moves = [
                (slot, *move)
                for slot, link in enumerate(links)
                if link is not None and any(move := self._move(self._sites[link[0]], self._sites[place]))
            ]
            if moves and kind is not None:
                key = kind.__name__, tuple(moves)
                if key not in made:
                    made[key] = multiplier(self._backward, *key)
                yield place, made[key]

    def _move(self, source: Site, target: Site) -> tuple[int, int]:
        """Return the power of two from ``target`` to ``source``, and the sign of the lift."""
        return source.exponent - target.exponent, self._backward.following.sign(source, target)


def approximate(
    shape: Shape, nodes: list[Any], backward: Backward, like: Iterable[LearnedGraph]
) -> LearnedGraph | None:
    """Guess sites for a graph that no region saw: the sites of parameters, and the latest of each node's inputs.

    Any sites give right gradients; products without parameters get no site of their own by this. None where the graph
    has a kind of node that no ``like`` one had.
    """
    like = list(like)
    known = {kind for one in like for kind in one.shape.kinds}
    if not known.issuperset(shape.kinds):
        return None
    global_site = backward.sites.global_site
    order = list(dict.fromkeys(site for one in like for site in one.order))
    rank = {global_site: -1} | {site: i for i, site in enumerate(order)}
    sites = [global_site] * len(nodes)
    inner = [i for i, (kind, links) in enumerate(zip(shape.kinds, shape.links)) if links and kind is not None]
    for i in sorted(inner, key=lambda i: nodes[i]._sequence_nr()):
        read = [_read(nodes[link[0]], sites[link[0]], backward) for link in shape.links[i] if link is not None]
        sites[i] = max(read, key=lambda site: rank.get(site, -1), default=global_site)
    return LearnedGraph(shape, nodes, sites, [site for site in order if site in sites], backward)


def _read(node: Any, site: Site, backward: Backward) -> Site:
    parameter = getattr(node, "variable", None)
    return site if parameter is None else backward.reader_of(parameter) or site


def _readers(shape: Shape, sites: list[Site]) -> dict[int, Site]:
    """The site at which each node's tensor is read, the last one in a walk from its leaf."""
    return {link[0]: site for site, links in zip(sites, shape.links) for link in links if link is not None}


def _settled(shape: Shape, sites: list[Site], global_site: Site) -> list[Site]:
    """The sites, with views of a leaf at the leaf's own, so that the node before them moves the gradient."""
    found = list(sites)
    for i, (kind, links) in enumerate(zip(shape.kinds, shape.links)):
        ends = [link is not None and is_leaf(shape.kinds[link[0]]) for link in links]
        if kind is not None and kind.__name__ in _VIEWS and ends == [True]:
            found[i] = global_site
    return found
