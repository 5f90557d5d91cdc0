"""The losses that backward passes begin with, as the script computed them: without a gradient scaler's factor."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from ...gradients import AdaptiveGradScaler
from ...kernels import in_float64

SCALERS = (torch.amp.GradScaler, AdaptiveGradScaler)


class BackwardLosses:
    """Tells a listener each loss of one element that a backward pass begins with, while the context is open.

    `torch.autograd.backward` and the scalers' `scale` are wrapped for that time. What a scaler was given is the loss;
    of what was computed from a scaled loss (a share of it, a sum), the factor between the two is taken off.

    Args:
        listener: called with the loss, detached, before its backward pass.
    """

    def __init__(self, listener: Callable[[torch.Tensor], None]) -> None:
        self._listener = listener
        self._backward: Any = None
        self._scales: dict[type, Any] = {}
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor, torch.Tensor] | None = None

    def __enter__(self) -> BackwardLosses:
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._telling(self._backward)
        for kind in SCALERS:
            self._scales[kind] = kind.scale
            kind.scale = self._noting(kind.scale)  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.autograd.backward = self._backward
        for scaler, scale in self._scales.items():
            scaler.scale = scale  # type: ignore[attr-defined]
        self._scaled = None

    def _telling(self, backward: Any) -> Any:
        @functools.wraps(backward)
        def note_and_run(tensors: Any, *args: Any, **options: Any) -> Any:
            single = tensors[0] if isinstance(tensors, Sequence) and len(tensors) == 1 else tensors
            if isinstance(single, torch.Tensor) and single.numel() == 1:
                self._listener(self._unscaled(single))
            return backward(tensors, *args, **options)

        return note_and_run

    def _noting(self, scale: Any) -> Any:
        @functools.wraps(scale)
        def noted(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                self._scaled = weakref.ref(result), result.detach(), outputs.detach()
            return result

        return noted

    def _unscaled(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._scaled is None:
            return tensor.detach()
        (result, scaled, loss), self._scaled = self._scaled, None
        if result() is tensor:
            return loss
        factor = in_float64(scaled) / in_float64(loss)
        known = bool(factor.isfinite()) and bool(factor)
        return (tensor.detach() / factor.item()).to(tensor.dtype) if known else tensor.detach()
