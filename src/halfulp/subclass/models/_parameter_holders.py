"""Refusing to narrow or replace a parameter that others hold: optimizers, hooks, views of its memory."""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ._data_parallel import Wrappers, find_wrappers, is_flat_parameter, use_count

# The name, on a parameter, of the format that `halfulp.emulate` keeps it in.
EMULATED = "_halfulp_emulated"
Named = Iterable[tuple[str, Tensor]]


def check_holders(named: Named, what: str, *, replaced: bool, known: int = 0) -> Wrappers:
    """Refuse to change parameters that other objects hold, before anything is changed.

    What follows a change of dtype in place: modules, tied modules, optimizers, hooks on the tensor, parametrizations,
    compiled graphs (they are traced again). What does not: a second Parameter or a flat buffer over the same memory,
    other processes that share it, and hooks on the gradient accumulator, which autograd makes anew. A new object is
    also unknown to optimizers and to hooks on the tensor.

    Args:
        named: qualified names and parameters; one parameter may have several names.
        what: the caller, for messages.
        replaced: whether they become new objects; else they change their dtype in place.
        known: how many references the caller and its model have to the tensor of each pair, beside the pair.

    Returns:
        The distributed wrappers that must be told: call `follow()` on it when the change is made.

    Raises:
        ValueError: a holder that cannot follow, with the parameter's name and what to do.
    """
    named = list(named)
    held_by_others = replaced and _held_by_others(named, known)
    names: dict[int, str] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), name)
        tensors.setdefault(id(tensor), tensor)
    unique = [(names[key], tensor) for key, tensor in tensors.items()]
    for name, tensor in unique:
        if is_flat_parameter(tensor):
            raise ValueError(
                f"parameter {name!r} is a flat parameter of FullyShardedDataParallel (FSDP1), whose views would keep "
                f"the old numbers: call {what} before wrapping, or use fully_shard (FSDP2)"
            )
    check_overlaps(unique, what)
    _check_outside_memory(unique, what)
    if replaced:
        for name, tensor in unique:
            check_hooks(name, tensor)
        if held_by_others:
            _check_optimizers(named, what)
    wrappers = find_wrappers(unique, what, replaced)
    _check_accumulators(unique, what, wrappers)
    return wrappers


def check_hooks(name: str, tensor: Tensor) -> None:
    """Raise for a parameter with hooks, which belong to the tensor that is about to be replaced."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, kind, None):
            raise ValueError(
                f"parameter {name!r} has hooks, which would never run, as parameters become new objects: remove "
                "them (handle.remove()), and register them on the new parameter"
            )


def check_overlaps(named: Named, what: str) -> None:
    """Raise for two parameters that lie in one memory, wholly or in part.

    Raises:
        ValueError: the names of both, and how to tie modules by one parameter.
    """
    lying = defaultdict(list)
    for name, tensor in named:
        if (part := plain_memory(tensor)) is not None:
            lying[part.untyped_storage().data_ptr()].append((part.data_ptr(), name, part))
    for together in lying.values():
        together.sort(key=lambda one: one[0])
        reached: list[tuple[int, str, Tensor]] = []
        for begin, name, part in together:
            reached = [one for one in reached if one[0] > begin]
            for _, other, first in reached:
                if overlap(first, part):
                    raise ValueError(_tied(other, name, first, part, what))
            reached.append((begin + _extent(part), name, part))


def _tied(one: str, other: str, first: Tensor, second: Tensor, what: str) -> str:
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
    """Return whether two tensors of one storage have an element in common."""
    start = min(a.data_ptr(), b.data_ptr())
    size = max(t.data_ptr() - start + _extent(t) for t in (a, b))
    if a.is_contiguous() and b.is_contiguous():
        return max(a.data_ptr(), b.data_ptr()) < min(t.data_ptr() + _extent(t) for t in (a, b))
    touched = torch.zeros(size, dtype=torch.int8, device="cpu")
    for tensor in (a, b):
        # Byte by byte, as the two may have other dtypes.
        width = tensor.element_size()
        strides = [step * width for step in tensor.stride()] + [1]
        view = touched.as_strided([*tensor.shape, width], strides, tensor.data_ptr() - start)
        if bool(view.any()):
            return True
        view.fill_(1)
    return False


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _check_outside_memory(named: list[tuple[str, Tensor]], what: str) -> None:
    """Raise for memory that is shared with a parameter or a buffer that the caller does not know."""
    # Shards lie in the padded memory of fully_shard, which follows.
    plain = ((name, tensor) for name, tensor in named if not hasattr(tensor, "_local_tensor"))
    parts = [(name, part) for name, tensor in plain if (part := plain_memory(tensor)) is not None]
    for name, part in parts:
        if part.device.type == "cpu" and part.is_shared():
            raise ValueError(
                f"parameter {name!r} lies in memory that other processes share: {what} would take it out of theirs; "
                f"call share_memory() after {what}"
            )
    sharing = Counter(part.untyped_storage().data_ptr() for _, part in parts)
    alone = _storage_uses(torch.empty(1, dtype=torch.float32, device="cpu"))
    storages = {part.untyped_storage().data_ptr(): _storage_uses(part) for _, part in parts}
    suspect = {key for key, uses in storages.items() if uses - alone > sharing[key] - 1}
    if not suspect:
        return
    own = {id(tensor) for pairs in (named, parts) for _, tensor in pairs}
    mine = defaultdict(list)
    for name, part in parts:
        if (key := part.untyped_storage().data_ptr()) in suspect:
            mine[key].append((name, part))

    def find() -> str | None:
        for x in _living(Tensor):
            other = None if id(x) in own else plain_memory(x)
            if other is None:
                continue
            for name, part in mine.get(other.untyped_storage().data_ptr(), ()):
                if overlap(part, other):
                    if isinstance(x, nn.Parameter) and not is_flat_parameter(x):
                        return _tied(name, _name_of(x), part, other, what)
                    if other.numel() > part.numel():
                        return (
                            f"parameter {name!r} is a view into a tensor of shape {tuple(other.shape)} that is still "
                            f"held (a flat buffer, as FSDP1, apex and vector_to_parameters make): {what} would leave "
                            "that one behind. Call it before the buffer is made, or give the parameter its own memory "
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


def _storage_uses(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _name_of(parameter: Tensor) -> str:
    """Return the name that a module has for a parameter."""
    for module in living_modules():
        for key, value in module._parameters.items():
            if value is parameter:
                return f"{type(module).__name__}.{key}"
    return f"another Parameter of shape {tuple(parameter.shape)}"


def _held_by_others(named: list[tuple[str, Tensor]], known: int) -> bool:
    """Whether any of some tensors has more references than the caller's: else the heap need not be searched."""

    def references(pairs: list[tuple[str, Tensor]]) -> dict[int, int]:
        return {id(tensor): sys.getrefcount(tensor) for _, tensor in pairs}

    (alone,) = references([("", nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu")))]).values()
    places = Counter(id(tensor) for _, tensor in named)
    counts = references(named).items()
    return any(count > alone + places[key] - 1 + known * places[key] for key, count in counts)


def _check_optimizers(named: Named, what: str) -> None:
    """Raise if an optimizer holds one of these parameters: it would go on stepping tensors that no model has."""
    for optimizer, name in holding_optimizers(named):
        raise ValueError(
            f"{optimizer} holds parameter {name!r} and would train nothing, as parameters become new objects: delete "
            f"it and make the optimizer after {what}"
        )


def holding_optimizers(named: Named) -> list[tuple[str, str]]:
    """The classes of living optimizers that hold any of some parameters, with the name of each."""
    names = {id(tensor): name for name, tensor in named}

    def find() -> list[tuple[str, str]]:
        groups = (
            (type(optimizer).__name__, group)
            for optimizer in _living(torch.optim.Optimizer)
            for group in optimizer.__dict__.get("param_groups", ())
        )
        return [(kind, names[id(p)]) for kind, group in groups for p in group["params"] if id(p) in names]

    return _find_beyond_garbage(find) or []


def _check_accumulators(named: Named, what: str, wrappers: Wrappers) -> None:
    """Raise where Python holds the node that accumulates a parameter's gradient, which a change of dtype replaces.

    A graph that an earlier forward pass left may hold it too: its gradients still arrive, in the old dtype.
    """
    alone, followed = (
        use_count(nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))),
        wrappers.parameters(),
    )
    suspects = [
        (name, torch.autograd.graph.get_gradient_edge(tensor).node)
        for name, tensor in named
        if tensor.requires_grad and tensor.is_leaf and use_count(tensor) > alone and id(tensor) not in followed
    ]
    names = {id(node): name for name, node in suspects}
    holders = gc.get_referrers(*(node for _, node in suspects)) if suspects else ()
    held = {id(node) for holder in holders if not _is_pair(holder, suspects) for node in gc.get_referents(holder)}
    for key in held & names.keys():
        raise ValueError(
            f"the gradient accumulator (AccumulateGrad) of parameter {names[key]!r} is held from outside, by a hook "
            f"for instance: autograd makes another after {what}, and the hook would never run. Register it "
            f"after {what}, or use parameter.register_post_accumulate_grad_hook"
        )


def _is_pair(holder: object, pairs: list[tuple]) -> bool:
    return any(holder is pair for pair in pairs)


def living_modules() -> list[nn.Module]:
    """Every module in this process."""
    return [module for module in _living(nn.Module) if "_parameters" in module.__dict__]


def _living(kind: type) -> list:
    """Return all objects of a class that the garbage collector tracks, found by type, as isinstance may run code."""
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]


def _find_beyond_garbage(find: Callable[[], Any]) -> Any:
    """Return what `find` finds; where it finds something, after collecting garbage, which may have been all of it."""
    if not find():
        return None
    gc.collect()
    return find()
