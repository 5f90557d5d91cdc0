"""Steps inside of backward, each of which frees its parameter's gradient at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import optimizer as _torch_optimizer
from torch.utils.hooks import RemovableHandle

from ..subclass.models._conversion import check_is_module
from ..subclass.models._parameter_holders import list_live_data_parallel_modules
from ._optimizer import Optimizer, unwrap_halfulp_optimizer
from .parameters._local_tensors import list_payloads
from .parameters._narrow_groups import walk_group_parameters


class GradientRelease:
    """The handle that `release_gradients` returns.

    Attributes:
        optimizer: that steps inside of backward.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._model = model
        self._hook_handles: dict[torch.Tensor, RemovableHandle] = {}
        self._group_and_position: dict[torch.Tensor, tuple[dict[str, Any], int]] = {}
        # Other parameters cut from the tensor that a parameter is cut from.
        self._storage_peers: dict[torch.Tensor, list[torch.Tensor]] = {}
        self._is_stepping = self._has_run_backward = False
        self._attach_hooks()

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate and step.

        Raises:
            NotImplementedError: a gradient scaler of halfulp, or DistributedDataParallel, that came since, or hooks of
                the optimizer's `step`, such as `hu.observe`'s.
        """
        _refuse_wrappers_and_scalers(self._model, not self._has_run_backward)
        self._has_run_backward = True
        self._attach_hooks()
        own = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks
        of_all = _torch_optimizer._global_optimizer_pre_hooks, _torch_optimizer._global_optimizer_post_hooks
        if any((*own, *of_all)):
            raise NotImplementedError(
                "released gradients are stepped by inside of backward, where hooks of step(), such as those of "
                "hu.observe, would see no step: remove them, or call step() after backward"
            )
        self._is_stepping = True
        try:
            loss.backward()
        finally:
            self._is_stepping = False

    def remove(self) -> None:
        """Take the hooks off: backward leaves gradients again."""
        for handle in self._hook_handles.values():
            handle.remove()
        self._hook_handles = {}

    def _attach_hooks(self) -> None:
        """Hook the parameters that require a gradient, also those that were frozen or in no group before."""
        known, self._group_and_position = self._group_and_position, {}
        for group, position, parameter in walk_group_parameters(self.optimizer):
            self._group_and_position[parameter] = group, position
            if parameter.requires_grad and parameter not in self._hook_handles:
                self._hook_handles[parameter] = parameter.register_post_accumulate_grad_hook(self._step_parameter)
        if known.keys() != self._group_and_position.keys():
            self._storage_peers = _find_storage_peers(self._group_and_position)
        # During a pass fully_shard shows other parameters than its shards.
        is_sharded = any(hasattr(parameter, "_local_tensor") for parameter in self._group_and_position)
        if not is_sharded and not any(parameter in self._hook_handles for parameter in self._model.parameters()):
            raise ValueError(
                f"the optimizer holds none of the parameters of this {type(self._model).__name__} that require a "
                "gradient: fully_shard or load_state_dict(assign=True) makes new ones, so call release_gradients after"
            )

    def _step_parameter(self, parameter: torch.Tensor) -> None:
        if parameter not in self._group_and_position:  # in no group any more
            return
        if not self._is_stepping:
            raise RuntimeError(
                "the gradients of this model are released as they come: call released.backward(loss) in place of "
                "loss.backward(), a scaled loss's too, or released.remove() before; to sum gradients of several "
                "batches or to clip them, call step() after backward instead"
            )
        storage_peers = self._storage_peers.get(parameter, ())
        self.optimizer._step_one_parameter(parameter, *self._group_and_position[parameter], storage_peers)
        parameter.grad = None


def release_gradients(model: torch.nn.Module, optimizer: Optimizer | Callable[..., Optimizer]) -> GradientRelease:
    """Step each parameter as soon as backward has its gradient, and free the gradient: no two layers' live at a time.

    A training in bfloat16 by "split8" with 8-bit states then holds 5.125 bytes per parameter beyond activations and the
    largest gradient. The bits are those of a step after backward, as a step of one parameter depends on no other; but
    reentrant checkpointing gives a tied weight its gradient in several parts, each of which is a step.

    Args:
        model: that is trained; FSDP2's `fully_shard` may have sharded it.
        optimizer: of hu.optim, over the model's parameters, or what makes one of `model.named_parameters()`.

    Returns:
        Its `backward(loss)` stands for `loss.backward()`, which is refused: gradients of several batches cannot be
        summed, nor clipped by their norm, which is known when the first have been stepped by.

    Raises:
        TypeError: no module, or no optimizer of hu.optim.
        ValueError: an optimizer of none of the model's parameters.
        NotImplementedError: DistributedDataParallel, which reduces gradients after that, a gradient scaler of halfulp,
            which unscales them after that, or an optimizer that steps all parameters together (`wrap`, Prodigy,
            schedule-free ones). A scaled loss of torch's scaler is not known as one.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(4, 2).bfloat16()
    >>> released = hu.optim.release_gradients(model, lambda params: hu.SGD(params, lr=0.1))
    >>> released.backward(model(torch.ones(1, 4).bfloat16()).sum())
    >>> model.weight.grad is None
    True
    """
    check_is_module(model, "release_gradients")
    _refuse_wrappers_and_scalers(model, True)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.named_parameters())
    own = unwrap_halfulp_optimizer(optimizer, "release_gradients", "its step does one parameter at a time")
    if not own._can_step_one_parameter:
        raise NotImplementedError(
            f"{type(own).__name__} steps all parameters together: call step() after backward, or take an optimizer of "
            "hu.optim that steps one alone, such as AdamW"
        )
    return GradientRelease(model, own)


def _find_storage_peers(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, list[torch.Tensor]]:
    """Return, of each parameter that shares its storage, the others of this storage."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_storage.setdefault(list_payloads(parameter)[0].untyped_storage().data_ptr(), []).append(parameter)
    shared = [members for storage, members in by_storage.items() if storage and len(members) > 1]
    return {parameter: [one for one in members if one is not parameter] for members in shared for parameter in members}


def _refuse_wrappers_and_scalers(model: torch.nn.Module, refuses_data_parallel: bool) -> None:
    """Refuse DistributedDataParallel and gradient scalers, which change gradients after backward."""
    held = {id(parameter) for parameter in model.parameters()} if refuses_data_parallel else set()
    for module in list_live_data_parallel_modules() if refuses_data_parallel else ():
        if any(id(parameter) in held for parameter in module.parameters()):
            raise NotImplementedError(
                "DistributedDataParallel reduces gradients after they were freed: shard the model by fully_shard, or "
                "step after backward"
            )
    if has_gradient_scaler(model):
        raise NotImplementedError(
            "an AdaptiveGradScaler unscales gradients after they were freed: train in bfloat16, or step after backward"
        )


def has_gradient_scaler(model: torch.nn.Module) -> bool:
    """Return whether an AdaptiveGradScaler is made for a model, or for a module in it, as behind torch.compile."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return any(type(forward).__module__.startswith("halfulp.gradients") for forward in forwards)
