"""The module-level front end: every module without parts, but with parameters, is one site, seen at its borders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ._backward import Backward
from ._forward import Forward
from ._measure import narrow
from ._nesting import carriers_in, mapped
from ._region import hook_arrival, view_of
from ._site import Site


class ModuleForward(Forward):
    """Edges at a module's borders: inside, gradients are at its site, outside at the global exponent."""

    def __init__(self, module: nn.Module, backward: Backward, site: Site) -> None:
        super().__init__(module, backward)
        self._site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or self._backward.idle:
            return self.inner(*args, **kwargs)
        self._backward.join(None)
        self._backward.order.setdefault(self._site)
        args, kwargs = mapped((args, kwargs), self._entering)
        versions = [x._version for x in carriers_in((args, kwargs))]
        with self._parameters_apart() as arrivals:
            out = self.inner(*args, **kwargs)
        if versions != [x._version for x in carriers_in((args, kwargs))]:
            raise NotImplementedError(
                f"module {self._site.key!r} writes into its argument, whose gradient then goes round the exponents: "
                "let it work on a clone, or take mode='function'"
            )
        first = next(carriers_in(out), None)
        if first is not None:
            self._site.stored = narrow(first.dtype)
            for view in arrivals:
                hook_arrival(view, self._backward.arrival(self._site, first.dtype))
        return mapped(out, self._leaving)

    @contextlib.contextmanager
    def _parameters_apart(self) -> Iterator[list[Tensor]]:
        """Let the module read views of its parameters, each with a node of its own; gives the views."""
        module = self._module()
        kept = dict(module._parameters)
        for x in kept.values():
            if x is not None and x.requires_grad:
                self._backward.reads(x, self._site)
        views = {id(x): view_of(x, sparse=True) for x in kept.values() if x is not None and x.requires_grad}
        listed = module.__dict__.get("_flat_weights")
        try:
            module._parameters.update({name: views.get(id(x), x) for name, x in kept.items()})
            if listed is not None:
                # Recurrent layers read this list.
                module.__dict__["_flat_weights"] = [views.get(id(x), x) for x in listed]
            yield list(views.values())
        finally:
            module._parameters.update(kept)
            if listed is not None:
                module.__dict__["_flat_weights"] = listed

    def _entering(self, x: Tensor) -> Tensor:
        out = x.view_as(x)
        out.grad_fn.register_prehook(self._backward.crossing(self._backward.sites.anchor, self._site))
        return out

    def _leaving(self, x: Tensor) -> Tensor:
        if x.is_leaf:
            return x
        # A reader may write into it, and a write into a view would go round the hook.
        out = x.clone()
        out.grad_fn.register_prehook(self._backward.crossing(self._site, self._backward.sites.anchor))
        if self._backward.format is not None:
            x.grad_fn.register_prehook(self._backward.round_all)
        return out


def attach_modules(model: nn.Module, backward: Backward, prefix: str) -> Callable[[], None]:
    """Give every module that has parameters and no parts edges at its borders; returns what takes them away."""
    watched = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None or next(module.children(), None) is not None:
            continue
        key = ".".join(part for part in (prefix, name) if part) or "model"
        module.forward = ModuleForward(module, backward, backward.sites.open(key))
        watched.append(module.forward)

    def detach() -> None:
        for forward in watched:
            forward.restore()

    return detach
