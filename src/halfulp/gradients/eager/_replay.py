"""Replay: forward passes without a region, once regions have learned their graph.

Regions stay beside it for what a graph does not tell: the function that made a node, by which sites are named and
gradients rounded once per call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from ...kernels import disable_tracing
from .._functions import is_parameter, list_differentiable, map_tensors, memoize_by_tensor
from .._site import Site, copy_with_strides, make_power_of_two
from ._backward import FIRST_LEAF_NUMBER, Backward, get_region, is_at_global_exponent, mark_node_sites, set_region
from ._region import CallRecording, ParameterNames, disable_torch_function

# Where a gradient goes on to: the place of a node in a walk, and which of that node's outputs.
GraphLink = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class GraphShape:
    """The structure of an autograd graph and the parameters that it reads, by which a known forward pass is recognised.

    Nodes are numbered in the order in which `walk` meets them.

    Attributes:
        roots: The nodes of the outputs.
        kinds: The class of each node; None of those that were there before the forward pass.
        links: Where the gradients that a node passes on go to, None where there is none; empty at the graph's ends.
        leaves: The places of leaves, each with its dtype and a parameter's identity: a graph of the same structure may
            be another part's, at other sites. Inputs whose gradient is wanted are new in each pass.
    """

    roots: tuple[GraphLink, ...]
    kinds: tuple[type | None, ...]
    links: tuple[tuple[GraphLink | None, ...], ...]
    leaves: tuple[tuple[int, torch.dtype, int | None], ...]


def walk_graph(
    roots: Iterable[tuple[Any, int]], begun: int, inputs: Collection, skipped: Collection = ()
) -> tuple[GraphShape, list[Any]]:
    """Return a graph's shape and nodes, from outputs to leaves and to nodes made before the forward pass.

    Args:
        roots: The nodes of the outputs, each with the number of the output.
        begun: Autograd's sequence number when the forward pass began, in its thread.
        inputs: The nodes of what it was called with, by whichever thread these were made.
        skipped: Nodes with one link each that are passed by, as if they were not there.
    """
    places: dict[Any, int] = {}
    nodes: list[Any] = []
    kinds: list[type | None] = []
    links: list[tuple[GraphLink | None, ...]] = []
    leaves: list[tuple[int, torch.dtype, int | None]] = []

    def link(node: Any, number: int) -> GraphLink | None:
        while node in skipped:
            node, number = node.next_functions[0]
        if node is None:
            return None
        if node not in places:
            places[node] = len(nodes)
            nodes.append(node)
        return places[node], number

    found: list[GraphLink] = []
    for root in roots:
        place = link(*root)
        assert place is not None  # an output has a node
        found.append(place)
    for node in nodes:
        leaf = node._sequence_nr() >= FIRST_LEAF_NUMBER
        if leaf:
            held = node.variable
            leaves.append((len(kinds), held.dtype, id(held) if is_parameter(held) else None))
        outside = not leaf and (node in inputs or node._sequence_nr() < begun)
        kinds.append(None if outside else type(node))
        links.append(() if leaf or outside else tuple(link(*one) for one in node.next_functions))
    return GraphShape(tuple(found), tuple(kinds), tuple(links), tuple(leaves)), nodes


# Nodes whose gradients are new tensors, which nobody else reads: these are multiplied where they are.
_NODES_OF_NEW_GRADIENTS = {
    *("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "ConvolutionBackward0"),
    *("NativeLayerNormBackward0", "NativeBatchNormBackward0"),
}


def make_multiplying_hook(backward: Backward, kind: str, moves: tuple[tuple[int, int, int], ...]) -> Callable:
    """Return a hook that multiplies some of a node's gradients by powers of two while a scaled loss is differentiated.

    ``moves``: which gradient, by which power, and how often the pass's lift counts (see LossFollower).
    """
    following, new = backward.following, kind in _NODES_OF_NEW_GRADIENTS

    @disable_tracing
    def multiply(gradients: tuple, given: tuple) -> tuple | None:
        if backward.has_closed_edges():
            return None
        # The gradient of what is added to a product is the product's own.
        if new and type(following.lift) is int and gradients[0] is not given[0]:
            for slot, exponent, sign in moves:
                gradient, power = gradients[slot], exponent + sign * following.lift
                if gradient is not None and power:
                    gradient.mul_(make_power_of_two(power))
            return None
        found = list(gradients)
        for slot, exponent, sign in moves:
            if found[slot] is not None:
                found[slot] = following.move_gradient_by(found[slot], exponent, sign)
        return tuple(found)

    return multiply


# Nodes that hand a gradient on in another shape, as the transposition of a linear layer's weight.
_VIEW_NODES = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"}
# Where a region's edge would change what is written into, or a node has a backward pass of its own.
_UNREPLAYABLE_NODES = {"CopySlices", "AsStridedBackward0", "AsStridedBackward1", "CompiledFunctionBackward"}


class LearnedGraph:
    """The sites of a graph's nodes, and the hooks that take gradients from one to the next.

    A gradient that a node passes on is multiplied by 2^(difference of exponents) on its way, in a hook of that node,
    as in a region, so that in the graph itself nothing changes.

    Attributes:
        shape: Of the graph.
        order: The sites that products open, in forward's order.
    """

    def __init__(self, shape: GraphShape, sites: list[Site], order: list[Site], backward: Backward) -> None:
        self.shape = shape
        self.order = dict.fromkeys(order)
        self._backward = backward
        self._sites = _set_leaf_views_to_global_site(shape, sites, backward.sites.global_site)
        self._all_sites = list(dict.fromkeys([backward.sites.global_site, *self._sites]))
        self._exponents: list[tuple[int, bool]] = []
        self._hooks: list[tuple[int, Callable]] = []

    def attach_hooks(self, nodes: list[Any]) -> list[Site]:
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
                if link is not None and any(move := self._find_move(self._sites[link[0]], self._sites[place]))
            ]
            if moves and kind is not None:
                key = kind.__name__, tuple(moves)
                if key not in made:
                    made[key] = make_multiplying_hook(self._backward, *key)
                yield place, made[key]

    def _find_move(self, source: Site, target: Site) -> tuple[int, int]:
        """Return the power of two from ``target`` to ``source``, and the sign of the lift."""
        return source.exponent - target.exponent, self._backward.following.find_lift_sign(source, target)


def learn_graph(
    recording: CallRecording, outputs: list[Tensor], begun: int, inputs: Collection, backward: Backward
) -> LearnedGraph | None:
    """Return the graph of a recorded forward pass with its sites; None where each pass needs a region."""
    kept = {id(x) for x in outputs}
    if recording.failed or any(one() is not None and id(one()) not in kept for one in recording.numbers):
        return None
    shape, nodes = walk_graph(((x.grad_fn, x.output_nr) for x in outputs), begun, inputs, recording.edges)
    refused = any(kind is not None and kind.__name__ in _UNREPLAYABLE_NODES for kind in shape.kinds)
    # The gradient of a leaf in float16 would need an edge of its own.
    refused = refused or any(dtype == torch.float16 for _, dtype, _ in shape.leaves)
    # Gradients of several readers that are summed in 16 bits before a region moves the sum: hooks of nodes move each of
    # them before the sum, which overflows and underflows elsewhere.
    readers = Counter(one for node in nodes for one, _ in node.next_functions if one in recording.edges)
    if refused or any(n > 1 and edge._input_metadata[0].dtype.itemsize == 2 for edge, n in readers.items()):
        return None
    global_site = backward.sites.global_site
    ends = [not links or kind is None for kind, links in zip(shape.kinds, shape.links)]
    found = [global_site if end else recording.find_site(node) for node, end in zip(nodes, ends)]
    sites = [site for site in found if site is not None]
    return None if len(sites) < len(found) else LearnedGraph(shape, sites, list(recording.opened), backward)


def _set_leaf_views_to_global_site(shape: GraphShape, sites: list[Site], global_site: Site) -> list[Site]:
    """Return the sites with views of a leaf at the global one, so that the node behind them moves the gradient."""
    found, leaves = list(sites), {place for place, *_ in shape.leaves}
    for i, (kind, links) in enumerate(zip(shape.kinds, shape.links)):
        if (
            kind is not None
            and kind.__name__ in _VIEW_NODES
            and [link and link[0] in leaves for link in links] == [True]
        ):
            found[i] = global_site
    return found


# So many graphs are kept, and so many forward passes may turn out to have another than those before; a model that has
# more of either is always watched by regions.
_GRAPHS, _SURPRISES = 16, 6


class GraphReplay:
    """Runs a module's forward passes without a region once their graphs are known, and hooks these graphs' nodes.

    A pass needs no region once those before it had known shapes, and where only exponents are wanted of it: not in
    measured iterations, nor with a ``format``. Where its graph turns out to be another, all its gradients have the
    global exponent, and more forward passes have to have known shapes before the next one goes without a region.

    Exponents are those of the forward pass, whenever the backward pass comes. What is read outside and is no output is
    found by the loss, or by the forward pass that reads it: exponents rest then, and a region tells next time.
    """

    is_replaying = True

    def __init__(self, backward: Backward, names: ParameterNames) -> None:
        self._backward = backward
        self._global_site = backward.sites.global_site
        self._names = names
        self._graphs: dict[GraphShape, LearnedGraph] = {}
        self._known_in_row = self._surprises = 0
        self._has_given_up = False

    def is_ready(self) -> bool:
        """Return whether enough forward passes in a row had known graphs for the next one to need no region."""
        return self._known_in_row >= 2**self._surprises

    def start_recording(self) -> CallRecording | None:
        """Return a recording for the next region to fill; None where no forward pass will be replayed."""
        return None if self._has_given_up or self._names.is_sharded() else CallRecording()

    @disable_torch_function
    def learn_from(self, recording: CallRecording, arguments: Any, output: Any, begun: int) -> None:
        """Store the graph that a region recorded."""
        learned = learn_graph(
            recording, list_output_tensors(output), begun, list_input_nodes(arguments), self._backward
        )
        known = learned is not None and learned.shape in self._graphs
        self._known_in_row = self._known_in_row + 1 if known else 0
        if learned is None or (not known and len(self._graphs) == _GRAPHS):
            self._has_given_up = True
        else:
            self._graphs[learned.shape] = learned

    def run_forward(self, call: Callable[..., Any], args: tuple, kwargs: dict, wide: Callable[[], bool]) -> Any:
        """Return the forward output at the global exponent; ``wide`` tells whether float16 becomes float32 there."""
        outer, cached = get_region(), torch.is_autocast_cache_enabled()
        self._backward.close_edges_after_backward()
        begun = torch._C._autograd._get_sequence_nr()
        set_region(self)
        # A region's views of parameters are cast for each reader, and the graph is to be the same.
        torch.set_autocast_cache_enabled(False)
        try:
            return self._run_with_hooks(begun, call, args, kwargs, wide)
        finally:
            set_region(outer)
            torch.set_autocast_cache_enabled(cached)
            self._backward.forwards += 1
            self._backward.replays += 1
            self._backward.unmarked_passes.append((begun, torch._C._autograd._get_sequence_nr()))

    def _run_with_hooks(
        self, begun: int, call: Callable[..., Any], args: tuple, kwargs: dict, wide: Callable[[], bool]
    ) -> Any:
        inputs = list_input_nodes((args, kwargs))
        for node in inputs:
            self._mark_outside(node)
        output = call(*args, **kwargs)
        outputs = list_output_tensors(output)
        if not outputs:
            return output
        shape, nodes = walk_graph([(x.grad_fn, x.output_nr) for x in outputs], begun, inputs)
        for node, kind in zip(nodes, shape.kinds):
            if kind is None:
                self._mark_outside(node)
        learned = self._graphs.get(shape)
        if learned is None:
            self._known_in_row = 0
            self._surprises += 1
            self._has_given_up = self._surprises >= _SURPRISES
        sites = [self._global_site] * len(outputs) if learned is None else learned.attach_hooks(nodes)
        order = {} if learned is None else learned.order
        self._backward.reached.update(order)
        by_tensor = {id(x): site for x, site in zip(outputs, sites)}
        to_float32 = wide()
        return map_tensors(
            output,
            memoize_by_tensor(
                lambda x: x if x.is_leaf else self._move_to_global_exponent(x, by_tensor[id(x)], order, to_float32)
            ),
        )

    def _mark_outside(self, node: Any) -> None:
        """Note that a node made before the forward pass is at the global exponent."""
        try:
            self._backward.mark_outer_node(node)
        except ValueError:
            # A region knows the sites of tensors that another one made, by whatever way they come.
            self._backward.use_one_scale()
            mark_node_sites(node, self._global_site, self._global_site, self._global_site)

    def _move_to_global_exponent(self, out: Tensor, site: Site, order: dict[Site, None], wide: bool) -> Tensor:
        move = (
            site.exponent - self._global_site.exponent,
            self._backward.following.find_lift_sign(site, self._global_site),
        )
        if wide and out.dtype == torch.float16:
            # The gradient takes its exponent before it is rounded to float16.
            out = out.float()
        elif any(move):
            # A reader may write into it.
            out = copy_with_strides(out)
        elif is_at_global_exponent(out.grad_fn, self._global_site):
            # It was there before, and may outlive this pass by many, each of which would add a hook.
            return out
        node: Any = out.grad_fn
        node.register_prehook(functools.partial(_move_output_gradient, self._backward, move, order))
        mark_node_sites(node, self._global_site, self._global_site, self._global_site)
        return out


@disable_tracing
def _move_output_gradient(
    backward: Backward, move: tuple[int, int], order: dict[Site, None], gradients: tuple
) -> tuple | None:
    """Move an output's gradient to the output's site (the hook of its node)."""
    if backward.has_closed_edges():
        return None
    backward.reached.update(order)
    gradient = gradients[0]
    if gradient is None or not any(move):
        return None
    return backward.following.move_gradient_by(gradient, *move), *gradients[1:]


def count_replays(scaler: Any) -> int:
    """Return how many forward passes of a scaler's models ran without a region."""
    return scaler._controller.backward.replays


def list_input_nodes(arguments: Any) -> frozenset[Any]:
    """Return the nodes of the tensors that a forward pass is called with."""
    return frozenset(x.grad_fn for x in list_differentiable(arguments) if x.grad_fn is not None)


def list_output_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output that a forward pass made, each once."""
    return list({id(x): x for x in list_differentiable(output) if not x.is_leaf}.values())
