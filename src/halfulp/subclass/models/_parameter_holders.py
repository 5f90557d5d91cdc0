"""Who else holds a parameter: optimizers, hooks, wrappers; refused, by type, before a change.

The order that always works: device, conversion, wrappers (DistributedDataParallel, fully_shard), torch.compile,
optimizers, flat buffers and hooks on nodes of autograd, of which nothing is seen here.

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
import gc
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..._torch_import import call_after_import
from ...kernels import untraced
from .._in_backward import FIRST
from ._state_dict import find_state_dict_layout, get_known_layout

_UNSENDABLE_DTYPES = (torch.int16, torch.uint16)
_wrapped_checkpoints: list[bool] = []


def wrap_checkpoint_functions() -> None:
    """Wrap torch's checkpoint functions, now or as soon as torch imports them."""
    if not _wrapped_checkpoints:
        _wrapped_checkpoints.append(True)
        call_after_import("torch.distributed.checkpoint.state_dict", _wrap_module_functions)


def _wrap_module_functions(module: ModuleType) -> None:
    for name, completed in (
        ("_load_model_state_dict", functools.partial(_load_full_names, module._get_fqns)),
        ("_gather_state_dict", _gather_states),
        ("_distribute_state_dict", _distribute_states),
        ("_broadcast_state_dict", _broadcast_states),
        ("_unflatten_optim_state_dict", _unflatten_states),
    ):
        setattr(module, name, functools.partial(completed, getattr(module, name)))


# Names -------------------------------------------------------------------------------------------------------------


def _load_full_names(
    names_without_prefixes: Callable[..., set[str]],
    plain: Callable,
    model: nn.Module,
    state_dict: MutableMapping[str, Any],
    *given: Any,
    **options: Any,
) -> Any:
    """Rename auxiliary entries to the prefixed names of their parameters.

    torch takes ``module.`` (DistributedDataParallel) and ``_orig_mod.`` (torch.compile) out of names when it saves, and
    puts them before parameters and buffers alone when it loads.
    """
    for name, parameter in _list_own_parameters(model):
        suffix = get_known_layout(parameter).suffix
        # Without those of checkpoint wrappers, whose own hooks put them before every entry.
        long = names_without_prefixes(model, name, skip_ddp_prefix=False, skip_compiler_prefix=False)
        for short, full in zip(names_without_prefixes(model, name), long):
            if short == full:
                continue
            for entry in [entry for entry in state_dict if suffix.sub("", entry) == short != entry]:
                state_dict[full + entry.removeprefix(short)] = state_dict.pop(entry)
    return plain(model, state_dict, *given, **options)


# Gathering, and cutting into shards -------------------------------------------------------------------------------


def _gather_states(plain: Callable, state_dict: dict[str, Any], *given: Any, **options: Any) -> dict[str, Any]:
    return _restore_dtypes(plain(_convert_to_sendable(state_dict), *given, **options), state_dict)


def _distribute_states(
    plain: Callable, full: Mapping[str, Any], local: MutableMapping[str, Any], *given: Any, **options: Any
) -> None:
    before = dict(local)
    plain(_convert_to_sendable(full), local, *given, **options)
    _restore_dtypes(local, before)


def _convert_to_sendable(value: Any) -> Any:
    """Return a state with tensors of dtypes that processes cannot send as int32."""
    if isinstance(value, Mapping):
        parts = {name: _convert_to_sendable(part) for name, part in value.items()}
        return parts if any(parts[name] is not part for name, part in value.items()) else value
    return value.to(torch.int32) if isinstance(value, Tensor) and value.dtype in _UNSENDABLE_DTYPES else value


def _restore_dtypes(found: Any, before: Any) -> Any:
    """Return a gathered state with tensors in the dtypes that they had before."""
    if isinstance(before, Mapping) and isinstance(found, MutableMapping):
        for name in before.keys() & found.keys():
            found[name] = _restore_dtypes(found[name], before[name])
    elif isinstance(before, Tensor) and before.dtype in _UNSENDABLE_DTYPES:
        return found.to(before.dtype) if isinstance(found, Tensor) and found.dtype == torch.int32 else found
    return found


# Flat states ------------------------------------------------------------------------------------------------------


def _unflatten_states(plain: Callable, optim: Any, state_dict: Mapping[str, Any], *given: Any, **options: Any) -> Any:
    try:
        return plain(optim, state_dict, *given, **options)
    except KeyError as error:
        if not hasattr(optim, "float32_state_dict") or not str(error).startswith(("'state.", "'param_groups.")):
            raise
        raise ValueError(
            f"the flat state lacks {error}: it is of another model or optimizer, of one with other options, or of one "
            "made from model.named_parameters() where this one was made from model.parameters(), or the other way "
            "round: load it into one made alike, whose state_dict() any of them takes"
        ) from error


# Sending ----------------------------------------------------------------------------------------------------------


def _broadcast_states(
    plain: Callable, full: MutableMapping[str, Any], local: MutableMapping[str, Any], *given: Any, **options: Any
) -> None:
    before = dict(local)
    own = {name: value for name, value in local.items() if find_state_dict_layout(value) is not None}
    expected = {}
    for name, value in own.items():
        entries = get_known_layout(value).entries(name, value.detach())
        expected[name] = {entry: part for entry, part in entries.items() if entry not in local}
    for beside in expected.values():
        local.update(beside)
    plain(_convert_to_sendable(_split_into_entries(full, own)), local, *given, **options)
    for name, beside in expected.items():
        # What is as it was has not been sent: the first process's entry is a plain tensor.
        unsent = [entry for entry, part in beside.items() if local.get(entry) is part]
        for entry in unsent:
            del local[entry]
        if name in local and not isinstance(own[name], nn.Parameter):  # which modules put together
            local[name] = _join_entries(local, name, beside, own[name])
    _restore_dtypes(local, before)


def _split_into_entries(full: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a state of plain tensors only: one entry for each auxiliary tensor, values where this process has none."""
    parted: dict[str, Any] = {}
    for name, value in full.items():
        layout = find_state_dict_layout(value)
        if layout is None:
            parted[name] = value
        elif name in own:
            parted |= layout.entries(name, value.detach())
        else:
            parted[name] = value.detach().decode()
    return parted


def _join_entries(local: MutableMapping[str, Any], name: str, beside: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return a tensor like a given one, made of the entries that were sent."""
    entries = {name: local[name], **{entry: local.pop(entry) for entry in beside if entry in local}}
    return get_known_layout(like).fitting({entry: part.to(like.device) for entry, part in entries.items()}, name, like)


_registration_hooks: list[Any] = []


def install_registration_hooks() -> None:
    """Install the registration hooks, once."""
    if not _registration_hooks:
        _registration_hooks.append(register_module_module_registration_hook(_hook_data_parallel))
        _registration_hooks.append(register_module_parameter_registration_hook(_refuse_dtensor))
        wrap_checkpoint_functions()


def _hook_data_parallel(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    if (
        isinstance(outer, nn.parallel.DistributedDataParallel)
        and inner is not None
        and any(_list_own_parameters(inner))
    ):
        outer.register_forward_hook(_complete_unused_gradients)


def _list_own_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    pairs = module.named_parameters(remove_duplicate=False)
    return ((name, parameter) for name, parameter in pairs if find_state_dict_layout(parameter) is not None)


def _complete_unused_gradients(wrapper: nn.Module, inputs: Any, output: Any) -> None:
    """Give parameters that this process did not use the gradient class that other processes have.

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
            _complete_plain_gradients(wrapper)

    def begin(gradient: Tensor) -> None:
        if not queued:
            queued.append(True)
            engine.queue_callback(lambda: after(2))

    for x in nn.parallel.distributed._find_tensors(output):
        if x.requires_grad:
            x.register_hook(begin)


def _complete_plain_gradients(wrapper: nn.Module) -> None:
    with torch.no_grad():
        for _, parameter in _list_own_parameters(wrapper):
            plain = parameter.grad
            if type(plain) is Tensor and getattr(parameter, "gradients", None) != FIRST:
                gradient = torch.zeros_like(parameter.detach())
                gradient.copy_(plain)
                parameter.grad = gradient


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


TensorClass = TypeVar("TensorClass", bound=type[Tensor])
# The name, on a parameter, of the format that `halfulp.emulate` keeps it in.
EMULATED = "_halfulp_emulated"
NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass
class Wrappers:
    """Modules of fully_shard around parameters that are narrowed, which keep their shards flat and padded."""

    sharded: list[nn.Module] = field(default_factory=list)

    def follow(self) -> None:
        """Let fully_shard read and pad the shards again, as module.to() does."""
        with torch.no_grad():
            for module in self.sharded:
                for group in list_shard_groups(module):
                    for shard in group.fsdp_params:
                        shard.reset_sharded_param()

    def __or__(self, other: Wrappers) -> Wrappers:
        """Return the modules of both, each once."""
        return Wrappers(list(dict.fromkeys(self.sharded + other.sharded)))


def check_holders(named: NamedTensors, what: str, *, replaced: bool) -> Wrappers:
    """Refuse to change parameters that other objects hold, before anything is changed.

    What follows a change of dtype in place: modules, tied modules, optimizers, hooks on the tensor, parametrizations,
    fully_shard that has not run, compiled graphs (they are traced again). What does not: DistributedDataParallel,
    FSDP1, and memory that another of the parameters or a process has too. A new object is also unknown to optimizers,
    to fully_shard and to hooks on the tensor.

    Args:
        named: qualified names and parameters; one parameter may have several names.
        what: the caller, for messages.
        replaced: whether they become new objects; else they change their dtype in place.

    Returns:
        The modules of fully_shard: call `follow()` when the change is made.
    """
    names: dict[int, str] = {}
    unique = []
    for name, tensor in named:
        if names.setdefault(id(tensor), name) is name:
            unique.append((name, tensor))
    if not unique:
        return Wrappers()
    for name, tensor in unique:
        if getattr(tensor, "_is_flat_param", False):
            _refuse_wrapped(name, "FullyShardedDataParallel (FSDP1)", what)
        if replaced and hasattr(tensor, "_local_tensor"):
            raise ValueError(
                f"parameter {name!r} is sharded (a DTensor of fully_shard or a parallel plan), which keeps it: "
                f"call {what} before sharding the model"
            )
        if replaced:
            refuse_hooked_parameter(name, tensor)
        if tensor.device.type == "cpu" and get_plain_memory(tensor) is tensor and tensor.is_shared():
            raise ValueError(
                f"parameter {name!r} lies in memory that other processes share: {what} would take it out of theirs; "
                f"call share_memory() after {what}"
            )
    for name, kind in list_holding_optimizers(unique) if replaced else ():
        raise ValueError(
            f"{kind} holds parameter {name!r} and would train nothing, as parameters become new objects: delete "
            f"it and make the optimizer after {what}"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    flat = living(fsdp.FullyShardedDataParallel) if fsdp is not None and torch.distributed.is_initialized() else []
    for kind, modules in (("DistributedDataParallel", list_data_parallel_modules()), ("FSDP1", flat)):
        for module in modules:
            for parameter in module.parameters():
                if id(parameter) in names:
                    _refuse_wrapped(names[id(parameter)], kind, what)
    refuse_overlapping_memory(unique, what)
    return _find_sharded_modules(unique, what)


def _refuse_wrapped(name: str, kind: str, what: str) -> NoReturn:
    trainer = ""
    if {"lightning.pytorch", "pytorch_lightning"} & sys.modules.keys():
        trainer = (
            ". Lightning wraps the module before configure_optimizers: from halfulp.integrations.lightning import "
            "Recipe, and give Trainer(plugins=[Recipe('bf16-split8')]), which converts it before that"
        )
    raise ValueError(
        f"parameter {name!r} is held by {kind}, which cannot be told that it changes: call {what} before wrapping the "
        f"model{trainer}"
    )


def refuse_hooked_parameter(name: str, tensor: Tensor) -> None:
    """Raise for a parameter with hooks, which belong to the tensor that is about to be replaced."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, kind, None):
            raise ValueError(
                f"parameter {name!r} has hooks, which would never run, as parameters become new objects: remove "
                "them (handle.remove()), and register them on the new parameter"
            )


def refuse_overlapping_memory(named: NamedTensors, what: str) -> None:
    """Raise for two parameters whose memory overlaps, from each one's first byte to its last."""
    lying = defaultdict(list)
    for name, tensor in named:
        if (part := get_plain_memory(tensor)) is not None:
            lying[part.untyped_storage().data_ptr()].append((name, part))
    for together in lying.values():
        together.sort(key=lambda one: one[1].data_ptr())
        for (one, first), (other, second) in itertools.pairwise(together):
            if overlap(first, second):
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


def get_plain_memory(tensor: Tensor) -> Tensor | None:
    """Return the plain strided tensor that stores a parameter (a DTensor's shard); None without memory."""
    part = getattr(tensor, "_local_tensor", tensor)
    if type(part).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return None
    if part.layout is not torch.strided or part.is_meta or nn.parameter.is_lazy(part):
        return None
    return part if part.numel() else None


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one storage have a byte in common, what lies between a view's elements included."""
    (first, end), (start, _) = sorted((t.data_ptr(), t.data_ptr() + _count_spanned_bytes(t)) for t in (a, b))
    return first == start or start < end


def _count_spanned_bytes(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def list_holding_optimizers(named: NamedTensors) -> list[tuple[str, str]]:
    """Return the parameters that living optimizers hold, by name, with each optimizer's class."""
    names = {id(tensor): name for name, tensor in named}

    def find() -> list[tuple[str, str]]:
        return [
            (names[id(parameter)], type(optimizer).__name__)
            for optimizer in living(torch.optim.Optimizer)
            for group in optimizer.__dict__.get("param_groups", ())
            for parameter in group["params"]
            if id(parameter) in names
        ]

    if not find():
        return []
    gc.collect()  # nobody may hold that optimizer any more
    return find()


def living(kind: type) -> list[Any]:
    """Return all objects of a class, found by type, as isinstance may run code."""
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]


def list_living_modules() -> list[nn.Module]:
    """Return every module in this process."""
    return [module for module in living(nn.Module) if "_parameters" in module.__dict__]


def list_data_parallel_modules() -> list[nn.parallel.DistributedDataParallel]:
    """Return every DistributedDataParallel in this process."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    return [module for module in living(nn.parallel.DistributedDataParallel) if "reducer" in module.__dict__]


def list_sharded_modules() -> list[nn.Module]:
    """Return every module of fully_shard in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else living(fsdp.FSDPModule)


def list_shard_groups(module: nn.Module) -> list[Any]:
    """fully_shard's groups of parameters at a module."""
    state = _read_fsdp_state(module)
    # torch 2.12 has one group at a module, or None.
    groups = getattr(state, "_fsdp_param_groups", (getattr(state, "_fsdp_param_group", None),))
    return [group for group in groups if group is not None]


def _read_fsdp_state(module: nn.Module) -> Any:
    state_of: Any = module._get_fsdp_state  # of FSDPModule, which fully_shard adds to the bases of the module's class
    return state_of()


def _find_sharded_modules(named: list[tuple[str, Tensor]], what: str) -> Wrappers:
    """Return the modules of fully_shard around some parameters.

    Raises:
        ValueError: one that has run: its buffers for gathering have the old dtype.
    """
    names = {id(tensor): name for name, tensor in named if hasattr(tensor, "_local_tensor")}
    found = Wrappers()
    for module in list_sharded_modules() if names else ():
        held = [*module.parameters(recurse=False)]
        held += [one.sharded_param for group in list_shard_groups(module) for one in group.fsdp_params]
        mine = [names[id(tensor)] for tensor in held if id(tensor) in names]
        if mine and list_shard_groups(module):
            if getattr(_read_fsdp_state(module), "_is_root", None) is not None:
                raise ValueError(
                    f"parameter {mine[0]!r} is sharded by fully_shard, and the model has run: its buffers have the old "
                    f"dtype. Call {what} after fully_shard and before the first forward pass, or on the model before "
                    "fully_shard"
                )
            found.sharded.append(module)
    return found


def replace_parameter_data(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter, plain or a DTensor, numbers of another dtype, in place: it stays the object that others hold.

    A gradient that waits for a step is cast to that dtype.
    """
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    if hasattr(parameter, "_local_tensor"):
        # The assignment changes what autograd sees of a DTensor; its shard and its description are attributes.
        for name in ("_local_tensor", "_spec"):
            setattr(parameter, name, getattr(value, name))
    if gradient is not None:
        parameter.grad = gradient.to(value.dtype)


def refuse_fully_shard_for(kind: TensorClass) -> TensorClass:
    """Add attributes to a tensor class by which fully_shard refuses it with a message (a decorator)."""
    # It asks for the first one before it changes a parameter, and older versions for the others after that.
    for name in ("_fsdp_orig_uid", "fsdp_pre_all_gather", "fsdp_post_all_gather"):
        setattr(kind, name, property(_refuse_fully_shard))
    return kind


def _refuse_fully_shard(tensor: Tensor) -> NoReturn:
    """Refuse fully_shard: the property that it finds on a tensor subclass in place of its own attributes."""
    name = type(tensor).__name__
    raise NotImplementedError(
        f"fully_shard of {name} parameters: it gathers and reduces one plain tensor per parameter, and these have "
        "several. Use DistributedDataParallel, or shard plain parameters of a model made again (param_dtype= of "
        "hu.optim and hu.AdaptiveGradScaler work with fully_shard)"
    )
