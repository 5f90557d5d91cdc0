"""Loss change allocation: which parameter's movement, and which one's rounding, changed the loss by how much."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .._messages import name_type
from ..emulation import Emulation
from ..optim import Optimizer
from ..optim._float32 import read_float32_weights
from ..optim.step._kernel import compute_rule_change
from ..recipes import revert
from ..recipes._convert import is_converted
from .observing._updates import (
    DECOUPLES_DECAY_BY_OPTIMIZER_CLASS,
    WHOLE_TENSOR_STATE_NAMES,
    ShadowOptimizer,
    has_elementwise_rule,
    has_float32_weight,
    is_in_step_of_subclass,
    read_scaler_attributes,
    run_before_update,
)

_MOST_SIMPSON_INTERVALS = 32
_INTEGRATION_TOLERANCE = 0.25e-3

LossFunction = Callable[[nn.Module], Tensor]
NameTensorPairs = dict[str, Tensor]


@dataclass
class ParameterShare:
    """The `change` of the loss that one parameter's movement has made: sum (w' - w) . g, below 0 where it helped.

    `rounding` is the part that rounding has made of it.
    """

    name: str
    elements: int
    change: float = 0.0
    rounding: float = 0.0


class LossAllocation:
    """The result of `allocate_loss`: a context manager that follows a training, and tables what it has seen.

    Attributes:
        shares: one `ParameterShare` for each parameter that trains, by name.
        first, last: the loss at the start and now.
        steps, unsplit: optimizer steps, and those whose rounding is not known, which count as movement alone.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: LossFunction) -> None:
        self._optimizer, self._loss = optimizer, loss
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._name_by_id = {id(p): name for name, p in self._trained.items()}
        self._float64_model = _make_float64_copy(model)
        self._float64_parameters = dict(self._float64_model.named_parameters())
        self.shares: dict[str, ParameterShare] = {
            name: ParameterShare(name, p.numel()) for name, p in self._trained.items()
        }
        self.first: float = math.nan
        self.last: float = math.nan
        self.steps: int = 0
        self.unsplit: int = 0
        self._unrounded_changes: NameTensorPairs | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> LossAllocation:
        if self._handles:
            raise RuntimeError("this allocation follows a training already: leave its block before you enter it again")
        self._point = self._copy_weights()
        self.last, self._gradient = self._compute_loss_and_gradient(self._point)
        if math.isnan(self.first):
            self.first = self.last
        self._handles = [
            self._optimizer.register_step_pre_hook(self._handle_step_begin),
            self._optimizer.register_step_post_hook(self._allocate_step),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    @property
    def change(self) -> float:
        """The loss now less the loss at the start."""
        return self.last - self.first

    @property
    def allocated(self) -> float:
        """The sum of all parameters' shares, which is `change` but for the error of integration."""
        return math.fsum(share.change for share in self.shares.values())

    @property
    def error(self) -> float:
        """The distance of `allocated` from `change`, as a share of `change`."""
        return abs(self.allocated - self.change) / abs(self.change) if self.change else abs(self.allocated)

    def _handle_step_begin(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if is_in_step_of_subclass(optimizer):
            return None
        self._unrounded_changes = None
        return run_before_update(self._record_unrounded_changes, args, kwargs)

    @torch.no_grad()
    def _record_unrounded_changes(self) -> None:
        """Note the changes that a step would make without rounding the weights, by name; None where one is unknown."""
        self._before = self._copy_weights()
        wanted: NameTensorPairs = {}
        divisor, is_skipped = read_scaler_attributes(self._optimizer)
        for group in self._optimizer.param_groups if not is_skipped else ():
            for parameter in group["params"]:
                name = self._name_by_id.get(id(parameter))
                if name is None or parameter.grad is None:
                    continue
                change = _compute_unrounded_change(self._optimizer, group, parameter, divisor)
                if change is None:
                    return
                wanted[name] = change.to("cpu", torch.float64).view(parameter.shape)
        self._unrounded_changes = wanted

    def _allocate_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Allocate the change of the loss from the last point to the present weights."""
        if is_in_step_of_subclass(optimizer):
            return
        self.steps += 1
        self.unsplit += self._unrounded_changes is None
        end = self._copy_weights()
        start, moved = self._point, {name: end[name] - self._point[name] for name in end}
        loss, after = self._compute_loss_and_gradient(end)
        # Composite Simpson: (g_0 + 4 (g_1 + g_3 + ...) + 2 (g_2 + g_4 + ...) + g_n) / 3n, n doubled until the sum fits.
        odd: NameTensorPairs = {}
        even, parts = {name: torch.zeros_like(step) for name, step in moved.items()}, 1
        total, wanted = math.inf, loss - self.last
        while parts < _MOST_SIMPSON_INTERVALS and abs(total - wanted) > _INTEGRATION_TOLERANCE * abs(wanted):
            parts *= 2
            even = {name: even[name] + odd[name] for name in odd} or even
            points = [{n: start[n] + moved[n] * (k / parts) for n in end} for k in range(1, parts, 2)]
            inner = [self._compute_loss_and_gradient(point)[1] for point in points]
            odd = {name: sum((g[name] for g in inner), torch.zeros_like(end[name])) for name in end}
            mean = {n: (self._gradient[n] + 4 * odd[n] + 2 * even[n] + after[n]) / (3 * parts) for n in end}
            total = math.fsum(float((mean[name] * moved[name]).sum()) for name in end)
        for name, share in self.shares.items():
            share.change += float((mean[name] * moved[name]).sum())
            if self._unrounded_changes is not None:
                stepped = end[name] - self._before[name]  # without what others wrote since the last step
                share.rounding += float((mean[name] * (stepped - self._unrounded_changes.get(name, 0.0))).sum())
        self._point, self.last, self._gradient = end, loss, after

    def _copy_weights(self) -> NameTensorPairs:
        return {name: p.detach().to("cpu", torch.float64, copy=True) for name, p in self._trained.items()}

    def _compute_loss_and_gradient(self, point: NameTensorPairs) -> tuple[float, NameTensorPairs]:
        """Return the loss and its gradient at some weights, on the float64 copy."""
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            for name, value in point.items():
                self._float64_parameters[name].data.copy_(value)
            loss = self._loss(self._float64_model)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise TypeError(
                    f"loss= returned {name_type(loss)}: return the scalar loss of the model that it is given"
                )
            if not bool(loss.isfinite()):
                raise ValueError(f"the loss is {loss.item()}: there is no change of it to allocate")
            if math.isnan(self.first):
                _refuse_reentrant_checkpoints(loss)
            # Not backward(), which would add to the gradients of whatever else trains that the function reads.
            made = torch.autograd.grad(loss, [self._float64_parameters[name] for name in point], allow_unused=True)
        if all(gradient is None for gradient in made):
            raise ValueError(
                "loss= depends on no trained parameter of the model that it is given: use its argument, not the model "
                "outside"
            )
        gradients = zip(point, made, strict=True)
        return float(loss.detach()), {n: torch.zeros_like(point[n]) if g is None else g.cpu() for n, g in gradients}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold; None before the start."""
        keys = ("first", "last", "change", "allocated", "error", "steps", "unsplit")
        whole: dict[str, Any] = {key: getattr(self, key) for key in keys}
        plain = {key: None if math.isnan(value) else value for key, value in whole.items()}
        return {**plain, "shares": [vars(share) for share in self.shares.values()]}

    def __str__(self) -> str:
        """Return a table of the parameters, the largest cost of rounding first."""
        lines = [
            f"loss {self.first:.6g} -> {self.last:.6g} in {self.steps} steps: change {self.change:+.4g}, allocated "
            f"{self.allocated:+.4g} ({self.error:.3%} off)"
        ]
        width = max(map(len, self.shares))
        lines.append(f"  {'parameter':{width}}  {'change':>11}  {'by rounding':>11}")
        for share in sorted(self.shares.values(), key=lambda share: -share.rounding):
            lines.append(f"  {share.name:{width}}  {share.change:>+11.3g}  {share.rounding:>+11.3g}")
        if self.unsplit:
            lines.append(f"  rounding is not known in {self.unsplit} of {self.steps} steps, which count as movement")
        return "\n".join(lines)


def allocate_loss(model: nn.Module, optimizer: torch.optim.Optimizer, loss: LossFunction) -> LossAllocation:
    """Follow a training, and allocate the change of a loss to the parameters, and to the rounding of their updates.

    Loss change allocation (Lan, Liu, Zhou and Yosinski, arXiv 1909.01440): by the fundamental theorem of calculus

        L(w_T) - L(w_0) = sum over steps t and parameters i of (w_{t+1,i} - w_{t,i}) g_{t,i},

    where g is the mean of grad L along the straight line from w_t to w_{t+1}. It is taken by Simpson's rule in
    float64, on parts that are halved (at most 32) until their sum is the change of the loss to .025%. With
    w_{t+1} - w_t = wanted + e, where "wanted" is what the optimizer's rule makes of the same gradients and states
    without rounding the weight, the part e g is what rounding has cost: above 0 it raised the loss.

    Wanted changes are computed for optimizers of `halfulp.optim` (from their second step on) and torch's element-wise
    ones; of others the whole movement is one. Nothing that training computes changes.

    Args:
        model: of plain parameters, in any dtypes; a model under `halfulp.convert` too.
        optimizer: that steps it.
        loss: a function of a model that returns the scalar loss over as many data as time allows, the same at each
            call. It is called at least twice per step with a float64 copy of the model, made once, in evaluation mode,
            whose floating inputs are cast.

    Returns:
        A context manager, which prints as a table.

    Raises:
        TypeError: no module or optimizer, or parameters that are tensor subclasses.
        ValueError: no parameter trains, or an emulated model, whose loss is a step function; on entry, a loss that does
            not depend on its argument.
        NotImplementedError: on entry, a loss through torch's checkpoints with use_reentrant=True.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> x = torch.linspace(-1, 1, 32).view(8, 4)
    >>> with hu.observation.allocate_loss(model, optimizer, lambda m: (m(x) - 1).square().mean()) as costs:
    ...     for _ in range(5):
    ...         optimizer.zero_grad()
    ...         (model(x) - 1).square().mean().backward()
    ...         optimizer.step()
    >>> costs.change < 0, costs.error < 1e-3, abs(costs.shares["weight"].rounding) < 1e-6
    (True, True, True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"allocate_loss takes a torch.nn.Module, got {name_type(model)}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"allocate_loss takes a torch optimizer, got {name_type(optimizer)}")
    if any(isinstance(vars(module).get("forward"), Emulation) for module in model.modules()):
        raise ValueError(
            "the model is emulated, and its loss a step function, whose gradient says nothing about its changes: end "
            "the emulation (its remove()) and give the plain model"
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model trains: there is no movement to allocate")
    for parameter in trained:
        if type(parameter) not in (nn.Parameter, Tensor) or type(parameter.data) is not Tensor:
            raise TypeError(f"allocate_loss takes plain parameters, got {name_type(parameter.data)}")
    return LossAllocation(model, optimizer, loss)


def _compute_unrounded_change(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, divisor: float
) -> Tensor | None:
    gradient = parameter.grad
    assert gradient is not None, "it steps"
    if isinstance(optimizer, Optimizer):
        plan, rule = optimizer._plans.get(parameter), optimizer.rule(group)
        if plan is None or plan.spec.has_components_in_parameter or not has_elementwise_rule(plan, rule):
            return None
        weight = read_float32_weights([plan])[0] if has_float32_weight(plan) else parameter.detach()
        decoded = [codec.decode(tensors).view(weight.shape) for codec, tensors in zip(plan.spec.codecs, plan.states)]
        values = rule.values(group, plan.state["step"] + 1)
        return compute_rule_change(rule, weight, gradient, decoded, values)[0]
    if type(optimizer) not in DECOUPLES_DECAY_BY_OPTIMIZER_CLASS:
        return None
    weight = parameter.detach().double().reshape(-1)
    states = {
        key: value.detach().clone()
        if key in WHOLE_TENSOR_STATE_NAMES or not isinstance(value, Tensor)
        else value.double().reshape(-1)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    after, _ = ShadowOptimizer(optimizer).step(weight, gradient.double().reshape(-1) / divisor, states, options)
    return after - weight


def _refuse_reentrant_checkpoints(loss: Tensor) -> None:
    """Refuse checkpoints whose parameters are in no graph, so that torch.autograd.grad would give them no gradient."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise NotImplementedError(
                "the loss goes through torch.utils.checkpoint with use_reentrant=True, which gives gradients to "
                "backward() alone: pass use_reentrant=False, or leave checkpoints out in evaluation mode"
            )
        waiting += [before for before, _ in node.next_functions]


def _make_float64_copy(model: nn.Module) -> nn.Module:
    """Return a float64 copy in evaluation mode, whose floating inputs are cast."""
    wide = copy.deepcopy(model)
    if is_converted(wide):
        revert(wide)
    wide.double().eval()

    def cast_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs))

    wide.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    return wide
