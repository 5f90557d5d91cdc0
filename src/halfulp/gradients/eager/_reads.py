"""Reads: the tensors of other sites that a call reads, and hooks on the nodes of the call that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...kernels import untraced
from .._pytree import differentiable_in
from .._site import Site
from ._backward import LEAF, Backward, Hook, Widening, mark

# Which of the gradients that a node passes on, and the hook that moves it.
Moves = tuple[tuple[int, Hook], ...]


class Reads:
    """The tensors of other sites that one call reads, whose gradients the nodes that read them move on their way.

    Autograd runs nodes in the reverse of the order in which they were made, and adds up what they send to a tensor in
    that order. A node in between, such as a view's, would send what several nodes of one call make later, and as one
    sum: another number in the last bit where others read the tensor too. Hooks leave the graph as it is.

    A view is needed for a leaf under autocast, which would otherwise be cast once for calls at several sites, for a
    float16 parameter, whose gradient leaves in float32, and where gradients are rounded to a format: what a call passes
    on for an argument is rounded once, whichever of its nodes made it.

    Args:
        backward: whose exponents hold.
        site: the call's.
    """

    def __init__(self, backward: Backward, site: Site) -> None:
        self._backward = backward
        self._site = site
        self._hooks: dict[tuple[Any, int], Hook] = {}
        # Leaves by identity, as their nodes may not be there before they are read.
        self._leaves: dict[int, Hook | None] = {}
        self._views: list[Tensor] = []
        self._begun = 0

    def takes(self, tensor: Tensor) -> bool:
        """Whether hooks can move a tensor's gradient; a view is needed otherwise."""
        if self._backward.format is not None:
            return False
        return not tensor.is_leaf or not (tensor.dtype == torch.float16 or torch._C._is_any_autocast_enabled())

    def add(self, tensor: Tensor, source: Site) -> None:
        """Note that the call reads a tensor of another site."""
        hook = self._backward.edge_hook(source, self._site)
        if tensor.is_leaf:
            self._leaves[id(tensor)] = hook
        else:
            self._hooks[tensor.grad_fn, tensor.output_nr] = hook

    def add_parameter(self, parameter: Tensor) -> None:
        """Note that the call reads a parameter, whose gradient leaves for the global exponent."""
        self._leaves[id(parameter)] = None

    def add_view(self, view: Tensor) -> None:
        """Note that the call reads this view of a parameter."""
        self._views.append(view)

    def begin(self) -> None:
        """Begin the call: nodes that are made from now on are its own."""
        self._begun = torch._C._autograd._get_sequence_nr()

    def passes_on(self, tensor: Tensor) -> bool:
        """Whether a result is one of the arguments that were read, which stays at its site."""
        return bool(self._hooks) and (tensor.grad_fn, tensor.output_nr) in self._hooks

    def hook(self, made: Any, out: Any) -> None:
        """End the call: hook its nodes.

        Args:
            made: What it made or wrote into.
            out: Its result, in whose dtype parameters' gradients are made.
        """
        if not (self._hooks or self._leaves or self._views):
            return
        if isinstance(out, list | tuple):
            out = next((x for x in out if isinstance(x, Tensor)), None)
        leaving = self._backward.weight_edge_hook(self._site, out.dtype if isinstance(out, Tensor) else torch.float32)
        global_site = self._backward.sites.global_site
        for view in self._views:
            hook_weight_edge(view, leaving)
            mark(view.grad_fn, self._site, global_site, global_site)
        if self._hooks or self._leaves:
            for node, moves in self._readers(made, leaving):
                node.register_hook(_moving(self._backward, moves))
                # It is at the call's site; what it passes on may be at several.
                mark(node, self._site, self._site, global_site)

    def _readers(self, made: Any, leaving: Hook) -> Iterator[tuple[Any, Moves]]:
        """The nodes of the call that read what was noted."""
        pending: list[Any] = [x.grad_fn for x in differentiable_in(made)]
        seen = {None}
        while pending:
            node = pending.pop()
            if node in seen or not self._begun <= node._sequence_nr() < LEAF:
                continue
            seen.add(node)
            moves = []
            for slot, link in enumerate(node.next_functions):
                hook = self._hooks.get(link) or self._leaf_hook(link[0], leaving)
                if hook is None:
                    pending.append(link[0])
                else:
                    moves.append((slot, hook))
            if moves:
                yield node, tuple(moves)

    def _leaf_hook(self, node: Any, leaving: Hook) -> Hook | None:
        if not self._leaves or node is None or node._sequence_nr() < LEAF:
            return None
        leaf = id(node.variable)
        return (self._leaves[leaf] or leaving) if leaf in self._leaves else None


def _moving(backward: Backward, moves: Moves) -> Callable:
    """The hook of a node that moves some of the gradients which it passes on."""
    if moves not in backward.reader_hooks:

        @untraced
        def move(gradients: tuple, given: tuple) -> tuple | None:
            if not backward.active:
                # Whether that is for a second derivative's sake.
                backward.is_shut()
                return None
            found: list[Tensor | None] | None = None
            for slot, hook in moves:
                changed = hook((gradients[slot],))
                if changed is not None:
                    found = list(gradients) if found is None else found
                    found[slot] = changed[0]
            return None if found is None else tuple(found)

        backward.reader_hooks[moves] = move
    return backward.reader_hooks[moves]


def view_of(parameter: Tensor, sparse: bool) -> Tensor:
    """Return a view of a parameter, with a node of its own; ``sparse``: an alias, which takes sparse gradients."""
    if parameter.dtype == torch.float16:
        return Widening.apply(parameter)
    return torch.ops.aten.alias.default(parameter) if sparse else parameter.view_as(parameter)


def hook_weight_edge(view: Tensor, hook: Callable) -> None:
    """Let the gradient of a parameter's view go through a hook."""
    node: Any = view.grad_fn
    if isinstance(node, Widening._backward_cls):
        node.hook = hook
    else:
        node.register_prehook(hook)
