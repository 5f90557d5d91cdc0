"""Operators of compiled graphs: a scaler's factors, roundings and measurements, found by its handle at run time."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import define_operator
from .._products import Factor, ProductForm
from .._site import narrow
from ..eager._backward import ALIVE, Backward
from ..eager._strides import times_power_of_two

# Separates what a string argument of an operator lists; a site's key has neither.
ITEM, PART = "\n", "\t"
# After the kind of a gradient that has the global exponent and not the site's.
SHARED = "*"


class Factors:
    """2^(target - source) of a graph's edges, on a device, made again where exponents changed."""

    def __init__(self, backward: Backward, edges: str, device: torch.device) -> None:
        keys, *pairs = edges.split(ITEM)
        sites = [backward.sites.open(key) for key in keys.split(PART)]
        self.sites = dict.fromkeys(site for site in sites if site is not backward.sites.global_site)
        self._edges = [tuple(sites[int(i)] for i in pair.split(PART)) for pair in pairs]
        for source, target in self._edges:
            backward.edge_hook(target, source)
        self._device = device
        self._exponents: list[int] = []
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    def now(self) -> Tensor:
        """The factors for the present exponents; a new tensor, as compilers may write into it."""
        exponents = [target.exponent - source.exponent for source, target in self._edges]
        if exponents != self._exponents:
            self._exponents = exponents
            self._values = torch.tensor([2.0**e for e in exponents], dtype=torch.float32, device="cpu").to(self._device)
        return self._values.clone()


def _active(scaler: str) -> Backward | None:
    """The scaler of that handle, if it differentiates a scaled loss."""
    backward = ALIVE.get(scaler)
    return backward if backward is not None and backward.active else None


def _factors(scaler: str, edges: str, count: int, device: torch.device) -> Tensor:
    backward = _active(scaler)
    if backward is None:
        return torch.ones(count, device=device, dtype=torch.float32)
    known = backward.factors.get((edges, device))
    if known is None:
        known = backward.factors[edges, device] = Factors(backward, edges, device)
    backward.order.update(known.sites)
    return known.now()


def _observe(gradients: list[Tensor], scaler: str, site: str, kinds: str) -> None:
    backward = _active(scaler)
    if backward is None or not backward.measuring:
        return
    where = backward.sites.open(site)
    backward.order.setdefault(where)
    for kind, gradient in zip(kinds.split(PART), gradients):
        exponent = where.exponent - backward.sites.global_site.exponent if kind.endswith(SHARED) else 0
        backward.measurements.add(
            where, kind.removesuffix(SHARED), times_power_of_two(gradient, exponent), backward.format
        )


def _round(gradient: Tensor, scaler: str) -> Tensor:
    backward = _active(scaler)
    return gradient.clone() if backward is None else backward.rounded(gradient)


def _watch(gradient: Tensor, factor: Tensor, scaler: str, site: str, form: ProductForm, groups: int) -> None:
    backward = _active(scaler)
    if backward is not None and backward.measuring:
        where = backward.sites.open(site)
        backward.propose(where, gradient, Factor(factor, form, groups), narrow(gradient.dtype))


def _watch_loss(gradient: Tensor, scaler: str, site: str, stored: torch.dtype) -> None:
    backward = _active(scaler)
    if backward is not None and backward.measuring:
        backward.propose_at_loss(backward.sites.open(site), gradient, narrow(stored))


def _refuse(out: Tensor, scaler: str) -> Tensor:
    raise ValueError(
        "the model has an AdaptiveGradScaler but was compiled by another backend, which would keep all its gradients "
        'at one exponent in silence: compile it with torch.compile(model, backend=scaler.backend("inductor")), of the '
        "same scaler"
    )


factors_of_edges = define_operator(
    "gradient_factors(str scaler, str edges, int count, Device device) -> Tensor",
    _factors,
    lambda scaler, edges, count, device: torch.empty(count, device=device, dtype=torch.float32),
    host=True,
)
observe_gradients = define_operator(
    "observe_gradients(Tensor[] gradients, str scaler, str site, str kinds) -> ()", _observe, lambda *_: None, host=True
)
round_gradient = define_operator(
    "round_gradient(Tensor gradient, str scaler) -> Tensor", _round, lambda x, _: torch.empty_like(x), host=True
)
watch_operands = define_operator(
    "watch_operands(Tensor gradient, Tensor factor, str scaler, str site, str form, int groups) -> ()",
    _watch,
    lambda *_: None,
    host=True,
)
watch_loss = define_operator(
    "watch_loss(Tensor gradient, str scaler, str site, ScalarType stored) -> ()",
    _watch_loss,
    lambda *_: None,
    host=True,
)
scaled_here = define_operator(
    "scaled_here(Tensor out, str scaler) -> Tensor", _refuse, lambda out, scaler: torch.empty_like(out)
)
# Inductor cuts an expression where it reads too much, and with that decides what it computes by vectors and what one by
# one: exp, for instance, in other last bits. A loss's gradient, which much may read, is moved apart from all that.
move_number = define_operator(
    "moved_number(Tensor gradient, Tensor factor) -> Tensor", torch.mul, lambda gradient, _: torch.empty_like(gradient)
)
for _operator in (observe_gradients, watch_operands, watch_loss):
    torch.fx.node.has_side_effect(_operator)
# Traced by other backends on the way to its refusal.
torch.library.register_autograd("halfulp::scaled_here", lambda _, gradient: (gradient, None))


def mark_output(out: Tensor, scaler: str, wide: bool) -> Tensor:
    """Mark a model's output in a compiled graph for the scaler's backend."""
    if not out.requires_grad:
        return out
    return scaled_here(out.float() if wide and out.dtype == torch.float16 else out, scaler)
