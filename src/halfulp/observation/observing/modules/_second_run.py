"""A second run of a forward pass in eager mode that leaves no trace: on copies of its inputs and of its state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as _torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import DeviceContext

from ._copies import Copier
from ._random_state import RandomState, own_state, same_states

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class SecondRun:
    """A module and all that its forward pass depends on, as they are when this is made.

    Args:
        module: the eager module.
        args, kwargs: its inputs.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Another run of the wrapper would prepare its reduction of gradients anew.
        self._module: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        copier = Copier()
        self._args, self._kwargs = copier.copy((args, kwargs), objects=True)
        copier.modules.extend(self._module.modules())
        self._states: dict[nn.Module, dict[str, Any]] = {}
        for one in copier.modules:  # which grows by the modules that those before keep in lists
            for inner in one.modules():
                if inner not in self._states:
                    self._states[inner] = copier.state(inner)
        self.hooks_left_out: bool = copier.hooks_left_out or any(getattr(_torch_module, name) for name in _GLOBAL_HOOKS)
        self._random = RandomState()
        self._own_random = [own_state(generator) for generator in copier.generators]
        self._parameters = [(p, p._version) for p in self._module.parameters() if not p.is_inference()]
        self._drew = False

    def why_not(self) -> str | None:
        """Return why the module's run cannot be compared with another one; None where it can be."""
        if self._drew or not self._random.is_current():
            return "its forward pass draws random numbers, which compiled code draws in another order"
        if any(parameter._version != version for parameter, version in self._parameters):
            return "its forward pass changes its parameters in place, so that they are not what they were"
        return None

    def run(self) -> Any:
        """Return what the module gives in eager mode; its own buffers, attributes and generators stay as they are."""
        copier = Copier()
        args, kwargs = copier.copy((self._args, self._kwargs), objects=True)
        states = {module: copier.state_of(state) for module, state in self._states.items()}
        now = RandomState()
        try:
            self._random.put_back()
            with _as_called(), _standing_in(states):
                args, kwargs = _not_leaves((args, kwargs), {})
                output = self._module(*args, **kwargs)
            drawn = [own_state(generator) for generator in copier.generators]
            self._drew = not self._random.is_current() or not same_states(drawn, self._own_random)
            return output
        finally:
            now.put_back()


def why_never(module: nn.Module) -> str | None:
    """Return why a module is never run a second time; None where it may be."""
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        return "its parameters are sharded, and another run would communicate"
    modes = torch.overrides._get_current_function_mode_stack()
    if torch._C._len_torch_dispatch_stack() or any(not isinstance(mode, DeviceContext) for mode in modes):
        return "it runs under a mode that changes or watches its functions"
    return None


@contextlib.contextmanager
def _as_called() -> Iterator[None]:
    """As the user called it, but eager, and with nothing of it left in the caches and hooks of torch."""
    cached = torch.is_autocast_cache_enabled()
    held = {name: dict(getattr(_torch_module, name)) for name in _GLOBAL_HOOKS}
    # Weights that this run casts would be found by layers that follow, and be held by their graphs.
    torch.set_autocast_cache_enabled(False)
    for name in _GLOBAL_HOOKS:
        getattr(_torch_module, name).clear()
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            torch._C._EnableTorchFunction(),
            torch.enable_grad(),
            saved_tensors_hooks(_itself, _itself),  # instead of the user's
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for name, hooks in held.items():
            getattr(_torch_module, name).update(hooks)


@contextlib.contextmanager
def _standing_in(states: dict[nn.Module, dict[str, Any]]) -> Iterator[None]:
    """Modules whose buffers and attributes are others for a while; their own are not touched, nor their versions."""
    held = {module: dict(vars(module)) for module in states}
    try:
        for module, state in states.items():
            _set(vars(module), state)
        yield
    finally:
        for module, state in held.items():
            _set(vars(module), state)


def _set(attributes: dict[str, Any], state: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(state)


def _not_leaves(value: Any, made: dict[int, Any]) -> Any:
    """Return inputs that require gradients as a forward pass sees them, which may change them in place."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad and not isinstance(value, nn.Parameter):
            return made.setdefault(id(value), value.clone())
        return value
    if type(value) in (tuple, list):
        return type(value)(_not_leaves(item, made) for item in value)
    if type(value) is dict:
        return {key: _not_leaves(item, made) for key, item in value.items()}
    return value


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
