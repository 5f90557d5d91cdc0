"""Who else holds a parameter: optimizers, hooks, wrappers; refused, by type, before a change.

The order that always works: device, conversion, wrappers (DistributedDataParallel, fully_shard), torch.compile,
optimizers, flat buffers and hooks on nodes of autograd, of which nothing is seen here.

torch's global registration hooks report every module and parameter that is put into a module; they are installed for
the first narrow optimizer or converted model. Nothing else sees a wrapper, or an AveragedModel, when it is made.

torch.distributed.checkpoint sends low bits of 16-bit integers, which neither gloo nor NCCL takes, as 32-bit ones.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.swa_utils import AveragedModel

from ..._messages import name_type
from ..._torch_import import call_after_import
from ...kernels import warn_once_of_fallback
from .._in_backward import FIRST_GRADIENTS_MODE
from ._state_dict import find_state_dict_layout

_UNSENDABLE_DTYPES = (torch.int16, torch.uint16)
_NARROW_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@functools.cache
def wrap_distributed_checkpoint_functions() -> None:
    """Wrap the functions of torch.distributed.checkpoint.state_dict that send state dicts, once it is imported."""
    call_after_import("torch.distributed.checkpoint.state_dict", _wrap_module_functions)


def _wrap_module_functions(module: ModuleType) -> None:
    for name, wrapper in (
        ("_load_model_state_dict", functools.partial(_load_with_renamed_entries, module._get_fqns)),
        ("_gather_state_dict", _gather_sendable_state_dict),
        ("_distribute_state_dict", _distribute_states),
        ("_broadcast_state_dict", _broadcast_states),
    ):
        setattr(module, name, functools.partial(wrapper, getattr(module, name)))


def _load_with_renamed_entries(
    get_names: Callable[..., set[str]],
    original: Callable,
    model: nn.Module,
    state_dict: MutableMapping[str, Any],
    *given: Any,
    **options: Any,
) -> Any:
    """Rename auxiliary entries to their parameters' names with ``module.`` (DDP) and ``_orig_mod.`` (torch.compile)."""
    # torch takes these out of names when it saves, and puts them before parameters and buffers alone when it loads.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (layout := find_state_dict_layout(parameter)) is None:
            continue
        # Without those of checkpoint wrappers, whose own hooks put them before every entry.
        long = get_names(model, name, skip_ddp_prefix=False, skip_compiler_prefix=False)
        for short, full in zip(get_names(model, name), long):
            beside = [entry for entry in state_dict if layout.auxiliary_suffix.sub("", entry) == short != entry]
            for entry in beside if short != full else ():
                state_dict[full + entry.removeprefix(short)] = state_dict.pop(entry)
    return original(model, state_dict, *given, **options)


def _gather_sendable_state_dict(
    original: Callable, state_dict: dict[str, Any], *given: Any, **options: Any
) -> dict[str, Any]:
    return _restore_state_dtypes(original(_convert_to_sendable(state_dict), *given, **options), state_dict)


def _distribute_states(
    original: Callable, full: Mapping[str, Any], local: MutableMapping[str, Any], *given: Any, **options: Any
) -> None:
    before = dict(local)
    original(_convert_to_sendable(full), local, *given, **options)
    _restore_state_dtypes(local, before)


def _broadcast_states(
    original: Callable, full: Any, local: MutableMapping[str, Any], *given: Any, **options: Any
) -> None:
    for name, value in local.items():
        if find_state_dict_layout(value) is not None:
            raise NotImplementedError(
                f"broadcast_from_rank0 sends one plain tensor per entry, and {name!r} is {name_type(value)}, which has "
                "several: load the file on every process, without broadcast_from_rank0"
            )
    _distribute_states(original, full, local, *given, **options)


def _convert_to_sendable(value: Any) -> Any:
    """Return a state whose tensors of dtypes that processes cannot send are int32 tensors instead."""
    if isinstance(value, Mapping):
        parts = {name: _convert_to_sendable(part) for name, part in value.items()}
        return parts if any(parts[name] is not part for name, part in value.items()) else value
    return value.to(torch.int32) if isinstance(value, Tensor) and value.dtype in _UNSENDABLE_DTYPES else value


def _restore_state_dtypes(found: Any, before: Any) -> Any:
    """Return a gathered state with tensors in the dtypes that they had before."""
    if isinstance(before, Mapping) and isinstance(found, MutableMapping):
        for name in before.keys() & found.keys():
            found[name] = _restore_state_dtypes(found[name], before[name])
    elif isinstance(before, Tensor) and before.dtype in _UNSENDABLE_DTYPES:
        return found.to(before.dtype) if isinstance(found, Tensor) and found.dtype == torch.int32 else found
    return found


@functools.cache
def install_registration_hooks() -> None:
    """Watch modules and parameters that any module gets, and wrap torch's distributed checkpoint functions, once."""
    register_module_module_registration_hook(_check_inner_module)
    register_module_parameter_registration_hook(_refuse_dtensor)
    wrap_distributed_checkpoint_functions()


def _check_inner_module(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    if inner is None:
        return
    if isinstance(outer, AveragedModel):
        _warn_of_narrow_averages(inner)
    if isinstance(outer, nn.parallel.DistributedDataParallel) and any(map(find_state_dict_layout, inner.parameters())):
        outer.register_forward_pre_hook(_refuse_unused_parameters)


def _warn_of_narrow_averages(averages: nn.Module) -> None:
    """Warn of averages in a narrow format: a deep copy of the model, of plain tensors, whose updates nobody sees."""
    for parameter in averages.parameters():
        payload: Any = getattr(parameter, "payload", parameter)
        if payload.dtype in _NARROW_DTYPES and not hasattr(parameter, "components"):
            remedy = (
                "halfulp.optim.EMA(model, optimizer=optimizer), or AveragedModel(copy.deepcopy(model).float(), "
                "avg_fn=get_ema_avg_fn())"
                if payload is parameter
                else "AveragedModel(halfulp.scaled.unscalify(copy.deepcopy(model)))"
            )
            warn_once_of_fallback(
                "lost updates",
                f"AveragedModel keeps its averages in {payload.dtype}, as the model its parameters: an update moves "
                f"them by mostly less than half a last place, which rounding drops; take {remedy}",
            )
            return


def _refuse_unused_parameters(wrapper: nn.Module, inputs: Any) -> None:
    """Refuse find_unused_parameters for parameters whose gradients are not plain: processes would drift apart."""
    if wrapper.find_unused_parameters and not wrapper.gradient_as_bucket_view:
        for name, parameter in wrapper.named_parameters():
            if (
                find_state_dict_layout(parameter) is not None
                and getattr(parameter, "gradients", None) != FIRST_GRADIENTS_MODE
            ):
                raise ValueError(
                    f"find_unused_parameters=True, and the gradient of {name!r} is no plain tensor, as a process has "
                    "of what it did not use: give DistributedDataParallel gradient_as_bucket_view=True too"
                )


def _refuse_dtensor(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Refuse a parameter that a parallel plan has split (a DTensor) when it is put into a module."""
    shard = getattr(parameter, "_local_tensor", None)
    if find_state_dict_layout(shard) is None:
        return
    kind = type(shard).__name__
    raise NotImplementedError(
        f"{name!r} of {type(module).__name__} is a {kind} that a parallel plan (parallelize_module, distribute_module) "
        "makes a DTensor of: its layers add and scatter plain tensors. Use DistributedDataParallel, or give the plan "
        "plain parameters (make the model again, as a part of this one may be split already)"
    )


# The name, on a parameter, of the format that `halfulp.emulate` keeps it in.
EMULATED_FORMAT_ATTRIBUTE = "_halfulp_emulated"
NameTensorPairs = Iterable[tuple[str, Tensor]]


def check_parameter_holders(named: NameTensorPairs, what: str, *, replaced: bool) -> list[nn.Module]:
    """Refuse to change parameters that other objects hold, before anything is changed; return fully_shard's modules."""
    # For these call `reset_shards` when the change is made. `what` is the caller, for messages; `replaced` is whether
    # parameters become new objects. A change of dtype in place reaches modules, optimizers, hooks and compiled graphs,
    # which are traced again, but not DistributedDataParallel, FSDP1 or others that share memory.
    names: dict[int, str] = {}
    unique = []
    for name, tensor in named:
        if names.setdefault(id(tensor), name) is name:
            unique.append((name, tensor))
    if not unique:
        return []
    for name, tensor in unique:
        if replaced and hasattr(tensor, "_local_tensor"):
            raise ValueError(
                f"parameter {name!r} is sharded (a DTensor of fully_shard or a parallel plan), which keeps it: "
                f"call {what} before sharding the model"
            )
        if replaced and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
            raise ValueError(
                f"parameter {name!r} has hooks, which would never run, as parameters become new objects: remove "
                "them (handle.remove()), and register them on the new parameter"
            )
        if tensor.device.type == "cpu" and get_local_plain_tensor(tensor) is tensor and tensor.is_shared():
            raise ValueError(
                f"parameter {name!r} lies in memory that other processes share: {what} would take it out of theirs; "
                f"call share_memory() after {what}"
            )
    for name, kind in list_parameters_held_by_optimizers(unique) if replaced else ():
        raise ValueError(
            f"{kind} holds parameter {name!r} and would train nothing, as parameters become new objects: delete "
            f"it and make the optimizer after {what}"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    flat = list_live_instances(fsdp.FullyShardedDataParallel) if fsdp and torch.distributed.is_initialized() else []
    for kind, modules in (("DistributedDataParallel", list_live_data_parallel_modules()), ("FSDP1", flat)):
        for parameter in itertools.chain.from_iterable(module.parameters() for module in modules):
            if id(parameter) in names:
                raise ValueError(
                    f"parameter {names[id(parameter)]!r} is held by {kind}, which cannot be told that it changes: "
                    f"call {what} before wrapping the model; where Lightning wraps it, "
                    "give Trainer(plugins=[Recipe('bf16-split8')]) of halfulp.integrations.lightning"
                )
    may_share = "torch.distributed.optim.zero_redundancy_optimizer" in sys.modules
    for name, kind in list_parameters_held_by_optimizers(unique) if may_share else ():
        if kind == "ZeroRedundancyOptimizer":
            raise ValueError(
                f"parameter {name!r} is held by ZeroRedundancyOptimizer, under which each rank would change its own "
                f"share alone: convert the model before, by hu.convert or model.bfloat16(), and leave out {what}"
            )
    refuse_overlapping_memory(unique, what)
    return _find_sharded_modules(unique, what)


def refuse_overlapping_memory(named: NameTensorPairs, what: str) -> None:
    """Raise for two parameters whose memory overlaps, from each one's first byte to its last."""
    lying = defaultdict(list)
    for name, tensor in named:
        if (part := get_local_plain_tensor(tensor)) is not None:
            lying[part.untyped_storage().data_ptr()].append((name, part))
    for together in lying.values():
        together.sort(key=lambda one: one[1].data_ptr())
        for (one, first), (other, second) in itertools.pairwise(together):
            if has_common_memory(first, second):
                is_same = first.data_ptr() == second.data_ptr() and first.shape == second.shape
                how = (
                    "two parameters over one memory (tied through .data)"
                    if is_same
                    else "overlapping views of one memory"
                )
                module, _, key = other.rpartition(".")
                raise ValueError(
                    f"parameters {one!r} and {other!r} are {how}: {what} would part them. Tie them by one parameter, "
                    f"as in `{module or 'head'}.{key if module else 'weight'} = "
                    f"...{one.rpartition('.')[0] or 'embedding'}.weight`, or give each its own memory (p.data = "
                    "p.data.clone())"
                )


def get_local_plain_tensor(tensor: Tensor) -> Tensor | None:
    """Return the plain strided tensor that stores a parameter (a DTensor's shard); None without memory."""
    part = getattr(tensor, "_local_tensor", tensor)
    if type(part).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return None
    if part.layout is not torch.strided or part.is_meta or nn.parameter.is_lazy(part):
        return None
    return part if part.numel() else None


def has_common_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one storage have a byte in common, what lies between a view's elements included."""
    spans = []
    for tensor in (a, b):
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    (first, end), (start, _) = sorted(spans)
    return first == start or start < end


def list_parameters_held_by_optimizers(named: NameTensorPairs) -> list[tuple[str, str]]:
    """Return the parameters that living optimizers hold, by name, with each optimizer's class."""
    names = {id(tensor): name for name, tensor in named}
    gc.collect()  # nobody may hold an optimizer any more that is still there
    return [
        (names[id(parameter)], type(optimizer).__name__)
        for optimizer in list_live_instances(torch.optim.Optimizer)
        for group in optimizer.__dict__.get("param_groups", ())
        for parameter in group["params"]
        if id(parameter) in names
    ]


def list_live_instances(kind: type) -> list[Any]:
    """Return all objects of a class, found by type, as isinstance may run code."""
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]


def list_live_data_parallel_modules() -> list[nn.parallel.DistributedDataParallel]:
    """Return every DistributedDataParallel in this process."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    return [
        module for module in list_live_instances(nn.parallel.DistributedDataParallel) if "reducer" in module.__dict__
    ]


def list_live_sharded_modules() -> list[nn.Module]:
    """Return every module of fully_shard in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else list_live_instances(fsdp.FSDPModule)


def list_shard_groups(module: nn.Module) -> list[Any]:
    """Return fully_shard's groups of parameters at a module."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]  # of FSDPModule, a base that fully_shard adds
    # torch 2.12 has one group at a module, or None.
    groups = getattr(state, "_fsdp_param_groups", (getattr(state, "_fsdp_param_group", None),))
    return [group for group in groups if group is not None]


def _find_sharded_modules(named: list[tuple[str, Tensor]], what: str) -> list[nn.Module]:
    """Return the modules of fully_shard around some parameters; refuse one that has run."""
    names = {id(tensor): name for name, tensor in named if hasattr(tensor, "_local_tensor")}
    found = []
    for module in list_live_sharded_modules() if names else ():
        held = [*module.parameters(recurse=False)]
        held += [one.sharded_param for group in list_shard_groups(module) for one in group.fsdp_params]
        mine = [names[id(tensor)] for tensor in held if id(tensor) in names]
        if mine and list_shard_groups(module):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            if getattr(state, "_is_root", None) is not None:
                raise ValueError(
                    f"parameter {mine[0]!r} is sharded by fully_shard, and the model has run: its buffers have the old "
                    f"dtype. Call {what} after fully_shard and before the first forward pass, or on the model before "
                    "fully_shard"
                )
            found.append(module)
    return found


@torch.no_grad()
def reset_shards(modules: Iterable[nn.Module]) -> None:
    """Let fully_shard read and pad the shards of modules again, as module.to() does."""
    for module in modules:
        for group in list_shard_groups(module):
            for shard in group.fsdp_params:
                shard.reset_sharded_param()


def replace_parameter_data(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter, plain or a DTensor, and its gradient, numbers of another dtype: it stays the same object."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    if hasattr(parameter, "_local_tensor"):
        # The assignment changes what autograd sees of a DTensor; its shard and its description are attributes.
        for name in ("_local_tensor", "_spec"):
            setattr(parameter, name, getattr(value, name))
    if gradient is not None:
        parameter.grad = gradient.to(value.dtype)
