"""torch's fused optimizer steps as single operators, since the fused kernels read memory as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...kernels import torch_operators
from .._mctensor import implements

aten = torch_operators("aten")
Many = Sequence[Tensor]


@implements(aten._fused_adam_.default, aten._fused_adam_.tensor_lr)
def fused_adam(weights: Many, gradients: Many, *states: Many, **options: Any) -> None:
    """Step by Adam, with weight decay added to the gradient."""
    _adam(weights, gradients, states, options, decoupled=False)


@implements(aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr)
def fused_adamw(weights: Many, gradients: Many, *states: Many, **options: Any) -> None:
    """Step by AdamW, with decoupled weight decay."""
    _adam(weights, gradients, states, options, decoupled=True)


def _adam(weights: Many, gradients: Many, states: tuple[Many, ...], options: dict, decoupled: bool) -> None:
    """Run one step of every tensor as `torch.optim.AdamW(foreach=False)` does; step counts are incremented already."""
    moments, squares, largest, steps = states
    if _is_skipped(options):
        return
    lr, decay = float(options["lr"]), options["weight_decay"]
    beta1, beta2 = options["beta1"], options["beta2"]
    for k, (w, m, v, count) in enumerate(zip(weights, moments, squares, steps, strict=True)):
        g, step = _gradient(gradients[k], options), float(count)
        if decay and decoupled:
            w.mul_(1 - lr * decay)
        elif decay:
            g = g.add(w, alpha=decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if options["amsgrad"]:
            largest[k].copy_(largest[k].maximum(v))
            v = largest[k]
        bottom = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(options["eps"])
        w.addcdiv_(m, bottom, value=-lr / (1 - beta1**step))


@implements(aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)
def fused_sgd(weights: Many, gradients: Many, buffers: Many, **options: Any) -> None:
    """Step by SGD, with momentum where there are buffers."""
    if _is_skipped(options):
        return
    lr, decay, momentum = float(options["lr"]), options["weight_decay"], options["momentum"]
    for k, w in enumerate(weights):
        g = _gradient(gradients[k], options)
        g = g.add(w, alpha=decay) if decay else g
        if momentum:
            if options["is_first_step"]:
                buffers[k].copy_(g)
            else:
                buffers[k].mul_(momentum).add_(g, alpha=1 - options["dampening"])
            g = g.add(buffers[k], alpha=momentum) if options["nesterov"] else buffers[k]
        w.add_(g, alpha=-lr)


def _is_skipped(options: dict) -> bool:
    """Return whether a gradient scaler found an infinity."""
    found = options.get("found_inf")
    return found is not None and bool(found)


def _gradient(gradient: Tensor, options: dict) -> Tensor:
    """Return a gradient as the step takes it: unscaled, and negated to maximize."""
    scale = options.get("grad_scale")
    gradient = gradient if scale is None else gradient / scale
    return -gradient if options["maximize"] else gradient


def _refuse(*arguments: Any, **options: Any) -> None:
    raise NotImplementedError(
        "this fused step reads memory as plain numbers, and MCTensors are sums of components: make the optimizer with "
        "fused=False"
    )


implements(aten._fused_adagrad_.default, aten._fused_adagrad_.tensor_lr)(_refuse)
