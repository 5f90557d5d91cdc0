"""Modules that take in another one: companions load through the prefix they add, and what they cannot hold is refused.

torch tells of every module and parameter that is registered anywhere; `watch` listens from the first model on whose
parameters have companions. Nothing else sees a wrapper when it is made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ._companions import layout_of

_listening: list[Any] = []


def watch() -> None:
    """From now on see what is wrapped around models whose parameters have companions."""
    if not _listening:
        _listening.append(register_module_module_registration_hook(_taken_in))
        _listening.append(register_module_parameter_registration_hook(_refuse_split))


def install(wrapper: nn.Module) -> None:
    """Let a wrapper load the companions of its parameters under the names that they have without its prefix.

    torch.distributed.checkpoint.state_dict takes ``module.`` (DistributedDataParallel) and ``_orig_mod.``
    (torch.compile) out of names when it saves, and puts them before parameters and buffers alone when it loads.
    """
    if not any(getattr(hook, "hook", None) is _put_prefix for hook in wrapper._load_state_dict_pre_hooks.values()):
        wrapper.register_load_state_dict_pre_hook(_put_prefix)


def _taken_in(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    if name == _prefix_of(outer) and any(_own(module) for module in inner.modules()):
        install(outer)


def _prefix_of(module: nn.Module | None) -> str | None:
    """The name of a wrapper's only child, which torch's checkpoints leave out."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "module"
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return "_orig_mod" if compiler is not None and isinstance(module, compiler.OptimizedModule) else None


def _own(module: nn.Module) -> list[str]:
    return [key for key, value in module._parameters.items() if layout_of(value) is not None]


def _put_prefix(wrapper: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
    """Companions of parameters that stand under their full names already, brought to where these are."""
    for name, parameter in _named(wrapper):
        without = prefix + _without_prefixes(wrapper, name)
        if without == prefix + name or prefix + name not in state_dict:
            continue
        suffix = layout_of(parameter).suffix
        for entry in [entry for entry in state_dict if suffix.sub("", entry) == without != entry]:
            full = prefix + name + entry[len(without) :]
            if full not in state_dict:  # else an entry of nobody, which torch tells of
                state_dict[full] = state_dict.pop(entry)


def _named(wrapper: nn.Module) -> Iterator[tuple[str, Tensor]]:
    pairs = wrapper.named_parameters(remove_duplicate=False)
    return ((name, parameter) for name, parameter in pairs if layout_of(parameter) is not None)


def _without_prefixes(module: nn.Module | None, name: str) -> str:
    """A name below a module as torch's checkpoints write it."""
    kept = []
    for part in name.split("."):
        if part != _prefix_of(module):
            kept.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def _refuse_split(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Refuse a parameter that is split among processes by a parallel plan (a DTensor), as it is put into a module.

    Raises:
        NotImplementedError: its parts have companions.
    """
    if layout_of(getattr(parameter, "_local_tensor", None)) is None:
        return
    kind = type(parameter._local_tensor).__name__
    raise NotImplementedError(
        f"{name!r} of {type(module).__name__} is a {kind} that a parallel plan (parallelize_module, distribute_module) "
        "makes a DTensor of: its layers add and scatter plain tensors. Use DistributedDataParallel, or give the plan "
        "plain parameters (make the model again, as a part of this one may be split already)"
    )
