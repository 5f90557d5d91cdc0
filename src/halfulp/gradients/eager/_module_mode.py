"""The module-level front end: every module with parameters and no parts is one site, seen at its boundaries."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .._measurement import narrow
from .._pytree import differentiable_in, map_tensors, memoized
from .._site import Site
from ._backward import Backward
from ._forward import Forward, traced
from ._reads import hook_weight_edge, view_of
from ._region import Names
from ._site_boundaries import mark
from ._strides import copy_with_strides

# Modules whose forward reads their parts' parameters and does not call the parts.
WHOLE = (nn.MultiheadAttention,)


class ModuleForward(Forward):
    """Edges at a module's boundaries: inside, gradients are at its site, outside at the global exponent."""

    def __init__(self, module: nn.Module, backward: Backward, site: Site, names: Names) -> None:
        super().__init__(module, backward)
        self._names = names
        self._site = site
        self._lock = threading.RLock()
        self._inside = False

    def _widens(self) -> bool:
        return False

    def _with_edges(self, args: tuple, kwargs: dict) -> Any:
        if traced():
            return self.inner(*args, **kwargs)
        # While a thread is inside, the module's parameters are views.
        with self._lock:
            return self.inner(*args, **kwargs) if self._inside else self._between_boundaries(args, kwargs)

    def _between_boundaries(self, args: tuple, kwargs: dict) -> Any:
        self._backward.join()
        self._backward.order.setdefault(self._site)
        args, kwargs = map_tensors((args, kwargs), memoized(self._entering))
        given = list(differentiable_in((args, kwargs)))
        versions = [x._version for x in given]
        with self._parameters_apart() as weight_edges:
            out = self.inner(*args, **kwargs)
        if versions != [x._version for x in given]:
            raise NotImplementedError(
                f"module {self._site.key!r} writes into its argument, whose gradient then goes round the exponents: "
                "let it work on a clone, or take mode='function'"
            )
        first, global_site = next(differentiable_in(out), None), self._backward.sites.global_site
        if first is not None:
            self._site.stored = narrow(first.dtype)
            for view in weight_edges:
                hook_weight_edge(view, self._backward.weight_edge_hook(self._site, first.dtype))
                mark(view.grad_fn, self._site, global_site, global_site)
        return map_tensors(out, memoized(self._leaving))

    @contextlib.contextmanager
    def _parameters_apart(self) -> Iterator[list[Tensor]]:
        """Replace the module's parameters by views with nodes of their own; return the views."""
        module: Any = self._module()  # its forward runs, so it is there
        holders = list(module.modules())
        parameters = {id(x): x for holder in holders for x in differentiable_in(holder._parameters)}
        for x in parameters.values():
            self._backward.note_read(x, self._site, listed=self._names.of(x) is not None)
        views = {key: view_of(x, sparse=True) for key, x in parameters.items()}
        kept = [(holder, dict(holder._parameters), holder.__dict__.get("_flat_weights")) for holder in holders]
        self._inside = True
        try:
            for holder, own, listed in kept:
                holder._parameters.update({name: views.get(id(x), x) for name, x in own.items()})
                if listed is not None:
                    # Recurrent layers read this list.
                    holder.__dict__["_flat_weights"] = [views.get(id(x), x) for x in listed]
            yield list(views.values())
        finally:
            self._inside = False
            for holder, own, listed in kept:
                holder._parameters.update(own)
                if listed is not None:
                    holder.__dict__["_flat_weights"] = listed

    def _entering(self, x: Tensor) -> Tensor:
        return self._edge(x.view_as(x), self._backward.sites.global_site, self._site)

    def _leaving(self, x: Tensor) -> Tensor:
        if x.is_leaf:
            return x
        # A reader may write into it, and a write into a view would go round the hook.
        if self._backward.format is not None:
            node: Any = x.grad_fn
            node.register_prehook(self._backward.round_all)
        return self._edge(copy_with_strides(x), self._site, self._backward.sites.global_site)

    def _edge(self, out: Tensor, source: Site, target: Site) -> Tensor:
        """A tensor, with a node of its own, whose gradient goes from ``target``'s exponent to ``source``'s."""
        node: Any = out.grad_fn
        node.register_prehook(self._backward.edge_hook(source, target))
        mark(node, target, source, self._backward.sites.global_site)
        return out


def modules_of(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are sites, with their keys: those with parameters and no parts, and whole attentions."""
    if isinstance(model, WHOLE) or next(model.children(), None) is None:
        if next(model.parameters(), None) is not None:
            yield prefix or "model", model
        return
    for name, part in model.named_children():
        yield from modules_of(part, f"{prefix}.{name}" if prefix else name)


def attach_modules(model: nn.Module, backward: Backward, prefix: str, names: Names) -> Callable[[], None]:
    """Put edges at the boundaries of every module that is a site; return a function that removes them."""
    watched: dict[nn.Module, ModuleForward] = {}
    for key, module in modules_of(model, prefix):
        if module not in watched:
            module.forward = watched[module] = ModuleForward(module, backward, backward.sites.open(key), names)

    def detach() -> None:
        for forward in watched.values():
            forward.restore()

    return detach
