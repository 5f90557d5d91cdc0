"""Wrappers around models (DistributedDataParallel, torch.compile, DTensor plans): names and gradients are completed.

torch's global registration hooks report every module and parameter that is put into a module; `watch` installs them for
the first model whose parameters have auxiliary tensors. Nothing else sees a wrapper when it is made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ...kernels import untraced
from .._in_backward import FIRST
from . import _gathered_states as _whole_states
from ._state_dict import known_layout, state_dict_layout

_listening: list[Any] = []


def watch() -> None:
    """Install the registration hooks, once."""
    if not _listening:
        _listening.append(register_module_module_registration_hook(_on_registration))
        _listening.append(register_module_parameter_registration_hook(_refuse_dtensor))
        _whole_states.watch()


def install(wrapper: nn.Module) -> None:
    """Let a wrapper load its parameters' auxiliary tensors under names without its prefix.

    torch.distributed.checkpoint.state_dict takes ``module.`` (DistributedDataParallel) and ``_orig_mod.``
    (torch.compile) out of names when it saves, and puts them before parameters and buffers alone when it loads.
    """
    if not any(getattr(hook, "hook", None) is _put_prefix for hook in wrapper._load_state_dict_pre_hooks.values()):
        wrapper.register_load_state_dict_pre_hook(_put_prefix)
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            wrapper.register_forward_hook(_complete_gradients)


def _on_registration(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    if inner is not None and name == _prefix_of(outer) and any(_own(module) for module in inner.modules()):
        install(outer)


def _prefix_of(module: nn.Module | None) -> str | None:
    """Return the name of a wrapper's only child, which torch's checkpoints leave out; None for other modules."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "module"
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return "_orig_mod" if compiler is not None and isinstance(module, compiler.OptimizedModule) else None


def _own(module: nn.Module) -> list[str]:
    return [key for key, value in module._parameters.items() if state_dict_layout(value) is not None]


def _put_prefix(wrapper: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
    """Rename auxiliary entries whose parameter has the wrapper's prefix already, so that they have it too."""
    for name, parameter in _named(wrapper):
        without = prefix + _without_prefixes(wrapper, name)
        if without == prefix + name or prefix + name not in state_dict:
            continue
        suffix = known_layout(parameter).suffix
        for entry in [entry for entry in state_dict if suffix.sub("", entry) == without != entry]:
            full = prefix + name + entry[len(without) :]
            if full not in state_dict:  # else an entry of nobody, which torch tells of
                state_dict[full] = state_dict.pop(entry)


def _named(wrapper: nn.Module) -> Iterator[tuple[str, Tensor]]:
    pairs = wrapper.named_parameters(remove_duplicate=False)
    return ((name, parameter) for name, parameter in pairs if state_dict_layout(parameter) is not None)


def _without_prefixes(module: nn.Module | None, name: str) -> str:
    """Return a name below a module as torch's checkpoints write it, without wrappers' prefixes."""
    kept = []
    for part in name.split("."):
        if part != _prefix_of(module):
            kept.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def _complete_gradients(wrapper: nn.Module, inputs: Any, output: Any) -> None:
    """Give parameters that this process did not use the same kind of gradient as in the processes that did.

    With find_unused_parameters the reducer makes such a gradient itself, of the plain numbers that have arrived; where
    the parameter was used it writes them into the gradient that is there, and rounds. Processes would drift apart.
    """
    if wrapper.find_unused_parameters and not wrapper.gradient_as_bucket_view:
        _complete_after_backward(wrapper, output)


@untraced
def _complete_after_backward(wrapper: nn.Module, output: Any) -> None:
    engine = torch.autograd.Variable._execution_engine
    queued: list[bool] = []

    def after(callbacks: int) -> None:
        # Callbacks run in turn: behind the reducer's own, which a callback of torch's own may have put there.
        if callbacks:
            engine.queue_callback(lambda: after(callbacks - 1))
        else:
            _complete(wrapper)

    def begin(gradient: Tensor) -> None:
        if not queued:
            queued.append(True)
            engine.queue_callback(lambda: after(2))

    for x in nn.parallel.distributed._find_tensors(output):
        if x.requires_grad:
            x.register_hook(begin)


def _complete(wrapper: nn.Module) -> None:
    with torch.no_grad():
        for _, parameter in _named(wrapper):
            plain = parameter.grad
            if type(plain) is Tensor and getattr(parameter, "gradients", None) != FIRST:
                gradient = torch.zeros_like(parameter.detach())
                gradient.copy_(plain)
                parameter.grad = gradient


def _refuse_dtensor(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Refuse a parameter that a parallel plan has split among processes (a DTensor), as it is put into a module.

    Raises:
        NotImplementedError: its shards have auxiliary tensors.
    """
    shard = getattr(parameter, "_local_tensor", None)
    if state_dict_layout(shard) is None:
        return
    kind = type(shard).__name__
    raise NotImplementedError(
        f"{name!r} of {type(module).__name__} is a {kind} that a parallel plan (parallelize_module, distribute_module) "
        "makes a DTensor of: its layers add and scatter plain tensors. Use DistributedDataParallel, or give the plan "
        "plain parameters (make the model again, as a part of this one may be split already)"
    )
