"""Processes that share gradients, by DistributedDataParallel or FSDP2: they agree on overflows and exponents."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from ..subclass import shard_groups, sharded_modules


class WatchedJoin(JoinHook):
    """A wrapper's ``join_hook``, which also tells a scaler when a ``join()`` begins and ends.

    Args:
        wrapper: whose hook it takes the place of.
        end: called in every process when all have run out of inputs.
    """

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel, end: Callable[[], None]) -> None:
        self.wrapper = weakref.ref(wrapper)
        # The wrapper's own hook while a join() runs.
        self._own: JoinHook | None = None
        self._end = end
        wrapper.__dict__["join_hook"] = self

    @property
    def is_active(self) -> bool:
        """Whether a ``join()`` is active, in which processes may have run out of inputs."""
        wrapper = self.wrapper()
        if wrapper is None or self._own is None:
            return False
        return wrapper._join_config.enable and not wrapper._join_config.throw_on_early_termination

    def __call__(self, **kwargs: Any) -> JoinHook:
        """Begin a ``join()`` of the wrapper."""
        wrapper = self.wrapper()
        assert wrapper is not None  # it calls this
        self._own = type(wrapper).join_hook(wrapper, **kwargs)
        return self

    def main_hook(self) -> None:
        """Run the wrapper's own hook for a process without inputs; the scaler sends nothing."""
        assert self._own is not None
        self._own.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the last process's model and scaler counters at the end of a ``join()``."""
        assert self._own is not None
        self._own.post_hook(is_last_joiner)
        self._own = None
        self._end()

    def restore(self) -> None:
        """Restore the wrapper's own hook."""
        wrapper = self.wrapper()
        if wrapper is not None and wrapper.__dict__.get("join_hook") is self:
            del wrapper.__dict__["join_hook"]

    def __reduce__(self) -> tuple:
        # A copy of the wrapper has no scaler.
        wrapper = self.wrapper()
        return types.MethodType, (type(wrapper).join_hook, wrapper)


# One for each occasion at which processes meet; they are part of the message.
OCCASIONS = ("step", "skipped step", "update")


class Processes:
    """The processes that share a scaler's gradients, by DistributedDataParallel or FSDP2.

    They meet at every step whose gradients a scaler checks, after a skipped one, and at the update of an iteration that
    was measured or skipped, all of which they know alike; a message is six integers, of which each rank learns the
    least. It goes to the wrapper's own group, and tells who is out of step, so that nobody takes another's message for
    an answer. Within a wrapper's ``join()`` nothing is sent, as some processes have no inputs left; at its end they
    take over the numbers of the one that went furthest.
    """

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._joins: list[WatchedJoin] = []
        # Called in every process when a join() ends.
        self.catch_up: Callable[[], None] = lambda: None

    @property
    def in_join(self) -> bool:
        """Whether processes may have run out of inputs, in ``join()``."""
        return any(join.is_active for join in self._joins)

    def watch(self, model: nn.Module) -> None:
        """Find the process groups of wrappers around a model and in it, and look again whenever it runs."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._watch_wrapper(model, known=True)
        self._models.append(weakref.ref(model))
        for group in _list_groups(model):
            self._add_group(group)

    def find_groups(self) -> None:
        """Look for wrappers again, once in an iteration, in the forward pass of a model.

        Raises:
            ValueError: a wrapper whose ``join()`` began before it was known, or a model that is split by tensors.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        active = nn.parallel.DistributedDataParallel._active_ddp_module
        if active is not None:
            self._watch_wrapper(active, known=False)
        for model in (one() for one in self._models):
            for group in () if model is None else _list_groups(model):
                self._add_group(group)

    def agree(self, occasion: str, iteration: int, values: list[int], device: Callable[[], torch.device]) -> list[int]:
        """Return the minimum of each value (two at most) over all processes that share gradients.

        Raises:
            RuntimeError: another process died, or did not come by, or is out of step.
        """
        if self.in_join or not self._groups:
            return values
        place = OCCASIONS.index(occasion)
        message = [iteration, -iteration, place, -place, *values, *[0] * (2 - len(values))]
        found = torch.tensor(message, device=device(), dtype=torch.int64)
        for group in self._groups:
            try:
                dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
                least = found.tolist()
            except RuntimeError as error:
                raise RuntimeError(
                    f"AdaptiveGradScaler waited for the other processes at the {occasion} of iteration {iteration}: "
                    "one of them died, or does not call scaler.step() and scaler.update() as often as this one. "
                    f"torch.distributed says: {error}"
                ) from error
            if least[0] != -least[1] or least[2] != -least[3]:
                others = f"from {least[0]} to {-least[1]}, at {OCCASIONS[least[2]]!r} to {OCCASIONS[-least[3]]!r}"
                raise RuntimeError(
                    f"processes that share gradients are out of step: this one is at the {occasion} of iteration "
                    f"{iteration}, all are at iterations {others}. Call scaler.step() and scaler.update() equally "
                    "often in every process, and load the same state in all"
                )
        return least[4 : 4 + len(values)]

    def read_furthest(self, numbers: list[int], device: torch.device) -> list[int]:
        """Return the numbers of the process whose first number is the largest."""
        mine = torch.tensor(numbers, device=device, dtype=torch.int64)
        for group in self._groups:
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, mine, group=group)
            mine = max(every, key=lambda one: int(one[0]))
        return mine.tolist()

    def restore(self) -> None:
        """Restore the wrappers' own join hooks."""
        for join in self._joins:
            join.restore()
        self._joins.clear()

    def _watch_wrapper(self, wrapper: nn.parallel.DistributedDataParallel, known: bool) -> None:
        if any(join.wrapper() is wrapper for join in self._joins):
            return
        if not known and wrapper._join_config.enable:
            raise ValueError(
                "the model runs in a DistributedDataParallel whose join() began before its AdaptiveGradScaler knew of "
                "it, so that they would not end together: make the scaler of the wrapper, AdaptiveGradScaler(ddp)"
            )
        self._add_group(wrapper.process_group)
        self._joins.append(WatchedJoin(wrapper, lambda: self.catch_up()))

    def _add_group(self, group: Any) -> None:
        if dist.get_world_size(group) > 1 and not any(group is known for known in self._groups):
            self._groups.append(group)


def _list_groups(model: nn.Module) -> Iterator[Any]:
    """Return the process groups of FSDP2 in a model.

    Raises:
        ValueError: parameters are DTensors that it does not hold.
    """
    # Whoever shards a model has loaded these.
    fsdp, dtensor = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    if dtensor is None:
        return
    sharded: set[int] = set()
    modules = list(model.modules())
    for module in modules:
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            for group in shard_groups(module):
                sharded |= {id(one.sharded_param) for one in group.fsdp_params}
                yield from group.mesh_info.mesh.get_all_groups()
    if any(isinstance(m, dtensor.DTensor) and id(m) not in sharded for x in modules for m in x._parameters.values()):
        _check_split(model, sharded, dtensor.DTensor)


def _check_split(model: nn.Module, sharded: set[int], kind: type) -> None:
    """Refuse parameters that are split among processes by tensor parallel."""
    groups = (group for module in sharded_modules() for group in shard_groups(module))
    held = {id(one.sharded_param) for group in groups for one in group.fsdp_params} | sharded
    for name, parameter in model.named_parameters():
        if isinstance(parameter, kind) and id(parameter) not in held:
            raise ValueError(
                f"parameter {name!r} is a DTensor of a parallel plan (tensor parallel): processes would hold parts of "
                "one gradient at exponents of their own. AdaptiveGradScaler takes DistributedDataParallel and "
                "fully_shard; for tensor parallel take torch.amp.GradScaler, or bfloat16"
            )
