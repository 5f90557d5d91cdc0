"""Unscaling gradients, each once however many optimizers share it, and steps of optimizers that handle overflow."""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

_BETWEEN = "call scaler.update() between the passes of a step that has several, such as a sharpness-aware one"


class _Written:
    """A gradient as it stood at some time: the tensor, weakly, and its version counter."""

    def __init__(self, gradient: Tensor | None) -> None:
        self._tensor = None if gradient is None else weakref.ref(gradient)
        self._version = None if gradient is None else gradient._version

    def is_held_by(self, parameter: Tensor) -> bool:
        """Whether the tensor is a parameter's gradient, whatever has been written into it since."""
        return self._tensor is not None and parameter.grad is not None and self._tensor() is parameter.grad

    def stands_in(self, parameter: Tensor) -> bool:
        """Whether a parameter's gradient is as it was then."""
        if self._tensor is None or parameter.grad is None:
            return self._tensor is None and parameter.grad is None
        return self._tensor() is parameter.grad and self._version == parameter.grad._version


@dataclass
class _Unscaled:
    """What became of a parameter's gradient since its optimizer was unscaled.

    Attributes:
        parameter: a weak reference.
        divided: the gradient when it had been divided; none where there was none.
        begun: the gradient when the scaled backward pass began that runs now.
        adds: whether that pass adds to a gradient.
        adds_to_divided: whether it adds to the divided values.
        scaled: what a scaled backward pass has left since.
        mixed: whether that is a sum with divided values.
    """

    parameter: weakref.ref
    divided: _Written
    begun: _Written | None = None
    adds: bool = False
    adds_to_divided: bool = False
    scaled: _Written | None = None
    mixed: bool = False

    def begin(self) -> None:
        """Note what there is before a scaled backward pass."""
        parameter = self.parameter()
        if parameter is None:
            return
        self.begun, self.adds = _Written(parameter.grad), parameter.grad is not None
        # A gradient that was changed before the pass may have been set to zero.
        self.adds_to_divided = self.adds and self.divided.stands_in(parameter)

    def look(self) -> None:
        """Note whether the scaled backward pass that runs, or has just ended, has written the gradient."""
        parameter = self.parameter()
        if parameter is None or parameter.grad is None or self.begun is None or self.begun.stands_in(parameter):
            return
        self.scaled = _Written(parameter.grad)
        self.mixed = self.adds and (self.mixed or self.adds_to_divided)


class UnscaledGradients:
    """The gradients that were divided by the scale since the last update.

    Optimizers that share a parameter share its gradient, which is divided for the first one that unscales; torch's
    GradScaler divides again for each. A gradient stays unscaled, also where it is clipped, until a scaled backward pass
    writes it or another tensor takes its place.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Unscaled] = {}
        self._pass = -1

    def clear(self) -> None:
        """Forget all gradients."""
        self._records.clear()

    def split(self, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Return an optimizer's parameters whose gradients are scaled, and those whose gradients were divided."""
        if not self._records:
            return list(_with_gradients(optimizer)), []
        scaled: list[Tensor] = []
        unscaled: list[Tensor] = []
        for parameter in _with_gradients(optimizer):
            record = self._record(parameter)
            is_divided = record is not None and record.scaled is None and record.divided.is_held_by(parameter)
            (unscaled if is_divided else scaled).append(parameter)
        return scaled, unscaled

    def check(self, optimizer: torch.optim.Optimizer, models: Iterable[weakref.ref], divided: bool = False) -> None:
        """Check that no gradient of an optimizer is a sum of divided and scaled values.

        Args:
            optimizer: whose gradients are to be unscaled, or stepped with.
            models: of the scaler, which name the parameters.
            divided: whether the optimizer's gradients count as unscaled, and are stepped with as they are.

        Raises:
            ValueError: a scaled backward pass added to a gradient that had been divided, or left one that will not be.

        Warns:
            RuntimeWarning: a gradient that a scaled backward pass left was written since, and will not be divided.
        """
        written = ""
        for parameter in _with_gradients(optimizer) if self._records else ():
            record = self._record(parameter)
            if record is None or record.scaled is None or not record.scaled.is_held_by(parameter):
                continue
            if not (record.mixed or divided):
                continue
            held = [model for model in (reference() for reference in models) if model is not None]
            names = [name for model in held for name, one in model.named_parameters() if one is parameter]
            said = names[0] if names else f"a parameter of shape {list(parameter.shape)}"
            if record.mixed:
                raise ValueError(
                    f"the gradient of {said} was unscaled, and a scaled backward pass has added to it since, so that "
                    "parts of it have another scale: unscale and step after all backward passes of an iteration, or "
                    "call zero_grad() before the next one"
                )
            origin = f"the gradient of {said} comes from a scaled backward pass after unscale_() of its optimizer"
            if record.scaled.stands_in(parameter):
                raise ValueError(f"{origin}, and is still scaled: {_BETWEEN}")
            # Divided by hand, or clipped as it was.
            written = written or origin
        if written:
            warnings.warn(
                f"{written}, and was written since: it is taken as unscaled; if it is not, {_BETWEEN}",
                RuntimeWarning,
                stacklevel=3,  # the line that steps
            )

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Record that the gradients of these parameters, as far as there are, are divided now."""
        for parameter in parameters:
            self._records[id(parameter)] = _Unscaled(weakref.ref(parameter), _Written(parameter.grad))

    def begin_pass(self, _: tuple) -> None:
        """The hook of a scaled loss's node: see which divided gradients this backward pass writes."""
        number = torch._C._current_graph_task_id()
        if not self._records or number == self._pass:
            return
        self._end_pass()
        self._pass = number
        for record in self._records.values():
            record.begin()
        Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        """Note what a backward pass has written, also of one that raised."""
        self._pass = -1
        for record in self._records.values():
            record.look()
            record.begun = None

    def _record(self, parameter: Tensor) -> _Unscaled | None:
        """Return what is known of a parameter's gradient."""
        record = self._records.get(id(parameter))
        if record is None or record.parameter() is not parameter:
            return None
        if self._pass != torch._C._current_graph_task_id():
            self._end_pass()
        record.look()
        return record


def _with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer that have a gradient."""
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.grad is not None)


def unscale_once(
    unscale: Callable,
    known: UnscaledGradients | None,
    optimizer: torch.optim.Optimizer,
    inverse: Tensor,
    found: Tensor,
) -> dict[torch.device, Tensor]:
    """Unscale the gradients that wait at the scale, as GradScaler does; those that were divided are only checked.

    Args:
        unscale: GradScaler's own, of an optimizer, the inverse scale and a flag; gives a flag for every device.
        known: which gradients were divided, and are from now on; None where nothing is divided here.
        optimizer: whose gradients are unscaled.
        inverse, found: as GradScaler has them.

    Returns:
        A flag for every device.
    """
    scaled, divided = (list(_with_gradients(optimizer)), []) if known is None else known.split(optimizer)
    flags: dict[torch.device, Tensor] = {}
    # torch leaves values as they are, bit for bit, under an inverse of 1.
    for parameters, factor in ((scaled, inverse), (divided, torch.ones_like(inverse) if divided else inverse)):
        for alike in _by_mesh(parameters):
            held: Any = SimpleNamespace(param_groups=[{"params": alike}])
            for device, flag in unscale(held, factor, found).items():
                flags[device] = torch.maximum(flags[device], flag) if device in flags else flag
    if known is not None:
        known.note(parameter for group in optimizer.param_groups for parameter in group["params"])
    return flags


def _by_mesh(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Parameters by the device mesh of their gradients: torch takes no list of plain ones and DTensors, or two meshes.

    Plain gradients come first: what is found in them is told to other processes by what follows.
    """
    dtensor = sys.modules.get("torch.distributed.tensor")
    found: dict[Any, list[Tensor]] = {None: []}
    for parameter in parameters:
        is_sharded = dtensor is not None and isinstance(parameter.grad, dtensor.DTensor)
        gradient: Any = parameter.grad
        found.setdefault(gradient.device_mesh if is_sharded else None, []).append(parameter)
    return [alike for alike in found.values() if alike]


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any parameter of an optimizer has a gradient."""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def handles_overflow(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer skips overflowed steps by itself, as torch's fused ones do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step takes the scaler and unscales by itself: the older form of the contract."""
    return handles_overflow(optimizer) and "grad_scaler" in inspect.signature(optimizer.step).parameters


def idles(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has no gradients and takes a step all the same, as torch's fused ones do from GradScaler."""
    return handles_overflow(optimizer) and not takes_scaler(optimizer) and not has_gradients(optimizer)


def flags_of(
    optimizer: torch.optim.Optimizer, found: Mapping[torch.device, Tensor], device: str | torch.device
) -> list[Tensor]:
    """Return the flags that a check of an optimizer's gradients gave, or one that is not set where it idles.

    Raises:
        ValueError: there are no gradients, where GradScaler wants some.
    """
    flags = list(found.values())
    if not flags and idles(optimizer):
        flags = [torch.zeros((), dtype=torch.float32, device=device)]
    if not flags:
        raise ValueError(
            "the optimizer's parameters have no gradients: there is nothing to step with. Leave this step out, or call "
            "another optimizer's zero_grad(), which clears what they share, after all steps"
        )
    return flags


def step_with_scaler(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> Any:
    """The step of an optimizer that takes the scaler."""
    warnings.warn(
        "the optimizer's step takes grad_scaler=, which torch.amp.GradScaler is going to stop giving: let it read the "
        "attributes grad_scale and found_inf that are set on it during a step",
        FutureWarning,
        stacklevel=3,
    )
    step: Callable[..., Any] = optimizer.step
    return step(*args, **kwargs, grad_scaler=scaler)


def step_unscaled(
    optimizer: torch.optim.Optimizer, found: list[Tensor], overflowed: bool, args: tuple, kwargs: dict
) -> Any:
    """Step with unscaled gradients; None where they overflowed, unless the optimizer handles that itself."""
    if not handles_overflow(optimizer):
        return None if overflowed else optimizer.step(*args, **kwargs)
    aware: Any = optimizer
    # A scale of its own that somebody set stays.
    aware.grad_scale = getattr(optimizer, "grad_scale", None)
    aware.found_inf = sum(flag.to(found[0].device, non_blocking=True) for flag in found)
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del aware.grad_scale, aware.found_inf
