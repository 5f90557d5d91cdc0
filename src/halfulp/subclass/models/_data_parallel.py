"""DistributedDataParallel and fully_shard around parameters that are replaced: refused, or made to read them again."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

TensorClass = TypeVar("TensorClass", bound=type[Tensor])


@dataclass
class Wrappers:
    """The wrappers that must read a model's parameters again after these were replaced.

    Attributes:
        data_parallel: DistributedDataParallel modules, whose buckets have the dtypes of the parameters.
        sharded: modules of fully_shard, which keep their shards flat and padded.
    """

    data_parallel: list[nn.parallel.DistributedDataParallel] = field(default_factory=list)
    sharded: list[nn.Module] = field(default_factory=list)

    def parameters(self) -> set[int]:
        """The ids of all parameters that these modules hold."""
        return {id(p) for module in (*self.data_parallel, *self.sharded) for p in module.parameters()}

    def follow(self) -> None:
        """Make every wrapper read its parameters again."""
        for module in self.data_parallel:
            _rebuild(module)
        # What module.to() has fully_shard do: read the shards again, and pad them.
        with torch.no_grad():
            for shard in (
                shard for module in self.sharded for group in shard_groups(module) for shard in group.fsdp_params
            ):
                shard.reset_sharded_param()

    def __or__(self, other: Wrappers) -> Wrappers:
        """Return the modules of both, each once."""
        return Wrappers(
            list(dict.fromkeys(self.data_parallel + other.data_parallel)),
            list(dict.fromkeys(self.sharded + other.sharded)),
        )


def is_flat_parameter(tensor: object) -> bool:
    """Return whether a parameter is a flat one, which FSDP1 made of many."""
    return bool(getattr(tensor, "_is_flat_param", False))


def use_count(tensor: Any) -> int:
    """Return how many references C++ has to a tensor."""
    return tensor._use_count()


def find_wrappers(named: list[tuple[str, Tensor]], what: str, replaced: bool) -> Wrappers:
    """The wrappers around any of some parameters.

    Raises:
        ValueError: one that cannot follow the change.
    """
    alone = use_count(nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu")))
    names = {id(tensor): name for name, tensor in named}
    found = Wrappers()
    # A reducer holds its parameters in C++: without such a reference there is none, and nothing to search for.
    if any(use_count(tensor) > alone for _, tensor in named):
        for module in data_parallel_modules():
            held = [names[id(p)] for p in module.parameters() if id(p) in names]
            if held and "reducer" in module.__dict__:
                _check_data_parallel(module, held[0], what)
                found.data_parallel.append(module)
    shards = {id(tensor) for _, tensor in named if hasattr(tensor, "_local_tensor")}
    if shards:
        if replaced:
            _refuse_shards(named, what)
        for sharded in sharded_modules():
            keys = [id(p) for p in sharded.parameters(recurse=False) if id(p) in shards]
            groups = shard_groups(sharded)
            keys += [id(one.sharded_param) for group in groups for one in group.fsdp_params]
            mine = [names[key] for key in keys if key in shards]
            if mine and groups:
                _check_sharded(sharded, mine[0], what)
                found.sharded.append(sharded)
    return found


def data_parallel_modules() -> list[nn.parallel.DistributedDataParallel]:
    """Every DistributedDataParallel that lives in this process."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    kind = nn.parallel.DistributedDataParallel
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]


def _check_data_parallel(module: nn.parallel.DistributedDataParallel, name: str, what: str) -> None:
    """Raise for a DistributedDataParallel whose reducer cannot be made again as it was."""
    state, reason = module.__dict__, None
    if module.process_group is not torch.distributed.group.WORLD:
        reason = "has a process group of its own"
    elif state.get("mixed_precision") is not None:
        reason = "was made with mixed_precision="
    elif state.get("_delay_all_reduce_params"):
        reason = "was made with delay_all_reduce_named_params="
    elif any(hasattr(p, "_in_backward_optimizers") for p in module.parameters()):
        reason = "steps optimizers in its backward pass"
    elif state.get("_use_python_reducer"):
        reason = "reduces in Python"
    elif not state.get("_comm_hooks") and module._get_ddp_logging_data().get("comm_hook"):
        reason = "has a built-in communication hook"
    if reason is not None:
        raise ValueError(
            f"parameter {name!r} is held by a DistributedDataParallel that {reason}, and cannot be told that the "
            f"parameter changes: call {what} before wrapping the model"
        )


def _rebuild(module: nn.parallel.DistributedDataParallel) -> None:
    """Give a DistributedDataParallel a new reducer over its module's present parameters, as unpickling one does."""
    state = module.__getstate__()
    hooks = list(state.get("_comm_hooks", ()))
    ignored = state.get("parameters_to_ignore", ())
    state["_module_parameters"] = [p for name, p in module.module.named_parameters() if name not in ignored]
    state["_comm_hooks"] = []
    # The old reducer takes its hooks off the gradient accumulators when it goes, before the new one adds its own.
    module.__dict__.update(reducer=None, logger=None)
    module.__setstate__(state)
    for hook, hook_state in hooks:
        module.register_comm_hook(hook_state, hook)


def sharded_modules() -> list[nn.Module]:
    """Every module of fully_shard that lives in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [x for x in gc.get_objects() if issubclass(type(x), fsdp.FSDPModule)]


def shard_groups(module: nn.Module) -> list[Any]:
    """fully_shard's groups of parameters at a module."""
    state = _fsdp_state(module)
    # torch 2.12 has one group at a module, or None.
    groups = getattr(state, "_fsdp_param_groups", (getattr(state, "_fsdp_param_group", None),))
    return [group for group in groups if group is not None]


def _fsdp_state(module: nn.Module) -> Any:
    state_of: Any = module._get_fsdp_state  # of FSDPModule, which fully_shard adds to the bases of the module's class
    return state_of()


def _refuse_shards(named: list[tuple[str, Tensor]], what: str) -> None:
    for name, tensor in named:
        if hasattr(tensor, "_local_tensor"):
            raise ValueError(
                f"parameter {name!r} is sharded (a DTensor of fully_shard or a parallel plan), which keeps it: "
                f"call {what} before sharding the model"
            )


def _check_sharded(module: nn.Module, name: str, what: str) -> None:
    """Raise for a module of fully_shard that has run: its buffers for gathering have the old dtype."""
    if getattr(_fsdp_state(module), "_is_root", None) is not None:
        raise ValueError(
            f"parameter {name!r} is sharded by fully_shard, and the model has run: its buffers have the old dtype. "
            f"Call {what} after fully_shard and before the first forward pass, or on the model before fully_shard"
        )


def replace_data(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter other numbers of another dtype, in place: it stays the object that others hold.

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
    """Give a tensor class, as a decorator, attributes by which fully_shard refuses it with words."""
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
