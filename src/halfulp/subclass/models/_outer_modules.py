"""Wrappers around models (DistributedDataParallel, torch.compile, DTensor plans) and torch's checkpoints of them.

torch's global registration hooks report every module and parameter that is put into a module; `watch` installs them for
the first model whose parameters have auxiliary tensors. Nothing else sees a wrapper when it is made.

With ``broadcast_from_rank0`` torch sends each entry, and a process keeps those that bear the name of one of its
parameters or states: the auxiliary tensors beside these would be dropped, and a state that is no plain tensor would
meet a plain one in a collective. So plain tensors are sent alone, every process expects the names of its own auxiliary
tensors, and states are put together again. Low bits of 16-bit integers, which neither gloo nor NCCL takes, travel as
32-bit ones.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..._torch_import import after_import
from ...kernels import untraced
from .._in_backward import FIRST
from ._state_dict import known_layout, state_dict_layout

# What DistributedDataParallel and torch.compile put before names.
_PREFIXES = ("module", "_orig_mod")
_UNSENT = (torch.int16, torch.uint16)
_watching: list[bool] = []


def watch_checkpoints() -> None:
    """Wrap torch's checkpoint functions, now or as soon as torch imports them."""
    if not _watching:
        _watching.append(True)
        after_import("torch.distributed.checkpoint.state_dict", _complete_module)


def _complete_module(module: ModuleType) -> None:
    for name, completed in (
        ("_gather_state_dict", _gathering),
        ("_distribute_state_dict", _distributing),
        ("_broadcast_state_dict", _sending),
        ("_unflatten_optim_state_dict", _unflattening),
    ):
        setattr(module, name, completed(getattr(module, name)))


# Gathering, and cutting into shards -------------------------------------------------------------------------------


def _gathering(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def gather(state_dict: dict[str, Any], *given: Any, **options: Any) -> dict[str, Any]:
        return _restore_dtypes(plain(_to_sendable(state_dict), *given, **options), state_dict)

    return gather


def _distributing(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def distribute(full: Mapping[str, Any], local: MutableMapping[str, Any], *given: Any, **options: Any) -> None:
        before = dict(local)
        plain(_to_sendable(full), local, *given, **options)
        _restore_dtypes(local, before)

    return distribute


def _to_sendable(value: Any) -> Any:
    """Return a state with tensors of dtypes that processes cannot send as int32."""
    if isinstance(value, Mapping):
        parts = {name: _to_sendable(part) for name, part in value.items()}
        return parts if any(parts[name] is not part for name, part in value.items()) else value
    return value.to(torch.int32) if isinstance(value, Tensor) and value.dtype in _UNSENT else value


def _restore_dtypes(found: Any, before: Any) -> Any:
    """Return a gathered state with tensors in the dtypes that they had before."""
    if isinstance(before, Mapping) and isinstance(found, MutableMapping):
        for name in before.keys() & found.keys():
            found[name] = _restore_dtypes(found[name], before[name])
    elif isinstance(before, Tensor) and before.dtype in _UNSENT:
        return found.to(before.dtype) if isinstance(found, Tensor) and found.dtype == torch.int32 else found
    return found


# Flat states ------------------------------------------------------------------------------------------------------


def _unflattening(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def unflatten(optim: Any, state_dict: Mapping[str, Any], *given: Any, **options: Any) -> Any:
        try:
            return plain(optim, state_dict, *given, **options)
        except KeyError as error:
            explain, (key, *_) = getattr(optim, "explain_missing_entry", None), (*error.args, None)
            if explain is None or not str(key).startswith(("state.", "param_groups.")):
                raise
            raise ValueError(explain(key, state_dict)) from error

    return unflatten


# Sending ----------------------------------------------------------------------------------------------------------


def _sending(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def send(full: MutableMapping[str, Any], local: MutableMapping[str, Any], *given: Any, **options: Any) -> None:
        before = dict(local)
        own = {name: value for name, value in local.items() if state_dict_layout(value) is not None}
        _put_prefixes(full, own)
        expected = {name: _auxiliary_entries(name, value, local) for name, value in own.items()}
        for beside in expected.values():
            local.update(beside)
        plain(_to_sendable(_to_plain_entries(full, own)), local, *given, **options)
        for name, beside in expected.items():
            # What is as it was has not been sent: the first process's entry is a plain tensor.
            unsent = [entry for entry, part in beside.items() if local.get(entry) is part]
            for entry in unsent:
                del local[entry]
            if name in local and not isinstance(own[name], nn.Parameter):  # which modules put together
                local[name] = _from_plain_entries(local, name, beside, own[name])
        _restore_dtypes(local, before)

    return send


def _put_prefixes(full: MutableMapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Put auxiliary entries behind the prefixes of wrappers, where torch has put their parameters."""
    for name, value in own.items():
        suffix = known_layout(value).suffix
        for short in _names_without_prefixes(name):
            alone = [entry for entry in full if entry.startswith(short) and suffix.sub("", entry) == short]
            for entry in alone if short not in full else ():
                full[name + entry.removeprefix(short)] = full.pop(entry)


def _names_without_prefixes(name: str) -> Iterator[str]:
    """Yield a name without some of its parts that may be a wrapper's prefix."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts) if part in _PREFIXES]
    for count in range(1, len(places) + 1):
        for left_out in itertools.combinations(places, count):
            yield ".".join(part for i, part in enumerate(parts) if i not in left_out)


def _auxiliary_entries(name: str, value: Tensor, local: Mapping[str, Any]) -> dict[str, Tensor]:
    entries = known_layout(value).entries(name, value.detach())
    return {entry: part for entry, part in entries.items() if entry not in local}


def _to_plain_entries(full: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a state of plain tensors only: one entry for each auxiliary tensor, values where this process has none."""
    parted: dict[str, Any] = {}
    for name, value in full.items():
        layout = state_dict_layout(value)
        if layout is None:
            parted[name] = value
        elif name in own:
            parted |= layout.entries(name, value.detach())
        else:
            parted[name] = value.detach().decode()
    return parted


def _from_plain_entries(
    local: MutableMapping[str, Any], name: str, beside: Mapping[str, Tensor], like: Tensor
) -> Tensor:
    """Return a tensor like the one that stood here, made of the entries that were sent."""
    entries = {name: local[name], **{entry: local.pop(entry) for entry in beside if entry in local}}
    return known_layout(like).fitting({entry: part.to(like.device) for entry, part in entries.items()}, name, like)


_listening: list[Any] = []


def watch() -> None:
    """Install the registration hooks, once."""
    if not _listening:
        _listening.append(register_module_module_registration_hook(_on_registration))
        _listening.append(register_module_parameter_registration_hook(_refuse_dtensor))
        watch_checkpoints()


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
    for name, parameter in _name_of_inner(wrapper):
        without = prefix + _without_prefixes(wrapper, name)
        if without == prefix + name or prefix + name not in state_dict:
            continue
        suffix = known_layout(parameter).suffix
        for entry in [entry for entry in state_dict if suffix.sub("", entry) == without != entry]:
            full = prefix + name + entry[len(without) :]
            if full not in state_dict:  # else an entry of nobody, which torch tells of
                state_dict[full] = state_dict.pop(entry)


def _name_of_inner(wrapper: nn.Module) -> Iterator[tuple[str, Tensor]]:
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
        for _, parameter in _name_of_inner(wrapper):
            plain = parameter.grad
            if type(plain) is Tensor and getattr(parameter, "gradients", None) != FIRST:
                gradient = torch.zeros_like(parameter.detach())
                gradient.copy_(plain)
                parameter.grad = gradient


def _refuse_dtensor(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Refuse a parameter that a parallel plan has split (a DTensor) when it is put into a module.

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
