"""Replay: forward passes without a region, once regions have learned their graph."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from ...kernels import hide_own_frames_from_compiler
from .._functions import is_leaf_parameter, list_differentiable_tensors, map_tensors, memoize_by_tensor
from .._site import Site, copy_keeping_strides, make_power_of_two
from ._backward import FIRST_LEAF_SEQUENCE_NUMBER, BackwardHooks, thread_region_state
from ._region import CallRecording, ModuleNameCache

# Where a gradient goes on to: the place of a node in a walk, and which of that node's outputs.
GraphLink = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class GraphShape:
    """The structure of an autograd graph and the parameters that it reads, by which a known forward pass is recognised.

    Nodes are numbered in the order in which `compute_graph_shape_and_nodes` meets them.
    """

    # The nodes of the outputs.
    roots: tuple[GraphLink, ...]
    # The class of each node; None of those that were there before the forward pass.
    node_types: tuple[type | None, ...]
    # Where the gradients that a node passes on go to, None where there is none; empty at the graph's ends.
    links: tuple[tuple[GraphLink | None, ...], ...]
    # The place of each leaf, its dtype and a parameter's identity: another part of the model may have this structure.
    # Inputs whose gradient is wanted are new in each pass, and have None.
    leaves: tuple[tuple[int, torch.dtype, int | None], ...]


def compute_graph_shape_and_nodes(
    roots: Iterable[tuple[Any, int]], start_sequence_nr: int, inputs: Collection, skipped: Collection = ()
) -> tuple[GraphShape, list[Any]]:
    """Return a graph's shape and nodes, from outputs to leaves and to nodes made before the forward pass.

    That began at autograd's ``start_sequence_nr``, in its thread; any may have made ``inputs``, of what it read.
    """
    places: dict[Any, int] = {}
    nodes: list[Any] = []
    node_types: list[type | None] = []
    links: list[tuple[GraphLink | None, ...]] = []
    leaves: list[tuple[int, torch.dtype, int | None]] = []

    def make_link(node: Any, number: int) -> GraphLink | None:
        while node in skipped:
            node, number = node.next_functions[0]
        if node is None:
            return None
        if node not in places:
            places[node] = len(nodes)
            nodes.append(node)
        return places[node], number

    found: list[Any] = [make_link(*root) for root in roots]
    for node in nodes:
        leaf = node._sequence_nr() >= FIRST_LEAF_SEQUENCE_NUMBER
        if leaf:
            held = node.variable
            leaves.append((len(node_types), held.dtype, id(held) if is_leaf_parameter(held) else None))
        outside = not leaf and (node in inputs or node._sequence_nr() < start_sequence_nr)
        node_types.append(None if outside else type(node))
        links.append(() if leaf or outside else tuple(make_link(*one) for one in node.next_functions))
    return GraphShape(tuple(found), tuple(node_types), tuple(links), tuple(leaves)), nodes


# Nodes whose gradients are new tensors, which nobody else reads: these are multiplied where they are.
_NODE_NAMES_MAKING_NEW_GRADIENTS = {
    *("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "ConvolutionBackward0"),
    *("NativeLayerNormBackward0", "NativeBatchNormBackward0"),
}


def make_multiplying_hook(backward: BackwardHooks, node_name: str, moves: tuple[tuple[int, int, int], ...]) -> Callable:
    """Return a hook that multiplies some of a node's gradients by powers of two while a scaled loss is differentiated.

    ``moves``: which gradient, by which power, and how often the pass's lift counts (see LossGradientFollower).
    """
    following, new = backward.loss_follower, node_name in _NODE_NAMES_MAKING_NEW_GRADIENTS

    @hide_own_frames_from_compiler
    def multiply_gradients(gradients: tuple, given: tuple) -> tuple | None:
        if backward.has_inactive_hooks():
            return None
        # The gradient of what is added to a product is the product's own.
        if new and type(following.lift_exponent) is int and gradients[0] is not given[0]:
            for slot, exponent, sign in moves:
                gradient, power = gradients[slot], exponent + sign * following.lift_exponent
                if gradient is not None and power:
                    gradient.mul_(make_power_of_two(power))
            return None
        found = list(gradients)
        for slot, exponent, sign in moves:
            if found[slot] is not None:
                found[slot] = following.multiply_by_power_with_lift(found[slot], exponent, sign)
        return tuple(found)

    return multiply_gradients


# Nodes that hand a gradient on in another shape, as the transposition of a linear layer's weight.
_RESHAPING_NODE_NAMES = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"}
# Where a region's edge would change what is written into, or a node has a backward pass of its own.
_UNREPLAYABLE_NODE_NAMES = {"CopySlices", "AsStridedBackward0", "AsStridedBackward1", "CompiledFunctionBackward"}


class LearnedGraph:
    """The sites of a graph's nodes, and the hooks of nodes that take gradients from one site to the next."""

    def __init__(self, shape: GraphShape, sites: list[Site], opened: dict[Site, None], backward: BackwardHooks) -> None:
        self.shape = shape
        # The sites that products open, in forward's order.
        self.opened_sites = opened
        self._backward = backward
        self._node_sites = sites
        self._all_sites = list(dict.fromkeys([backward.sites.global_site, *self._node_sites]))
        self._hooked_exponents: list[tuple[int, bool]] = []
        self._node_hooks: list[tuple[int, Callable]] = []

    def attach_hooks(self, nodes: list[Any]) -> list[Site]:
        """Hook the nodes for the present exponents; return the sites of the outputs' gradients."""
        exponents = [(site.exponent, site.follows_global) for site in self._all_sites]
        if exponents != self._hooked_exponents:
            self._hooked_exponents = exponents
            self._node_hooks = self._make_hooks()
        for place, hook in self._node_hooks:
            nodes[place].register_hook(hook)
        return [self._node_sites[place] for place, _ in self.shape.roots]

    def _make_hooks(self) -> list[tuple[int, Callable]]:
        """Return the places of nodes whose gradients move, each with its hook; equal hooks are made once."""
        made: dict[tuple, Callable] = {}
        found = []
        for place, (node_type, links) in enumerate(zip(self.shape.node_types, self.shape.links)):
            moves = [
                (slot, *move)
                for slot, link in enumerate(links)
                if link is not None
                and any(
                    move := self._backward.loss_follower.find_move_exponent_and_lift_sign(
                        self._node_sites[link[0]], self._node_sites[place]
                    )
                )
            ]
            if moves and node_type is not None:
                key = node_type.__name__, tuple(moves)
                if key not in made:
                    made[key] = make_multiplying_hook(self._backward, *key)
                found.append((place, made[key]))
        return found


def learn_graph(
    recording: CallRecording, outputs: list[Tensor], start_sequence_nr: int, inputs: Collection, backward: BackwardHooks
) -> LearnedGraph | None:
    """Return the graph of a recorded forward pass with its sites; None where each pass needs a region."""
    kept = {id(x) for x in outputs}
    if recording.has_failed or any(one() is not None and id(one()) not in kept for one in recording.scalar_results):
        return None
    shape, nodes = compute_graph_shape_and_nodes(
        ((x.grad_fn, x.output_nr) for x in outputs), start_sequence_nr, inputs, recording.edge_nodes
    )
    refused = any(one is not None and one.__name__ in _UNREPLAYABLE_NODE_NAMES for one in shape.node_types)
    # The gradient of a leaf in float16 would need an edge of its own.
    refused = refused or any(dtype == torch.float16 for _, dtype, _ in shape.leaves)
    # Gradients of several readers that are summed in 16 bits before a region moves the sum: hooks of nodes move each of
    # them before the sum, which overflows and underflows elsewhere.
    readers = Counter(one for node in nodes for one, _ in node.next_functions if one in recording.edge_nodes)
    if refused or any(n > 1 and edge._input_metadata[0].dtype.itemsize == 2 for edge, n in readers.items()):
        return None
    global_site = backward.sites.global_site
    leaves = {place for place, *_ in shape.leaves}
    sites = []
    for node, node_type, links in zip(nodes, shape.node_types, shape.links):
        is_end = node_type is None or not links
        site = global_site if is_end else recording.find_site(node)
        if site is None:
            return None
        # Views of a leaf are at the global site, so that the node behind them moves the gradient.
        is_view = node_type is not None and node_type.__name__ in _RESHAPING_NODE_NAMES
        is_leaf_view = is_view and [link and link[0] in leaves for link in links] == [True]
        sites.append(global_site if is_leaf_view else site)
    return LearnedGraph(shape, sites, dict.fromkeys(recording.opened_sites), backward)


# So many graphs are kept, and so many forward passes may turn out to have another than those before; a model that has
# more of either is always watched by regions.
_MAX_KEPT_GRAPHS, _MAX_UNKNOWN_GRAPHS = 16, 6


class GraphReplay:
    """Runs a module's forward passes without a region once their graphs are known, and hooks these graphs' nodes.

    Where a graph turns out to be another, all its gradients have the global exponent, and more forward passes have to
    have known shapes before the next one goes without a region. Exponents are those of the forward pass.
    """

    is_replaying = True

    def __init__(self, backward: BackwardHooks, names: ModuleNameCache) -> None:
        self._backward = backward
        self._global_site = backward.sites.global_site
        self._names = names
        self._graphs: dict[GraphShape, LearnedGraph] = {}
        self._known_graphs_in_row = self._unknown_graphs = 0
        self._has_given_up = False

    def is_ready_to_replay(self) -> bool:
        """Return whether enough forward passes in a row had known graphs for the next one to need no region."""
        return self._known_graphs_in_row >= 2**self._unknown_graphs

    def can_learn(self) -> bool:
        """Return whether regions may still teach it a graph."""
        return not self._has_given_up and not self._names.is_sharded()

    def learn_from_recording(
        self, recording: CallRecording, arguments: Any, output: Any, start_sequence_nr: int
    ) -> None:
        """Store the graph that a region recorded."""
        with torch._C.DisableTorchFunction():
            outputs, inputs = list_output_tensors(output), list_input_nodes(arguments)
            learned = learn_graph(recording, outputs, start_sequence_nr, inputs, self._backward)
        known = learned is not None and learned.shape in self._graphs
        self._known_graphs_in_row = self._known_graphs_in_row + 1 if known else 0
        if learned is None or (not known and len(self._graphs) == _MAX_KEPT_GRAPHS):
            self._has_given_up = True
        else:
            self._graphs[learned.shape] = learned

    def run_forward(self, call: Callable[..., Any], args: tuple, kwargs: dict, wide: Callable[[], bool]) -> Any:
        """Return the forward output at the global exponent; ``wide`` tells whether float16 becomes float32 there."""
        outer, cached = thread_region_state.region, torch.is_autocast_cache_enabled()
        self._backward.deactivate_hooks_outside_backward()
        start_sequence_nr = torch._C._autograd._get_sequence_nr()
        thread_region_state.region = self
        # A region's views of parameters are cast for each reader, and the graph is to be the same.
        torch.set_autocast_cache_enabled(False)
        try:
            inputs = list_input_nodes((args, kwargs))
            for node in inputs:
                self._mark_node_at_global_exponent(node)
            output = call(*args, **kwargs)
            outputs = list_output_tensors(output)
            if not outputs:
                return output
            return self._hook_nodes_of_known_graph(output, outputs, start_sequence_nr, inputs, wide())
        finally:
            thread_region_state.region = outer
            torch.set_autocast_cache_enabled(cached)
            self._backward.forward_count += 1
            self._backward.replay_count += 1
            self._backward.unmarked_sequence_ranges.append((start_sequence_nr, torch._C._autograd._get_sequence_nr()))

    def _hook_nodes_of_known_graph(
        self, output: Any, outputs: list[Tensor], start_sequence_nr: int, inputs: Collection, wide: bool
    ) -> Any:
        """Return the output at the global exponent, with its graph's nodes hooked if the graph is known."""
        shape, nodes = compute_graph_shape_and_nodes(
            [(x.grad_fn, x.output_nr) for x in outputs], start_sequence_nr, inputs
        )
        for node, node_type in zip(nodes, shape.node_types):
            if node_type is None:
                self._mark_node_at_global_exponent(node)
        learned = self._graphs.get(shape)
        if learned is None:
            self._known_graphs_in_row = 0
            self._unknown_graphs += 1
            self._has_given_up = self._unknown_graphs >= _MAX_UNKNOWN_GRAPHS
        sites = [self._global_site] * len(outputs) if learned is None else learned.attach_hooks(nodes)
        opened = {} if learned is None else learned.opened_sites
        self._backward.reached_sites.update(opened)
        by_tensor = {id(x): site for x, site in zip(outputs, sites)}

        def move_to_global_exponent(x: Tensor) -> Tensor:
            return x if x.is_leaf else self._move_to_global_exponent(x, by_tensor[id(x)], opened, wide)

        return map_tensors(output, memoize_by_tensor(move_to_global_exponent))

    def _mark_node_at_global_exponent(self, node: Any) -> None:
        """Note that a node made before the forward pass is at the global exponent."""
        try:
            self._backward.mark_node_at_global_exponent(node)
        except ValueError:
            # A region knows the sites of tensors that another one made, by whatever way they come.
            self._backward.fall_back_to_one_scale()
            node.metadata[self._global_site] = self._global_site

    def _move_to_global_exponent(self, out: Tensor, site: Site, opened: dict[Site, None], wide: bool) -> Tensor:
        """Return an output of the model whose gradient arrives at the global exponent; ``wide``: in float32."""
        move = self._backward.loss_follower.find_move_exponent_and_lift_sign(site, self._global_site)
        node: Any = out.grad_fn
        if wide and out.dtype == torch.float16:
            # The gradient takes its exponent before it is rounded to float16.
            out = out.float()
        elif any(move):
            # A reader may write into it.
            out = copy_keeping_strides(out)
        elif node.metadata.get(self._global_site) is self._global_site:
            # It was there before, and may outlive this pass by many, each of which would add a hook.
            return out
        node = out.grad_fn
        node.register_prehook(functools.partial(_move_output_gradient, self._backward, move, opened))
        node.metadata[self._global_site] = self._global_site
        return out


@hide_own_frames_from_compiler
def _move_output_gradient(
    backward: BackwardHooks, move: tuple[int, int], opened: dict[Site, None], gradients: tuple
) -> tuple | None:
    """Move an output's gradient to the output's site (the hook of its node)."""
    if backward.has_inactive_hooks():
        return None
    backward.reached_sites.update(opened)
    gradient = gradients[0]
    if gradient is None or not any(move):
        return None
    return backward.loss_follower.multiply_by_power_with_lift(gradient, *move), *gradients[1:]


def count_replays(scaler: Any) -> int:
    """Return how many forward passes of a scaler's models ran without a region."""
    return scaler._controller.backward.replay_count


def list_input_nodes(arguments: Any) -> frozenset[Any]:
    """Return the nodes of the tensors that a forward pass is called with."""
    return frozenset(x.grad_fn for x in list_differentiable_tensors(arguments) if x.grad_fn is not None)


def list_output_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output that a forward pass made, each once."""
    return list({id(x): x for x in list_differentiable_tensors(output) if not x.is_leaf}.values())
