"""Who else holds a parameter: optimizers, hooks, wrappers, views of its memory; refused, by type, before a change.

The order that always works: device, conversion, wrappers (DistributedDataParallel, fully_shard), torch.compile,
optimizers.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

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


def named_beside(key: int) -> list[tuple[str, Tensor]]:
    """Return the named parameters of the outermost living module that holds a parameter, by its id; else none."""
    modules = living_modules()
    holders = [module for module in modules if any(id(value) == key for value in module._parameters.values())]
    parents = {id(child): module for module in modules for child in module._modules.values()}
    for module in holders:
        passed = set()
        while id(module) in parents and id(module) not in passed:
            passed.add(id(module))
            module = parents[id(module)]
        named: list[tuple[str, Tensor]] = list(module.named_parameters(remove_duplicate=False))
        if any(id(value) == key for _, value in named):
            return named
    return []


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
