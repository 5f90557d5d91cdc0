"""The module-level front end: every module without parts, but with parameters, is one site, seen at its borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._backward import Backward
from ._measure import narrow
from ._nesting import carriers_in, mapped
from ._site import Site


class ModuleSite:
    """The hooks of one module: gradients inside are at its site, outside at the global exponent."""

    def __init__(self, backward: Backward, site: Site) -> None:
        self._backward = backward
        self._site = site
        self._entered: list[list[tuple[Tensor, int]]] = []

    def __deepcopy__(self, memo: dict) -> ModuleSite:
        return self

    def __reduce__(self) -> tuple:
        return Unwatched, ()

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Before forward: an edge in front of every argument."""
        if not _watching():
            return None
        anchor = self._backward.sites.anchor
        self._backward.order.setdefault(self._site)
        for parameter in module.parameters(recurse=False):
            self._backward.home(parameter, self._site)
        args, kwargs = mapped((args, kwargs), lambda x: self._edge(x, anchor, self._site, False))
        self._entered.append([(x, x._version) for x in carriers_in((args, kwargs))])
        return args, kwargs

    def leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
        """After it: an edge behind every result."""
        if not _watching():
            return None
        if any(x._version != version for x, version in self._entered.pop()):
            raise NotImplementedError(
                f"module {self._site.key!r} writes into its argument, whose gradient then goes round the exponents: "
                "let it work on a clone, or take mode='function'"
            )
        first = next(carriers_in(out), None)
        if first is not None:
            self._site.stored = narrow(first.dtype)
            for parameter in module.parameters(recurse=False):
                self._backward.note_dtype(parameter, first.dtype)
        return mapped(out, lambda x: self._edge(x, self._site, self._backward.sites.anchor, True))

    def _edge(self, x: Tensor, source: Site, target: Site, leaving: bool) -> Tensor:
        if x.is_leaf and leaving:
            return x
        out = x.clone() if leaving else x.view_as(x)
        if leaving and self._backward.format is not None:
            # The product's own gradient: what arrives here.
            out.grad_fn.register_prehook(self._backward.round_all)
        out.grad_fn.register_prehook(self._backward.crossing(source, target))
        return out


class Unwatched:
    """The hooks of a module that was pickled: they do nothing."""

    def enter(self, *args: Any) -> None:
        """Nothing."""

    def leave(self, *args: Any) -> None:
        """Nothing."""


def _watching() -> bool:
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def attach_modules(model: nn.Module, backward: Backward, prefix: str) -> list[Callable[[], None]]:
    """Hook every module that has parameters and no parts, but for those whose parameters several modules share."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    handles = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and next(module.children(), None) is None and all(owners[id(parameter)] == 1 for parameter in own):
            key = ".".join(part for part in (prefix, name) if part) or "model"
            hooks = ModuleSite(backward, backward.sites.open(key))
            handles.append(module.register_forward_pre_hook(hooks.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(hooks.leave, with_kwargs=True))
    return [handle.remove for handle in handles]
