"""Proving on a model that a transformation changes nothing but the rounding."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..._messages import a_kind
from ...gradients import AdaptiveGradScaler
from ...mctensor import MCTensor
from ...scaled import ScaledTensor, scalify
from ...subclass import fallbacks
from .. import _catalog
from .._recipe import Recipe
from ._agreement import agrees
from ._copies import copy_of, untouched
from ._operator_record import Difference, OperatorCheck
from ._training_step import LossOf, Run, default_loss, difference, in_float64, one_step, pairs, reference
from ._verify_exponents import verify_exponents

# Scales between 2^-SPREAD and 2^SPREAD times the measured one.
SPREAD = 12
# How many wrong results a report names.
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        technique: What was verified: "scaled" or "gradients".
        gradients: Relative difference to plain float32 of each parameter that has a gradient; 0 means equal bits.
        values: The same of the loss, the floating outputs and the floating buffers.
        wrong: Which gradients, values and operators differ by more than another order of sums explains.
        first: The first operator that is wrong, or else the first whose bits are not those of torch's own on the same
            operands: its name, the module or direction it ran in, and by how much; or None.
        fallbacks: Operators without a rule, and how often they ran.
        unused: Parameters that train but have no gradient in plain float32; nothing was compared there.
        left_alone: Parameters that the recipe does not change.
        left_out: What the recipe rounds by design, which is no part of the run: "eight-bit products"; or None.
        trials: How often it ran, each time under other random scales or exponents.
        seed: Of the scales.
        merged: Gradient sites that were not exact by themselves, and now follow the global exponent.
        replays: How many of the forward passes under random exponents were not watched, as their graph was known, like
            most of a training's; None under scales, and 0 where it is not the same from pass to pass.
    """

    technique: str
    gradients: dict[str, float]
    values: dict[str, float]
    wrong: list[str]
    first: tuple[str, str, float] | None
    fallbacks: dict[str, int]
    unused: list[str]
    left_alone: list[str]
    left_out: str | None
    trials: int
    seed: int
    merged: list[str] = dataclasses.field(default_factory=list)
    replays: int | None = None

    @property
    def equal(self) -> int:
        """How many gradients have equal bits."""
        return sum(difference == 0 for difference in self.gradients.values())

    @property
    def passed(self) -> bool:
        """Whether all results equal plain float32's, up to the order of sums, and no operator fell back."""
        return not self.wrong and not self.fallbacks

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; a difference that is not finite is None."""
        data = {**dataclasses.asdict(self), "equal": self.equal, "passed": self.passed}
        for kind in ("gradients", "values"):
            data[kind] = {name: _finite(difference) for name, difference in data[kind].items()}
        data["first"] = [*self.first[:2], _finite(self.first[2])] if self.first else None
        return data

    def __str__(self) -> str:
        worst = max(self.gradients, key=lambda name: self.gradients[name], default=None)
        under = "exponents" if self.technique == "gradients" else "scales"
        said = [f"{self.equal} of {len(self.gradients)} gradients are bit-equal to float32's under random {under}"]
        if worst is not None and self.gradients[worst]:
            said.append(f"the farthest is {worst}, by {self.gradients[worst]:.1e} of its norm")
        if self.wrong:
            more = f" and {len(self.wrong) - _SHOWN} more" if len(self.wrong) > _SHOWN else ""
            said.append(f"not float32's: {', '.join(self.wrong[:_SHOWN])}{more}")
        if self.first:
            operator, place, difference = self.first
            said.append(f"the first operator that differs is {operator} in {place}, by {difference:.1e}")
        for name, count in self.fallbacks.items():
            said.append(f"{name} has no rule and ran on decoded values {count} times")
        if self.unused:
            said.append(f"without a gradient: {', '.join(self.unused)}")
        if self.left_alone:
            said.append(f"left alone: {', '.join(self.left_alone)}")
        if self.merged:
            said.append(f"merged into the global exponent, as not exact by themselves: {', '.join(self.merged)}")
        if self.passed and self.replays == 0:
            said.append("its graph is another at each pass or has parts that must be watched, as in every pass here")
        head = "passed" if self.passed else "FAILED"
        if self.left_out:
            head += f" ({self.left_out} left out, as no part of the proof)"
        return f"{head}: " + "; ".join(said)


def verify(
    model: nn.Module,
    batch: Any,
    recipe: Recipe | str | AdaptiveGradScaler,
    *,
    loss: LossOf | None = None,
    trials: int = 2,
    seed: int = 0,
) -> Verification:
    """Compare a model's gradients with plain float32's, under random power-of-two scales or gradient exponents.

    What a recipe changes is the representation; in float32 its values must be float32's own, under any scales. Copies
    of the model run one forward and backward pass each: plain, and with every parameter (`halfulp.scalify`) or every
    gradient site (`halfulp.AdaptiveGradScaler`) under a random scale; of gradient sites one copy runs four steps
    besides, as forward passes whose graph is known are not watched. The model itself, its gradients and torch's random
    state stay as they are.

    Args:
        model: with float32 parameters, in the mode (train or eval) that is to be verified.
        batch: what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        recipe: one with a payload or a gradient scale, or its name; or the model's AdaptiveGradScaler, in which sites
            that turn out not to be exact by themselves are merged into the global one.
        loss: from the model's output to a scalar; by default the output's own ``loss``, or the sum of all floating
            outputs, each element times a fixed random weight.
        trials: how many draws of scales, at least 1.
        seed: of the scales and weights.

    Raises:
        ValueError: an unknown recipe, trials < 1, a model without float32 parameters or with tensors of halfulp's in
            their place, a loss that is no scalar, or nothing to compare with: in plain float32 no parameter has a
            gradient, or the loss or a gradient is not finite.
        TypeError: a model that is no nn.Module, a loss that is no function or gives no tensor.
        NotImplementedError: a recipe that changes values by design, so that there is nothing to prove.

    >>> print(verify(torch.nn.Linear(3, 2), torch.ones(4, 3), "scaled-fp16"))
    passed: 2 of 2 gradients are bit-equal to float32's under random scales
    """
    if isinstance(recipe, AdaptiveGradScaler):
        _check(model, loss, trials)
        return Verification(**verify_exponents(model, batch, recipe, loss or default_loss(seed), trials, seed))
    recipe = _catalog.get(recipe)
    if recipe.gradient_scale is not None:
        _check(model, loss, trials)
        return Verification(**verify_exponents(model, batch, None, loss or default_loss(seed), trials, seed))
    if not recipe.payload:
        raise NotImplementedError(
            f"recipe {recipe.name!r} rounds by design; verify takes recipes with a payload or a gradient scale, such "
            "as 'scaled-fp16' and 'fp16-adaptive'"
        )
    _check(model, loss, trials)
    with untouched(model):
        return _under_scales(model, batch, recipe, loss or default_loss(seed), trials, seed)


def _under_scales(
    model: nn.Module, batch: Any, recipe: Recipe, loss_of: LossOf, trials: int, seed: int
) -> Verification:
    generator = torch.Generator().manual_seed(seed)
    wanted = reference(model, batch, loss_of)
    exact: Run | None = None
    gradients = {name: 0.0 for name, value in wanted.gradients.items() if value is not None}
    values = dict.fromkeys(wanted.values, 0.0)
    wrong: dict[str, None] = {}
    first: Difference | None = None
    unequal: Difference | None = None
    counts: dict[str, int] = {}
    left: list[str] = []
    for _ in range(trials):
        other = scalify(copy_of(model), torch.float32, rescale="norms", wide="none")
        left = [name for name, p in other.named_parameters() if not isinstance(p, ScaledTensor)]
        _shift(other.parameters(), generator)
        check = OperatorCheck(other)
        got = one_step(other, batch, loss_of, watch=check)
        if exact is None and any(difference(*both) for both in pairs(wanted, got).values()):
            exact = in_float64(model, batch, loss_of, wanted) or _NOWHERE
        _gather(gradients, values, wanted, got)
        operators = [f"operator {one.operator} in {one.place}" for one in check.wrong]
        wrong |= dict.fromkeys([*_wrong(wanted, got, exact or _NOWHERE), *operators])
        first, unequal = first or next(iter(check.wrong), None), unequal or check.unequal
        for name, count in fallbacks(other).items():
            counts[name] = counts.get(name, 0) + count
    left_out = "eight-bit products" if recipe.matmul else None
    return Verification(
        "scaled",
        gradients,
        values,
        list(wrong),
        first or unequal,
        counts,
        _unused(wanted),
        left,
        left_out,
        trials,
        seed,
    )


# Of a model that does not run in float64.
_NOWHERE = Run({}, {})


def _gather(gradients: dict[str, float], values: dict[str, float], wanted: Run, got: Run) -> None:
    """Keep the largest difference of each gradient and value."""
    for kept, ours, theirs in ((gradients, wanted.gradients, got.gradients), (values, wanted.values, got.values)):
        for name in {**ours, **theirs}:
            off = difference(ours.get(name), theirs.get(name))
            if name in kept or off:
                kept[name] = max(kept.get(name, 0.0), off)


def _wrong(wanted: Run, got: Run, exact: Run) -> list[str]:
    """Which values and gradients do not agree."""
    known = pairs(exact, exact)
    return [
        name
        for name, (ours, theirs) in pairs(wanted, got).items()
        if not agrees(ours, theirs, known.get(name, (None,))[0])
    ]


def _check(model: nn.Module, loss: LossOf | None, trials: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {a_kind(model)}: give a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise TypeError(f"the loss is {a_kind(loss)}: give a function, loss=lambda output: ...")
    if trials < 1:
        raise ValueError(f"trials={trials}: give at least 1, as no trial proves nothing")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, (ScaledTensor, MCTensor)):
            kind, back = type(parameter).__name__, "halfulp.scaled.unscalify(copy.deepcopy(model))"
            if isinstance(parameter, MCTensor):
                back = "halfulp.mctensor.single_component(copy.deepcopy(model), torch.float32)"
            raise ValueError(f"parameter {name!r} is a {kind}: verify takes the plain float32 model, {back}")
    if not any(parameter.dtype == torch.float32 for parameter in model.parameters()):
        raise ValueError("the model has no float32 parameters: nothing to verify")


def _shift(parameters: Any, generator: torch.Generator) -> None:
    for parameter in parameters:
        data = parameter.data
        if isinstance(data, ScaledTensor):
            parameter.data = _moved(data, generator)


def _moved(x: ScaledTensor, generator: torch.Generator) -> Tensor:
    power = int(torch.randint(-SPREAD, SPREAD + 1, (), generator=generator, dtype=torch.int64, device="cpu"))
    return x.with_scale((x.scale * 2.0**power).clamp(2.0**-126, 2.0**127)).detach()


def _unused(run: Run) -> list[str]:
    return [name for name, value in run.gradients.items() if value is None]


def _finite(difference: float) -> float | None:
    return difference if math.isfinite(difference) else None
