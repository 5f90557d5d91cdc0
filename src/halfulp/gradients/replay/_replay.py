"""Replay: a forward pass without a region, whose graph is one that regions saw before; Replays decides when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels import untraced
from .._pytree import differentiable_in, map_tensors, memoized
from .._site import Site
from ..eager._backward import Backward
from ..eager._current_region import current, put, unwatched
from ..eager._site_boundaries import is_exit, mark
from ..eager._strides import copy_with_strides
from ._graph_walk import Surroundings, walk
from ._learned_graph import LearnedGraph, Names, Recording, approximate

# So many graphs are kept; a model that has more of them is always watched by regions.
_GRAPHS = 16
# So many forward passes are recorded, and so many may turn out to have another shape than those before.
_RECORDINGS, _SURPRISES = 64, 6


class Replays:
    """The known graphs of a module's forward passes, which decide whether the next pass needs a region.

    It needs none once the forward passes before it had known shapes, and where only exponents are wanted of it: not in
    measured iterations, nor with a ``format``. Where its graph turns out to be another, its sites are `approximate`,
    and more forward passes have to have known shapes before the next one goes without a region.

    Args:
        backward: whose edges would be put in.
        names: of the model's parameters.
    """

    def __init__(self, backward: Backward, names: Names) -> None:
        self._backward = backward
        self._names = names
        # Graphs of one shape, by the parameters that they read, together; the latest shape first.
        self._graphs: list[dict[tuple[int, ...], LearnedGraph]] = []
        self._latest: LearnedGraph | None = None
        self._known_in_row = self._surprises = self._recordings = 0

    def ready(self) -> bool:
        """Whether the next forward pass needs no region."""
        return self._known_in_row >= 2**self._surprises and self._backward.may_replay()

    def recording(self) -> Recording | None:
        """A recording for the next region to fill; None where no forward pass will be replayed."""
        if self._recordings >= _RECORDINGS or not self._backward.may_replay() or self._names.sharded():
            return None
        self._recordings += 1
        return Recording()

    @unwatched
    def learn(self, recording: Recording, arguments: Any, output: Any, begun: int) -> None:
        """Store the graph that a region recorded."""
        around = Surroundings(begun, nodes_of(arguments))
        learned = recording.learn(outputs_in(output), around, self._backward)
        if learned is None or not self._keep(learned):
            self._known_in_row, self._recordings = 0, _RECORDINGS
            return
        if self.ready():
            self._recordings = 0

    def _keep(self, learned: LearnedGraph) -> bool:
        """Store a learned graph; return False if there are too many already."""
        like = next((group for group in self._graphs if _first(group).is_like(learned)), None)
        known = like is not None and learned.parameters in like
        if not known and sum(map(len, self._graphs)) == _GRAPHS:
            return False
        if like is None:
            self._graphs.append(like := {})
        self._known_in_row = self._known_in_row + 1 if known else 0
        like[learned.parameters] = self._latest = learned
        return True

    def find(self, roots: list[tuple[Any, int]], around: Surroundings) -> tuple[LearnedGraph | None, list[Any]]:
        """Return a known graph and its nodes; None in place of the graph if one scale is to hold for all."""
        for number, group in enumerate(self._graphs):
            nodes = _first(group).match(roots, around)
            learned = None if nodes is None else group.get(_first(group).parameters_of(nodes))
            if nodes is not None and learned is not None and learned.takes(nodes):
                self._graphs.insert(0, self._graphs.pop(number))
                if learned is not self._latest:
                    learned.note_reads(nodes, self._names)
                    self._latest = learned
                return learned, nodes
        self._known_in_row = 0
        self._surprises += 1
        if self._surprises >= _SURPRISES:
            self._recordings = _RECORDINGS
        shape, nodes = walk(roots, around)
        learned = approximate(shape, nodes, self._backward, [one for group in self._graphs for one in group.values()])
        if learned is None or not learned.takes(nodes):
            return None, nodes
        learned.note_reads(nodes, self._names)
        return learned, nodes


def _first(group: dict[tuple[int, ...], LearnedGraph]) -> LearnedGraph:
    return next(iter(group.values()))


class Replay:
    """A forward pass that runs as it is; when it ends, its nodes get hooks that multiply gradients.

    Exponents are those of that time, whenever the backward pass comes. What is read outside and is no output is found
    by the loss, or by the forward pass that reads it: exponents rest then, and a region tells next time.

    Args:
        backward: whose exponents they go by.
        replays: What is known of its graph.
    """

    replaying = True

    def __init__(self, backward: Backward, replays: Replays) -> None:
        self._backward = backward
        self._replays = replays
        self._global_site = backward.sites.global_site

    def __enter__(self) -> Replay:
        self._outer = current()
        self._backward.end_unless_differentiating()
        self._begun = torch._C._autograd._get_sequence_nr()
        put(self)
        # A region's views of parameters are cast for each reader, and the graph is to be the same.
        self._cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        return self

    def __exit__(self, *error: object) -> None:
        put(self._outer)
        torch.set_autocast_cache_enabled(self._cached)
        self._backward.forwards += 1
        self._backward.unmarked.add(self._begun, torch._C._autograd._get_sequence_nr())

    def run(self, call: Callable[..., Any], args: tuple, kwargs: dict, wide: Callable[[], bool]) -> Any:
        """The forward pass's output at the global exponent; ``wide`` tells whether float16 becomes float32 there."""
        inputs = nodes_of((args, kwargs))
        for node in inputs:
            self._outside(node)
        output = call(*args, **kwargs)
        outputs = outputs_in(output)
        if not outputs:
            return output
        around = Surroundings(self._begun, inputs)
        learned, nodes = self._replays.find([(x.grad_fn, x.output_nr) for x in outputs], around)
        for node in nodes if learned is None else learned.before(nodes):
            if learned is not None or around.has(node):
                self._outside(node)
        sites = [self._global_site] * len(outputs) if learned is None else learned.attach(nodes)
        order = {} if learned is None else learned.order
        self._backward.order.update(order)
        by_tensor = {id(x): site for x, site in zip(outputs, sites)}
        to_float32 = wide()
        return map_tensors(
            output, memoized(lambda x: x if x.is_leaf else self._left(x, by_tensor[id(x)], order, to_float32))
        )

    def _outside(self, node: Any) -> None:
        """Note that a node made before the forward pass is at the global exponent."""
        if not is_exit(node, self._global_site):
            try:
                self._backward.check_exits(node)
            except ValueError:
                # A region knows the sites of tensors that another one made, by whatever way they come.
                self._backward.use_one_scale()
            mark(node, self._global_site, self._global_site, self._global_site)

    def _left(self, out: Tensor, site: Site, order: dict[Site, None], wide: bool) -> Tensor:
        move = site.exponent - self._global_site.exponent, self._backward.following.sign(site, self._global_site)
        if wide and out.dtype == torch.float16:
            # The gradient takes its exponent before it is rounded to float16.
            out = out.float()
        elif any(move):
            # A reader may write into it.
            out = copy_with_strides(out)
        elif is_exit(out.grad_fn, self._global_site):
            # It was there before, and may outlive this pass by many, each of which would add a hook.
            return out
        node: Any = out.grad_fn
        node.register_prehook(self._entering(move, order))
        mark(node, self._global_site, self._global_site, self._global_site)
        return out

    def _entering(self, move: tuple[int, int], order: dict[Site, None]) -> Callable:
        backward = self._backward

        @untraced
        def enter(gradients: tuple) -> tuple | None:
            if backward.is_shut():
                return None
            backward.note_left(order)
            gradient = gradients[0]
            if gradient is None or not any(move):
                return None
            return backward.following.moved_by(gradient, *move), *gradients[1:]

        return enter


def forwards_without_region(scaler: Any) -> int:
    """How many forward passes of a scaler's models ran without a region."""
    return scaler._controller.backward.unmarked.count


def nodes_of(arguments: Any) -> frozenset[Any]:
    """The nodes of the tensors that a forward pass is called with."""
    return frozenset(x.grad_fn for x in differentiable_in(arguments) if x.grad_fn is not None)


def outputs_in(output: Any) -> list[Tensor]:
    """The tensors of an output that a forward pass made, each once."""
    return list({id(x): x for x in differentiable_in(output) if not x.is_leaf}.values())
