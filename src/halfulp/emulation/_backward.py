"""Rounding of gradients: every autograd node of an emulated run rounds its incoming and outgoing gradients."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor

from ..subclass.models._checkpointing import Wrapper, capture_node
from ._rounder import Rounder

_LEAF = 2**64 - 1
# Their gradients are the numbers that arrive, elsewhere or in another shape.
_MOVES = frozenset(
    f"{name}Backward{i}"
    for name in ("T", "View", "Transpose", "UnsafeView", "Permute", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias")
    for i in range(5)
)


class Graph:
    """Hooks the autograd nodes made since it was created, on one thread, to round their gradients.

    The roundings are attached to the nodes, not to the time at which they run, so a backward pass from anywhere
    passes through them, and they go when the graph goes. No node is held here.
    """

    def __init__(self, rounder: Rounder, emulated: Wrapper) -> None:
        self.rounder = rounder
        self._emulated = emulated
        self.task = -1
        self._start = torch.autograd._get_sequence_nr()
        self._seen: set[int] = set()
        self._sent: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._leaves: dict[int, int] = {}
        self._handles: list = []

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()

    def add(self, tensor: Tensor) -> None:
        """Hook the node that made a tensor, and all nodes before it without hooks."""
        node = tensor.grad_fn
        todo = [] if node is None else [(node, node._sequence_nr())]
        while todo:
            node, number = todo.pop()
            if self._start <= number < _LEAF and number not in self._seen:
                self._seen.add(number)
                self._attach(node, number, todo)

    def _attach(self, node, number: int, todo: list) -> None:
        """Register both hooks of a node, and append the nodes before it to `todo`."""
        name = node.name()
        if name == "CompiledFunctionBackward":
            raise NotImplementedError(
                "emulate met code that torch.compile has compiled, whose operators cannot be rounded one by one: "
                "call the module as it was before torch.compile"
            )
        capture_node(node, name, self._emulated, "emulate")
        edges = []
        for child, position in node.next_functions:
            before = -1 if child is None else child._sequence_nr()
            if before == _LEAF:
                self._watch(child.variable)
            elif before not in self._seen:
                todo.append((child, before))
            edges.append((before, position) if self._start <= before < _LEAF else None)
        node.register_prehook(partial(self._round_arriving, number, name))
        node.register_hook(partial(self._round_leaving, name, tuple(edges), name in _MOVES))

    def _watch(self, leaf: Tensor) -> None:
        """Hook a leaf so that the sums of its gradients are rounded, over its uses and over backward passes."""
        uses = self._leaves[id(leaf)] = self._leaves.get(id(leaf), 0) + 1
        me = weakref.ref(self)
        if uses == 1:
            self._handles.append(leaf.register_post_accumulate_grad_hook(partial(_round_accumulated, me)))
        elif uses == 2:
            self._handles.append(leaf.register_hook(partial(_round_sum, me)))

    def _round_arriving(self, node: int, name: str, gradients: tuple[Tensor | None, ...]) -> tuple | None:
        """Round an incoming gradient that is a sum, or comes from outside (a node's pre-hook)."""
        self.task = torch._C._current_graph_task_id()
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "emulate rounds first gradients only: create_graph=True asks for gradients of gradients"
            )
        changed = None
        for i, gradient in enumerate(gradients):
            sent, version = self._sent.pop((node, i), (None, 0))
            if gradient is None or (gradient is sent and gradient._version == version):
                continue
            changed = changed or list(gradients)
            changed[i] = self.rounder.rounded(gradient, f"the gradient for {name}")
        return None if changed is None else tuple(changed)

    def _round_leaving(self, name: str, edges: tuple, moves: bool, gradients: tuple, arrived: tuple) -> tuple | None:
        """Round each result of a node once (its post-hook)."""
        results = list(gradients)
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if not moves and not any(gradient is known for known in arrived):
                results[i] = self.rounder.rounded(gradient, name)
                self.rounder.backward[name] += 1
            if edges[i] is not None:
                self._sent[edges[i]] = results[i], results[i]._version
        return None if moves else tuple(results)


def _round_accumulated(graph: weakref.ref, leaf: Tensor) -> None:
    """Round a leaf's accumulated sum, if this backward pass went through the graph (a hook)."""
    owner = graph()
    if owner is not None and owner.task == torch._C._current_graph_task_id():
        owner.rounder.round_in_place(leaf.grad, "AccumulateGrad")


def _round_sum(graph: weakref.ref, gradient: Tensor) -> Tensor | None:
    """Round the sum of a leaf's gradients from several uses (a pre-hook)."""
    owner = graph()
    if owner is None or owner.task != torch._C._current_graph_task_id():
        return None
    return owner.rounder.rounded(gradient, "AccumulateGrad")
