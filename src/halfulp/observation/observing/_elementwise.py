"""Optimizers whose update of an element depends on that element alone, run on float64 shadows of samples."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..._messages import a_kind

Options = Mapping[str, Any]
# Whether weight decay multiplies the weight by 1 - lr wd, rounded by itself, before the update is subtracted.
ELEMENTWISE: dict[type[torch.optim.Optimizer], Callable[[Options], bool]] = {}
# State entries that belong to a whole tensor, whatever its shape.
WHOLE = frozenset({"step", "mu_product", "eta", "mu"})
_TORCH_WRAPPERS = ("torch.optim.optimizer", "torch.utils._contextlib")
_IMPLEMENTATIONS = {"foreach": False, "capturable": False, "differentiable": False}
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


def register_elementwise(
    kind: type[torch.optim.Optimizer], decouples: Callable[[Options], bool] | bool = False
) -> None:
    """Let observations compute the updates of an optimizer class by running it on shadows of sampled elements.

    Args:
        kind: the class. The update of an element must depend on that element's weight, gradient and states, and on
            the group's options, alone; its constructor takes (params, **options).
        decouples: whether it multiplies the weight by 1 - lr * weight_decay, apart from the gradient; or a function of
            a group's options that says so.

    Raises:
        TypeError: it is no optimizer class.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"register_elementwise takes a subclass of torch.optim.Optimizer, got {a_kind(kind)}")
    ELEMENTWISE[kind] = decouples if callable(decouples) else lambda options: decouples


def _is_decoupled(options: Options) -> bool:
    return bool(options.get("decoupled_weight_decay"))


for _name in ("SGD", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD"):
    register_elementwise(getattr(torch.optim, _name))
for _name in ("Adam", "NAdam", "RAdam"):
    register_elementwise(getattr(torch.optim, _name), _is_decoupled)
register_elementwise(torch.optim.AdamW, True)


def decay_factor(optimizer: torch.optim.Optimizer, options: Options) -> float | None:
    """Return 1 - lr wd where that factor is rounded into the weight by itself; None elsewhere."""
    decouples = ELEMENTWISE.get(type(optimizer))
    decay = options.get("weight_decay")
    if decouples is None or not decay or options.get("fused") or not decouples(options):
        return None
    return 1 - float(options["lr"]) * float(decay)


def _remove_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step without what torch puts around it: hooks, a profiler's range, the mode of gradients."""
    step = getattr(step, "__wrapped__", step)
    while hasattr(step, "__wrapped__") and getattr(step, "__globals__", {}).get("__name__") in _TORCH_WRAPPERS:
        step = step.__wrapped__
    return step


class Shadow:
    """An optimizer's own class, run on float64 copies of samples."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind: type[torch.optim.Optimizer] = type(optimizer)
        parameters = inspect.signature(self.kind.__init__).parameters
        self._takes: set[str] = set(parameters) - {"self", "params"}
        self._instance: torch.optim.Optimizer | None = None
        self._weight: torch.nn.Parameter | None = None

    def step(
        self, weights: torch.Tensor, gradients: torch.Tensor, states: dict[str, Any], options: Options
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return weights and states after one step, which the next one overwrites; no hooks of the user's are called.

        Call it where gradients are not recorded.

        Args:
            weights, gradients: flat float64.
            states: of these elements, empty before the first step.
            options: the group's.
        """
        weight = self._weight
        if weight is None or weight.numel() != weights.numel():
            weight = self._weight = torch.nn.Parameter(weights.clone())
        else:
            weight.copy_(weights)
        weight.grad = gradients
        plain = {key: self._plain(key, value) for key, value in options.items() if key in self._takes}
        if self._instance is None:
            self._instance = self.kind([weight], **plain)
        one = self._instance
        group = one.param_groups[0]
        group.update(plain)
        group["params"] = [weight]
        if states or not isinstance(one, torch.optim.Adagrad | torch.optim.ASGD):
            one.state = defaultdict(dict, {weight: states} if states else {})
        _remove_hooks(type(one).step)(one)
        return weight.detach(), one.state[weight]

    def _plain(self, key: str, value: Any) -> Any:
        if key == "fused":
            return True if self.kind in _FUSED else None
        if key in _IMPLEMENTATIONS:
            return _IMPLEMENTATIONS[key]
        return value.item() if isinstance(value, torch.Tensor) else value
