"""Steps inside of backward, each of which frees its parameter's gradient at once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import optimizer as _torch_optimizer
from torch.utils.hooks import RemovableHandle

from ..subclass.models._conversion import check_module
from ..subclass.models._parameter_holders import list_data_parallel_modules
from ._group_options import check_number
from ._optimizer import Optimizer, find_own_optimizer
from .parameters._narrow_groups import walk_model_parameters
from .parameters._tensor_map import TensorMap


class GradientRelease:
    """The handle that `release_gradients` returns.

    Attributes:
        optimizer: that steps inside of backward.
        norm: of all gradients of the last step, before they were clipped; None without clipping, or before a step.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, clip: float | None) -> None:
        self.optimizer = optimizer
        self.norm: torch.Tensor | None = None
        self._model, self._clip = model, clip
        self._hook: Callable[[torch.Tensor, dict[str, Any], int], None] = self._refuse_plain_backward
        self._handles: TensorMap[RemovableHandle] = TensorMap()
        self._places: TensorMap[tuple[dict[str, Any], int]] = TensorMap()
        self._is_accumulating = self._has_begun = False
        self._attach_hooks()

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate and step.

        With `clip` there are two passes: one measures the norms, the other steps. Inside of `accumulate` there is one,
        which does not step.

        Raises:
            NotImplementedError: a gradient scaler of halfulp, or DistributedDataParallel, that came since, or hooks of
                the optimizer's `step`, such as `hu.observe`'s.
        """
        _refuse_wrappers_and_scalers(self._model, not self._has_begun)
        self._has_begun = True
        self._attach_hooks()
        if self._is_accumulating:
            loss.backward()
            return
        _refuse_step_hooks(self.optimizer)
        if self._clip is None:
            with self._context_with_hook(self._step):
                loss.backward()
            self._step_remaining()  # of micro-batches before, which this one has not reached
        elif any(parameter.grad is not None for parameter in self._list_parameters()):
            # The gradients of several passes are summed up already: step after backward.
            with self.accumulate():
                loss.backward()
            self.norm = torch.nn.utils.clip_grad_norm_(self._list_parameters(), self._clip)
            self._step_remaining()
        else:
            coefficient = self._measure_clip_coefficient(loss, self._clip)
            with self._context_with_hook(functools.partial(self._step, coefficient=coefficient)):
                loss.backward()

    def _measure_clip_coefficient(self, loss: torch.Tensor, clip: float) -> torch.Tensor | None:
        """Return the factor of `torch.nn.utils.clip_grad_norm_`, by a backward pass that keeps norms alone."""
        norms: dict[torch.Tensor, torch.Tensor] = {}

        def measure_norm(parameter: torch.Tensor, *_: Any) -> None:
            assert parameter.grad is not None
            # As clip_grad_norm_ computes it, to the bit.
            norms[parameter], parameter.grad = torch._foreach_norm([parameter.grad.detach()], 2.0)[0], None

        with self._context_with_hook(measure_norm):
            loss.backward(retain_graph=True)
        found = [norms[parameter] for parameter in self._list_parameters() if parameter in norms]
        if not found:
            return None
        self.norm = torch.linalg.vector_norm(torch.stack([norm.to(found[0].device) for norm in found]))
        return torch.clamp(clip / (self.norm + 1e-6), max=1.0)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Return a context whose backward passes only add to the gradients; the next one outside steps by the sums.

        Gradients then live from one pass to the next, as in any accumulation, in their parameter's dtype or, after
        `hu.float32_gradients(model)`, in float32.
        """
        self._is_accumulating, before = True, self._is_accumulating
        try:
            with self._context_with_hook(lambda *_: None):
                yield
        finally:
            self._is_accumulating = before

    def remove(self) -> None:
        """Take the hooks off: backward leaves gradients again."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = TensorMap()

    def _list_parameters(self) -> list[torch.Tensor]:
        return [parameter for _, _, parameter in walk_model_parameters(self.optimizer)]

    def _attach_hooks(self) -> None:
        """Hook the parameters that require a gradient, also those that were frozen or in no group before."""
        self._places = TensorMap()
        for group, position, parameter in walk_model_parameters(self.optimizer):
            self._places[parameter] = group, position
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._call_hook)
        # During a pass fully_shard shows other parameters than its shards.
        is_sharded = any(hasattr(parameter, "_local_tensor") for parameter in self._list_parameters())
        if not is_sharded and not any(parameter in self._handles for parameter in self._model.parameters()):
            raise ValueError(
                f"the optimizer holds none of the parameters of this {type(self._model).__name__} that require a "
                "gradient: fully_shard or load_state_dict(assign=True) makes new ones, so call release_gradients after"
            )

    def _call_hook(self, parameter: torch.Tensor) -> None:
        place = self._places.get(parameter)
        if place is not None:  # else it is in no group any more, and not stepped
            self._hook(parameter, *place)

    @contextlib.contextmanager
    def _context_with_hook(self, hook: Callable[..., None]) -> Iterator[None]:
        before, self._hook = self._hook, hook
        try:
            yield
        finally:
            self._hook = before

    def _step(
        self, parameter: torch.Tensor, group: dict[str, Any], position: int, coefficient: torch.Tensor | None = None
    ) -> None:
        assert parameter.grad is not None
        if coefficient is not None:
            parameter.grad.mul_(coefficient.to(parameter.grad.device))
        self.optimizer._step_one_parameter(parameter, group, position)
        parameter.grad = None

    def _step_remaining(self) -> None:
        for group, position, parameter in walk_model_parameters(self.optimizer):
            if parameter.grad is not None:
                self._step(parameter, group, position)

    def _refuse_plain_backward(self, parameter: torch.Tensor, group: dict[str, Any], position: int) -> None:
        raise RuntimeError(
            "the gradients of this model are released as they come: call released.backward(loss) in place of "
            "loss.backward(), a scaled loss's too, or released.remove() before"
        )


def _refuse_step_hooks(optimizer: Optimizer) -> None:
    """Refuse hooks of `step`, of this optimizer or of all, which would see no step."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    of_all = (_torch_optimizer._global_optimizer_pre_hooks, _torch_optimizer._global_optimizer_post_hooks)
    if any((*own, *of_all)):
        raise NotImplementedError(
            "released gradients are stepped by inside of backward, where hooks of step(), such as those of hu.observe, "
            "would see no step: remove them, or call step() after backward"
        )


def release_gradients(
    model: torch.nn.Module,
    optimizer: Optimizer | Callable[..., Optimizer],
    *,
    clip: float | None = None,
) -> GradientRelease:
    """Step each parameter as soon as backward has its gradient, and free the gradient: no two layers' live at a time.

    A training in bfloat16 by "split8" with 8-bit states then holds 5.125 bytes per parameter beyond activations and the
    largest gradient. The bits are those of a step after backward, as a step of one parameter depends on no other; but
    reentrant checkpointing gives a tied weight its gradient in several parts, each of which is a step.

    Args:
        model: that is trained; FSDP2's `fully_shard` may have sharded it.
        optimizer: of hu.optim, over the model's parameters, or what makes one of `model.named_parameters()`.
        clip: the largest norm of all gradients together, as `clip_grad_norm_`; None to leave them as they are. It takes
            a second backward pass; the bits are those of `clip_grad_norm_` where all gradients are on one device and of
            one dtype.

    Returns:
        Its `backward(loss)` stands for `loss.backward()`, which is refused; `accumulate()` is a context for all
        micro-batches but the last.

    Raises:
        TypeError: no module, or no optimizer of hu.optim.
        ValueError: `clip` that is no positive number.
        NotImplementedError: DistributedDataParallel, which reduces gradients after that, a gradient scaler of halfulp,
            which unscales them after that, or an optimizer that steps all parameters together (`wrap`, Prodigy,
            schedule-free ones). A scaled loss of torch's scaler is not known as one.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(4, 2).bfloat16()
    >>> released = hu.optim.release_gradients(model, lambda params: hu.SGD(params, lr=0.1), clip=1.0)
    >>> released.backward(model(torch.ones(1, 4).bfloat16()).sum())
    >>> model.weight.grad is None, bool(released.norm > 1)
    (True, True)
    """
    check_module(model, "release_gradients")
    if clip is not None:
        check_number("clip", clip)
        if not clip > 0:
            raise ValueError(f"clip={clip} is not allowed: give the largest norm, above 0, or None")
    _refuse_wrappers_and_scalers(model, True)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.named_parameters())
    own = find_own_optimizer(optimizer, "release_gradients", "its step does one parameter at a time")
    own._check_can_step_one()
    return GradientRelease(model, own, clip)


def _refuse_wrappers_and_scalers(model: torch.nn.Module, with_wrappers: bool) -> None:
    """Refuse DistributedDataParallel and gradient scalers, which change gradients after backward."""
    held = {id(parameter) for parameter in model.parameters()} if with_wrappers else set()
    for module in list_data_parallel_modules() if with_wrappers else ():
        if any(id(parameter) in held for parameter in module.parameters()):
            raise NotImplementedError(
                "DistributedDataParallel reduces gradients after they were freed: shard the model by fully_shard, or "
                "step after backward"
            )
    if type(vars(model).get("forward")).__module__.startswith("halfulp.gradients"):
        raise NotImplementedError(
            "an AdaptiveGradScaler unscales gradients after they were freed: train in bfloat16, or step after backward"
        )
