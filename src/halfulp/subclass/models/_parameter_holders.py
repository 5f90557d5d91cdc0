"""Who else holds a parameter: optimizers, hooks, wrappers, views of its memory; refused, by type, before a change.

torch's global registration hooks report every module and parameter that is put into a module; `watch` installs them for
the first model whose parameters have auxiliary tensors. Nothing else sees a wrapper when it is made.

With ``broadcast_from_rank0`` torch sends each entry, and a process keeps those that bear the name of one of its
parameters or states: the auxiliary tensors beside these would be dropped, and a state that is no plain tensor would
meet a plain one in a collective. So plain tensors are sent alone, every process expects the names of its own auxiliary
tensors, and states are put together again. Low bits of 16-bit integers, which neither gloo nor NCCL takes, travel as
32-bit ones.

The order that always works: device, conversion, wrappers (DistributedDataParallel, fully_shard), torch.compile,
optimizers.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import types
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


TensorClass = TypeVar("TensorClass", bound=type[Tensor])
# The name, on a parameter, of the format that `halfulp.emulate` keeps it in.
EMULATED = "_halfulp_emulated"
Named = Iterable[tuple[str, Tensor]]


@dataclass
class Wrappers:
    """Modules of fully_shard around parameters that are narrowed, which keep their shards flat and padded."""

    sharded: list[nn.Module] = field(default_factory=list)

    def follow(self) -> None:
        """Let fully_shard read and pad the shards again, as module.to() does."""
        with torch.no_grad():
            for module in self.sharded:
                for group in shard_groups(module):
                    for shard in group.fsdp_params:
                        shard.reset_sharded_param()

    def __or__(self, other: Wrappers) -> Wrappers:
        """Return the modules of both, each once."""
        return Wrappers(list(dict.fromkeys(self.sharded + other.sharded)))


def check_holders(named: Named, what: str, *, replaced: bool) -> Wrappers:
    """Refuse to change parameters that other objects hold, before anything is changed.

    What follows a change of dtype in place: modules, tied modules, optimizers, hooks on the tensor, parametrizations,
    fully_shard that has not run, compiled graphs (they are traced again). What does not: DistributedDataParallel,
    FSDP1, memory that another parameter or process has too, and hooks on the gradient accumulator, which autograd makes
    anew. A new object is also unknown to optimizers, to fully_shard and to hooks on the tensor.

    Args:
        named: qualified names and parameters; one parameter may have several names.
        what: the caller, for messages.
        replaced: whether they become new objects; else they change their dtype in place.

    Returns:
        The modules of fully_shard: call `follow()` when the change is made.

    Raises:
        ValueError: a holder that cannot follow, with the parameter's name and what to do.
    """
    names: dict[int, str] = {}
    unique = []
    for name, tensor in named:
        if names.setdefault(id(tensor), name) is name:
            unique.append((name, tensor))
    if not unique:
        return Wrappers()
    for name, tensor in unique:
        if is_flat_parameter(tensor):
            _refuse_wrapped(name, "FullyShardedDataParallel (FSDP1)", what)
        if replaced and hasattr(tensor, "_local_tensor"):
            raise ValueError(
                f"parameter {name!r} is sharded (a DTensor of fully_shard or a parallel plan), which keeps it: "
                f"call {what} before sharding the model"
            )
        if replaced:
            check_hooks(name, tensor)
        _check_accumulator(name, tensor, what)
    for name, kind in holding_optimizers(unique) if replaced else ():
        raise ValueError(
            f"{kind} holds parameter {name!r} and would train nothing, as parameters become new objects: delete "
            f"it and make the optimizer after {what}"
        )
    for kind, modules in (("DistributedDataParallel", data_parallel_modules()), ("FSDP1", _flat_modules())):
        for module in modules:
            for parameter in module.parameters():
                if id(parameter) in names:
                    _refuse_wrapped(names[id(parameter)], kind, what)
    check_overlaps(unique, what)
    _check_memory(unique, what)
    return _sharded_around(unique, what)


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


def check_hooks(name: str, tensor: Tensor) -> None:
    """Raise for a parameter with hooks, which belong to the tensor that is about to be replaced."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, kind, None):
            raise ValueError(
                f"parameter {name!r} has hooks, which would never run, as parameters become new objects: remove "
                "them (handle.remove()), and register them on the new parameter"
            )


def _check_accumulator(name: str, tensor: Tensor, what: str) -> None:
    """Raise where Python holds the node that accumulates a parameter's gradient, which a change of dtype replaces.

    A graph that an earlier forward pass left may hold it too: its gradients still arrive, in the old dtype.
    """
    if not (tensor.requires_grad and tensor.is_leaf):
        return
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    if sys.getrefcount(node) > 2 and any(type(x) is not types.FrameType for x in gc.get_referrers(node)):
        raise ValueError(
            f"the gradient accumulator (AccumulateGrad) of parameter {name!r} is held from outside, by a hook "
            f"for instance: autograd makes another after {what}, and the hook would never run. Register it "
            f"after {what}, or use parameter.register_post_accumulate_grad_hook"
        )


def check_overlaps(named: Named, what: str) -> None:
    """Raise for two parameters whose memory overlaps, from each one's first byte to its last.

    Raises:
        ValueError: the names of both, and how to tie modules by one parameter.
    """
    lying = defaultdict(list)
    for name, tensor in named:
        if (part := plain_memory(tensor)) is not None:
            lying[part.untyped_storage().data_ptr()].append((name, part))
    for together in lying.values():
        together.sort(key=lambda one: one[1].data_ptr())
        for (one, first), (other, second) in itertools.pairwise(together):
            if overlap(first, second):
                raise ValueError(_refuse_tied(one, other, first, second, what))


def _refuse_tied(one: str, other: str, first: Tensor, second: Tensor, what: str) -> str:
    same = (first.data_ptr(), first.shape, first.stride()) == (second.data_ptr(), second.shape, second.stride())
    how = f"two parameters over one memory (tied through .data): {what} would untie them"
    if not same:
        how = f"overlapping views of one memory: {what} would part them"
    module, _, key = other.rpartition(".")
    return (
        f"parameters {one!r} and {other!r} are {how}. Tie them by one parameter, as in `{module or 'head'}."
        f"{key if module else 'weight'} = ...{one.rpartition('.')[0] or 'embedding'}.weight`, or give each its own "
        "memory (p.data = p.data.clone())"
    )


def plain_memory(tensor: Tensor) -> Tensor | None:
    """Return the plain strided tensor that stores a parameter (a DTensor's shard); None without memory."""
    part = getattr(tensor, "_local_tensor", tensor)
    if type(part).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return None
    if part.layout is not torch.strided or part.is_meta or nn.parameter.is_lazy(part):
        return None
    return part if part.numel() else None


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one storage have a byte in common, what lies between a view's elements included."""
    (first, end), (start, _) = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in (a, b))
    return first == start or start < end


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _check_memory(named: list[tuple[str, Tensor]], what: str) -> None:
    """Raise for memory that other processes, a parameter elsewhere or a flat buffer have too."""
    # Shards lie in the padded memory of fully_shard, which follows.
    plain = ((name, tensor) for name, tensor in named if not hasattr(tensor, "_local_tensor"))
    parts = [(name, part) for name, tensor in plain if (part := plain_memory(tensor)) is not None]
    lying = defaultdict(list)
    for name, part in parts:
        lying[part.untyped_storage().data_ptr()].append((name, part))
        if part.device.type == "cpu" and part.is_shared():
            raise ValueError(
                f"parameter {name!r} lies in memory that other processes share: {what} would take it out of theirs; "
                f"call share_memory() after {what}"
            )
    own = {id(tensor) for pairs in (named, parts) for _, tensor in pairs}

    def find() -> str | None:
        for x in living(Tensor):
            if id(x) in own or (other := plain_memory(x)) is None:
                continue
            try:
                held = lying.get(other.untyped_storage().data_ptr(), ())
            except RuntimeError:  # zeros that are not written out, and other storages without memory
                continue
            for name, part in held:
                if isinstance(x, nn.Parameter) and overlap(part, other):
                    return _refuse_tied(name, _name_of(x), part, other, what)
                if other.numel() > part.numel() and overlap(part, other):
                    return (
                        f"parameter {name!r} is a view into a tensor of shape {tuple(other.shape)} that is still "
                        f"held (a flat buffer, as apex and vector_to_parameters make): {what} would leave that one "
                        "behind. Call it before the buffer is made, or give the parameter its own memory "
                        "(p.data = p.data.clone())"
                    )
        return None

    if (message := _find_beyond_garbage(find)) is not None:
        raise ValueError(message)


def _name_of(parameter: Tensor) -> str:
    """Return the name that a module has for a parameter."""
    for module in living_modules():
        for key, value in module._parameters.items():
            if value is parameter:
                return f"{type(module).__name__}.{key}"
    return f"another Parameter of shape {tuple(parameter.shape)}"


def holding_optimizers(named: Named) -> list[tuple[str, str]]:
    """Return the parameters that living optimizers hold, by name, with each optimizer's class."""
    names = {id(tensor): name for name, tensor in named}

    def find() -> list[tuple[str, str]]:
        groups = (
            (type(optimizer).__name__, group)
            for optimizer in living(torch.optim.Optimizer)
            for group in optimizer.__dict__.get("param_groups", ())
        )
        return [(names[id(p)], kind) for kind, group in groups for p in group["params"] if id(p) in names]

    return _find_beyond_garbage(find) or []


def living(kind: type) -> list[Any]:
    """Return all objects of a class, found by type, as isinstance may run code."""
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]


def living_modules() -> list[nn.Module]:
    """Return every module in this process."""
    return [module for module in living(nn.Module) if "_parameters" in module.__dict__]


def data_parallel_modules() -> list[nn.parallel.DistributedDataParallel]:
    """Return every DistributedDataParallel in this process."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    return [module for module in living(nn.parallel.DistributedDataParallel) if "reducer" in module.__dict__]


def _flat_modules() -> list[nn.Module]:
    """Return every module of FSDP1 in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None or not torch.distributed.is_initialized() else living(fsdp.FullyShardedDataParallel)


def sharded_modules() -> list[nn.Module]:
    """Return every module of fully_shard in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else living(fsdp.FSDPModule)


def _find_beyond_garbage(find: Callable[[], Any]) -> Any:
    """Return what `find` finds; if it finds something, find again after garbage collection."""
    if not find():
        return None
    gc.collect()
    return find()


def is_flat_parameter(tensor: object) -> bool:
    """Return whether a parameter is a flat one, which FSDP1 made of many."""
    return bool(getattr(tensor, "_is_flat_param", False))


def shard_groups(module: nn.Module) -> list[Any]:
    """fully_shard's groups of parameters at a module."""
    state = _fsdp_state(module)
    # torch 2.12 has one group at a module, or None.
    groups = getattr(state, "_fsdp_param_groups", (getattr(state, "_fsdp_param_group", None),))
    return [group for group in groups if group is not None]


def _fsdp_state(module: nn.Module) -> Any:
    state_of: Any = module._get_fsdp_state  # of FSDPModule, which fully_shard adds to the bases of the module's class
    return state_of()


def _sharded_around(named: list[tuple[str, Tensor]], what: str) -> Wrappers:
    """Return the modules of fully_shard around some parameters.

    Raises:
        ValueError: one that has run: its buffers for gathering have the old dtype.
    """
    names = {id(tensor): name for name, tensor in named if hasattr(tensor, "_local_tensor")}
    found = Wrappers()
    for module in sharded_modules() if names else ():
        held = [*module.parameters(recurse=False)]
        held += [one.sharded_param for group in shard_groups(module) for one in group.fsdp_params]
        mine = [names[id(tensor)] for tensor in held if id(tensor) in names]
        if mine and shard_groups(module):
            if getattr(_fsdp_state(module), "_is_root", None) is not None:
                raise ValueError(
                    f"parameter {mine[0]!r} is sharded by fully_shard, and the model has run: its buffers have the old "
                    f"dtype. Call {what} after fully_shard and before the first forward pass, or on the model before "
                    "fully_shard"
                )
            found.sharded.append(module)
    return found


def replace_data(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter numbers of another dtype, in place: it stays the object that others hold.

    A gradient that waits for a step is cast to that dtype.

    Args:
        parameter: plain, or a DTensor.
        value: of the parameter's shape and kind.
    """
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    if hasattr(parameter, "_local_tensor"):
        # The assignment changes what autograd sees of a DTensor; its shard and its description are attributes.
        for name in ("_local_tensor", "_spec"):
            setattr(parameter, name, getattr(value, name))
    if gradient is not None:
        parameter.grad = gradient.to(value.dtype)


def refuses_fully_shard(kind: TensorClass) -> TensorClass:
    """Add attributes to a tensor class by which fully_shard refuses it with a message (a decorator)."""
    # It asks for the first one before it changes a parameter, and older versions for the others after that.
    for name in ("_fsdp_orig_uid", "fsdp_pre_all_gather", "fsdp_post_all_gather"):
        setattr(kind, name, property(_refuse_fully_shard))
    return kind


def _refuse_fully_shard(tensor: Tensor) -> NoReturn:
    """Refuse fully_shard: the property that it finds on a tensor subclass in place of its own attributes.

    Raises:
        NotImplementedError: always.
    """
    name = type(tensor).__name__
    raise NotImplementedError(
        f"fully_shard of {name} parameters: it gathers and reduces one plain tensor per parameter, and these have "
        "several. Use DistributedDataParallel, or shard plain parameters of a model made again (param_dtype= of "
        "hu.optim and hu.AdaptiveGradScaler work with fully_shard)"
    )
