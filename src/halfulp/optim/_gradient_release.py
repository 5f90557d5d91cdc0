"""Steps inside of backward, each of which frees its parameter's gradient at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.utils.hooks import RemovableHandle

from ..subclass.models._module_parameters import check_module
from ..subclass.models._parameter_holders import data_parallel_modules
from ._group_options import check_number
from ._inner_optimizer import own_optimizer
from ._optimizer import Optimizer
from .parameters._tensor_map import TensorMap

ClipBy = Literal["this", "previous"]


class GradientRelease:
    """What `release_gradients` returns.

    Attributes:
        optimizer: that steps inside of backward.
        norm: of all gradients of the last step, before they were clipped; None without clipping, or before a step.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, clip: float | None, clip_by: ClipBy) -> None:
        self.optimizer = optimizer
        self.norm: torch.Tensor | None = None
        self._model, self._clip, self._clip_by = model, clip, clip_by
        self._hook: Callable[[torch.Tensor, dict[str, Any], int], None] = self._refuse
        self._handles: TensorMap[RemovableHandle] = TensorMap()
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        self._coefficient: torch.Tensor | None = None
        self._is_accumulating = self._has_begun = False
        self._attach()

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate and step.

        With `clip` and `clip_by="this"` there are two passes: one measures the norms, the other steps. Inside of
        `accumulate` there is one, which does not step.

        Raises:
            NotImplementedError: a gradient scaler of halfulp, or DistributedDataParallel, that came since.
        """
        _refuse_others(self._model, not self._has_begun)
        self._has_begun = True
        self._attach()
        if self._is_accumulating:
            loss.backward()
        elif self._clip is None or self._clip_by == "previous":
            with self._hooked(self._step):
                loss.backward()
            for group, position, parameter in self._places():
                if parameter.grad is not None:  # of micro-batches before, which this one has not reached
                    self._step(parameter, group, position)
            self._set_coefficient()
        elif any(parameter.grad is not None for _, _, parameter in self._places()):
            self._step_after(loss)
        else:
            with self._hooked(self._measure):
                loss.backward(retain_graph=True)
            self._set_coefficient()
            with self._hooked(self._step):
                loss.backward()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """A context whose backward passes only add to the gradients; the next one outside steps by the sums.

        Gradients then live from one pass to the next, as in any accumulation, in their parameter's dtype or, after
        `hu.float32_gradients(model)`, in float32.
        """
        self._is_accumulating, before = True, self._is_accumulating
        try:
            with self._hooked(lambda *_: None):
                yield
        finally:
            self._is_accumulating = before

    def remove(self) -> None:
        """Take the hooks off: backward leaves gradients again."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = TensorMap()

    def _places(self) -> Iterator[tuple[dict[str, Any], int, torch.Tensor]]:
        for group in self.optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                yield group, position, parameter

    def _attach(self) -> None:
        """Hook the parameters that require a gradient, also those that were frozen or in no group before."""
        for group, position, parameter in self._places():
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(
                    lambda parameter, group=group, position=position: self._hook(parameter, group, position)
                )

    @contextlib.contextmanager
    def _hooked(self, hook: Callable[..., None]) -> Iterator[None]:
        before, self._hook = self._hook, hook
        try:
            yield
        finally:
            self._hook = before

    def _step(self, parameter: torch.Tensor, group: dict[str, Any], position: int) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self._clip is not None and self._clip_by == "previous":
            self._norms[parameter] = _norm(gradient)
        if self._coefficient is not None:
            gradient.mul_(self._coefficient.to(gradient.device))
        self.optimizer.step_parameter(parameter, group, position)
        parameter.grad = None

    def _measure(self, parameter: torch.Tensor, group: dict[str, Any], position: int) -> None:
        assert parameter.grad is not None
        self._norms[parameter], parameter.grad = _norm(parameter.grad), None

    def _refuse(self, parameter: torch.Tensor, group: dict[str, Any], position: int) -> None:
        raise RuntimeError(
            "the gradients of this model are released as they come: call released.backward(loss) in place of "
            "loss.backward(), a scaled loss's too, or released.remove() before"
        )

    def _set_coefficient(self) -> None:
        """Turn the measured norms into the factor of `torch.nn.utils.clip_grad_norm_`."""
        norms, self._norms = [self._norms[p] for _, _, p in self._places() if p in self._norms], {}
        if norms:
            assert self._clip is not None
            norm = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
            self.norm, self._coefficient = norm, torch.clamp(self._clip / (norm + 1e-6), max=1.0)

    def _step_after(self, loss: torch.Tensor) -> None:
        """Step after backward: sums of several passes lie there anyway."""
        with self.accumulate():
            loss.backward()
        assert self._clip is not None
        self.norm = torch.nn.utils.clip_grad_norm_((parameter for _, _, parameter in self._places()), self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    # As clip_grad_norm_ computes it, to the bit.
    return torch._foreach_norm([gradient.detach()], 2.0)[0]


def release_gradients(
    model: torch.nn.Module,
    optimizer: Optimizer | Callable[..., Optimizer],
    *,
    clip: float | None = None,
    clip_by: ClipBy = "this",
) -> GradientRelease:
    """Step each parameter as soon as backward has its gradient, and free the gradient: no two layers' live at a time.

    A training in bfloat16 by "split8" with 8-bit states then holds 5.125 bytes per parameter beyond activations and the
    largest gradient. The bits are those of a step after backward, as a step of one parameter depends on no other; but
    reentrant checkpointing gives a tied weight its gradient in several parts, each of which is a step.

    Args:
        model: that is trained; FSDP2's `fully_shard` may have sharded it.
        optimizer: of hu.optim, over the model's parameters, or what makes one of `model.named_parameters()`.
        clip: the largest norm of all gradients together, as `clip_grad_norm_`; None to leave them as they are.
        clip_by: "this" clips by the norm of this step's gradients, which takes a second backward pass and
            `released.backward(loss)`; the bits are those of `clip_grad_norm_` where all gradients are on one device and
            of one dtype. "previous" clips by the norm of the step before, and not in the first one: one pass, other
            bits.

    Returns:
        Its `backward(loss)` stands for `loss.backward()`, which is refused; `accumulate()` is a context for all
        micro-batches but the last.

    Raises:
        TypeError: no module, or no optimizer of hu.optim.
        ValueError: `clip` that is no positive number, or an unknown `clip_by`.
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
    if clip_by not in ("this", "previous"):
        raise ValueError(f"clip_by={clip_by!r}: allowed are 'this' and 'previous'")
    _refuse_others(model, True)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.named_parameters())
    own = own_optimizer(optimizer, "release_gradients", "its step does one parameter at a time")
    if type(own).step_parameter is not Optimizer.step_parameter:
        raise NotImplementedError(
            f"{type(own).__name__} steps all parameters together: step after backward, or take an optimizer of "
            "hu.optim that steps one alone, such as AdamW"
        )
    return GradientRelease(model, own, clip, clip_by)


def _refuse_others(model: torch.nn.Module, with_wrappers: bool) -> None:
    """Refuse what touches gradients after backward."""
    held = {id(parameter) for parameter in model.parameters()} if with_wrappers else set()
    for module in data_parallel_modules() if with_wrappers else ():
        if any(id(parameter) in held for parameter in module.parameters()):
            raise NotImplementedError(
                "DistributedDataParallel reduces gradients after they were freed: shard the model by fully_shard, or "
                "step after backward"
            )
    if type(vars(model).get("forward")).__module__.startswith("halfulp.gradients"):
        raise NotImplementedError(
            "an AdaptiveGradScaler unscales gradients after they were freed: train in bfloat16, or step after backward"
        )
