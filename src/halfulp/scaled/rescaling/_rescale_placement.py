"""Placement of rescales: at the inputs of normalisations, at named modules, or as one measured step proposes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...kernels import untraced
from ...subclass.models._hooks import remove_hooks
from ...subclass.models._module_parameters import matcher
from .._scaled_tensor import ScaledTensor
from ._rescale import Side, check_side, rescale, root_mean_square

Rescale = Literal["auto", "norms"] | Iterable[str] | Mapping[str, Side] | None

_SIDE = "_halfulp_rescale"
_NORM = re.compile("Norm(?![a-z])")


def sides_of(model: nn.Module, rescale: Rescale) -> dict[nn.Module, Side]:
    """Return which modules rescale their first scaled input, and on which side.

    Raises:
        ValueError: a name that matches no module, or another side.
    """
    named = dict(model.named_modules())
    if rescale is None:
        return {}
    if rescale == "norms":
        return {module: "gradient" for module in named.values() if _is_norm(module)}
    if isinstance(rescale, str):
        allowed = "'auto', 'norms', None, names of modules, and {name: side}"
        raise ValueError(f"rescale={rescale!r}: allowed are {allowed}")
    at_inputs: Side = "gradient"
    wanted = rescale if isinstance(rescale, Mapping) else dict.fromkeys(rescale, at_inputs)
    sides: dict[nn.Module, Side] = {}
    for glob, side in wanted.items():
        check_side(side)
        matches = matcher([glob], list(named), what="rescale", of="module")
        for name, module in named.items():
            if matches(module, name):
                sides[module] = side if sides.get(module, side) == side else "both"
    return sides


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation, by its class's name; modules that hold others are none."""
    return bool(_NORM.search(type(module).__name__)) and not module._modules


def install(sides: Mapping[nn.Module, Side]) -> None:
    """Rescale at these modules from now on."""
    for module, side in sides.items():
        if _SIDE not in module.__dict__:
            module.register_forward_pre_hook(_rescale_input, with_kwargs=True)
        module.__dict__[_SIDE] = side


def remove(model: nn.Module) -> None:
    """Remove every rescale from a model."""
    for module in model.modules():
        module.__dict__.pop(_SIDE, None)
    remove_hooks(model.modules(), lambda hook: hook is _rescale_input)


def placed(model: nn.Module) -> dict[str, Side]:
    """Return the names of the modules that rescale, and on which side."""
    return {name: module.__dict__[_SIDE] for name, module in model.named_modules() if _SIDE in module.__dict__}


def propose_rescales(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor], window: float = 4.0
) -> dict[str, Side]:
    """Return the fewest modules at whose inputs to rescale, from one step in which nothing is rescaled.

    The step measures log2 of the payloads' root mean square at every module's input, forward and backward. In the order
    of either pass, a rescale is placed at the first module whose payloads left the window since the last one: the
    fewest for a chain of modules. The model, its gradients, buffers and the random state are as they were.

    Args:
        model: one that `scalify` changed.
        batch: a tuple is given to the model as arguments, a dict by name, anything else as its only argument.
        loss: a function of the model's output that returns a scalar.
        window: how many powers of two above or below 1 payloads may stray.

    Returns:
        Names of modules and sides, for `scalify(model, rescale=...)`.

    Raises:
        ValueError: the model has no scaled parameters.

    >>> from halfulp.scaled import scalify
    >>> model = scalify(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)), rescale=None)
    >>> propose_rescales(model, torch.ones(4, 8), lambda out: out.square().mean())
    {}
    """
    parameters = [p for p in model.parameters() if isinstance(p, ScaledTensor) and p.requires_grad]
    if not parameters:
        raise ValueError(f"this {type(model).__name__} has no scaled parameters: hu.scalify(model)")
    probe = _Probe()
    with _without_rescales(model), probe.attached(model), torch.enable_grad():
        value = loss(call(model, batch))
        torch.autograd.grad(value, parameters, allow_unused=True)
    forward = _first_to_leave(probe.forward, window)
    backward = _first_to_leave(probe.backward, window)
    order = [name for name, _ in (*probe.forward, *probe.backward)]
    both: dict[str, Side] = {name: "both" for name in order if name in forward and name in backward}
    one: dict[str, Side] = {
        name: "forward" if name in forward else "gradient" for name in order if name in forward or name in backward
    }
    return one | both


def call(model: nn.Module, batch: Any) -> Any:
    """Return a model's output for a batch: a tuple holds positional arguments, a dict named ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _first_to_leave(measured: list[tuple[str, float]], window: float) -> set[str]:
    """Return where to rescale so that every payload is within the window after its last rescale."""
    chosen: set[str] = set()
    start = 0.0
    for name, value in measured:
        if name in chosen or abs(value - start) > window:
            chosen.add(name)
            start = value
    return chosen


def _first_input(arguments: tuple[Any, ...], options: dict[str, Any]) -> int | str | None:
    """Return the position or name of the first scaled argument."""
    for i, value in enumerate(arguments):
        if isinstance(value, ScaledTensor):
            return i
    return next((name for name, value in options.items() if isinstance(value, ScaledTensor)), None)


def _replaced(
    arguments: tuple[Any, ...], options: dict[str, Any], change: Callable[[ScaledTensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    place = _first_input(arguments, options)
    if place is None:
        return None
    if isinstance(place, str):
        return arguments, options | {place: change(options[place])}
    return (*arguments[:place], change(arguments[place]), *arguments[place + 1 :]), options


@untraced
def _rescale_input(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Rescale a module's first scaled input: a forward pre-hook."""
    side = module.__dict__.get(_SIDE)
    return None if side is None else _replaced(arguments, options, lambda x: rescale(x, "rms", side))


class _Probe:
    """Measurements of payloads at the inputs of modules, in both passes."""

    def __init__(self) -> None:
        self.forward: list[tuple[str, float]] = []
        self.backward: list[tuple[str, float]] = []

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Measures while the block runs."""
        handles = [
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, module in model.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., Any]:
        def measure(x: ScaledTensor) -> Tensor:
            _note(self.forward, name, x)
            apply: Callable[..., Tensor] = _GradientMeasurement.apply
            return apply(x, self.backward, name)

        return lambda module, arguments, options: _replaced(arguments, options, measure)


def _note(measured: list[tuple[str, float]], name: str, x: Tensor) -> None:
    if isinstance(x, ScaledTensor) and x.numel():
        value = root_mean_square(x._payload)
        if value > 0:
            measured.append((name, value.log2().item()))


class _GradientMeasurement(torch.autograd.Function):
    """The identity, whose gradient is measured."""

    @staticmethod
    def forward(context: Any, x: Tensor, measured: list[tuple[str, float]], name: str) -> Tensor:
        context.place = measured, name
        return x.view_as(x)

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        measured, name = context.place
        _note(measured, name, gradient)
        return gradient, None, None


@contextmanager
def _without_rescales(model: nn.Module) -> Iterator[None]:
    """Turn rescales off in the block, and restore buffers and the random state after it."""
    sides = {module: module.__dict__.pop(_SIDE) for module in model.modules() if _SIDE in module.__dict__}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, side in sides.items():
            module.__dict__[_SIDE] = side
        with torch.no_grad():
            for buffer, start in buffers:
                buffer.copy_(start)
