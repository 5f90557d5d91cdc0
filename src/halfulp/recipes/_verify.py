"""Proving on a model that a transformation changes nothing but the rounding."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..kernels import same_bits
from ..scaled import ScaledTensor, scalify
from ..tensors import fallbacks
from . import _catalog
from ._recipe import Recipe
from ._record import Recorder, Step, first_difference, plain, relative

# Scales between 2^-SPREAD and 2^SPREAD times the measured one.
SPREAD = 12
# A gradient is right if its bits or, behind a sum in another order, its leading 20 bits are.
NEAR = 1e-6

LossOf = Callable[[Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        technique: What was verified: "scaled".
        gradients: Each parameter's relative difference to plain float32; 0 means equal bits.
        first: The first operator that is not bit-equal, the module or direction it ran in, and by how much; or None.
        fallbacks: Operators without a rule, and how often they ran.
        left_alone: Parameters that the recipe does not change.
        trials: How often it ran, each time under other random scales.
        seed: Of the scales.
    """

    technique: str
    gradients: dict[str, float]
    first: tuple[str, str, float] | None
    fallbacks: dict[str, int]
    left_alone: list[str]
    trials: int
    seed: int

    @property
    def equal(self) -> int:
        """How many gradients have equal bits."""
        return sum(difference == 0 for difference in self.gradients.values())

    @property
    def passed(self) -> bool:
        """Whether every gradient is within 1e-6 of plain float32's and no operator fell back."""
        return all(difference <= NEAR for difference in self.gradients.values()) and not self.fallbacks

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {**dataclasses.asdict(self), "equal": self.equal, "passed": self.passed}

    def __str__(self) -> str:
        worst = max(self.gradients, key=self.gradients.get, default=None)
        said = [f"{self.equal} of {len(self.gradients)} gradients are bit-equal to float32's under random scales"]
        if worst is not None and self.gradients[worst]:
            said.append(f"the farthest is {worst}, by {self.gradients[worst]:.1e} of its norm")
        if self.first:
            operator, place, difference = self.first
            said.append(f"the first operator that differs is {operator} in {place}, by {difference:.1e}")
        for name, count in self.fallbacks.items():
            said.append(f"{name} has no rule and ran on decoded values {count} times")
        if self.left_alone:
            said.append(f"left alone: {', '.join(self.left_alone)}")
        return f"{'passed' if self.passed else 'FAILED'}: " + "; ".join(said)


def verify(
    model: nn.Module,
    batch: Any,
    recipe: Recipe | str,
    *,
    loss: LossOf | None = None,
    trials: int = 2,
    seed: int = 0,
) -> Verification:
    """Compare a model's gradients with plain float32's, in float32 payloads under random power-of-two scales.

    What a recipe changes is the representation; with float32 payloads its values must be float32's own, under any
    scales. Copies of the model run one forward and backward pass each: plain, and with every parameter and input under
    a random scale; the model itself, its gradients and torch's random state stay as they are.

    Args:
        model: with float32 parameters, in the mode (train or eval) that is to be verified.
        batch: what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        recipe: one with a payload, or its name.
        loss: from the model's output to a scalar; by default the output's own ``loss``, or the sum of all floating
            outputs, each element times a fixed random weight.
        trials: how many draws of scales.
        seed: of the scales and weights.

    Raises:
        ValueError: an unknown recipe, a model without float32 parameters, a loss that is no scalar.
        NotImplementedError: a recipe that changes values by design, so that there is nothing to prove.

    >>> print(verify(torch.nn.Linear(3, 2), torch.ones(4, 3), "scaled-fp16"))
    passed: 2 of 2 gradients are bit-equal to float32's under random scales
    """
    recipe = _catalog.get(recipe)
    if not recipe.payload:
        raise NotImplementedError(
            f"recipe {recipe.name!r} rounds by design; verify takes recipes with a payload, such as 'scaled-fp16'"
        )
    if not any(parameter.dtype == torch.float32 for parameter in model.parameters()):
        raise ValueError("the model has no float32 parameters: nothing to verify")
    generator = torch.Generator().manual_seed(seed)
    loss_of = loss or _default_loss(seed)
    wanted, wanted_steps = _step(copy.deepcopy(model), batch, loss_of)
    gradients = dict.fromkeys(wanted, 0.0)
    first, counts, left = None, {}, []
    for _ in range(trials):
        other = scalify(copy.deepcopy(model), torch.float32, rescale="norms")
        left = [name for name, p in other.named_parameters() if not isinstance(p, ScaledTensor)]
        _shift(other.parameters(), generator)
        got, steps = _step(other, _under_scales(batch, generator), loss_of)
        for name, value in wanted.items():
            difference = _difference(value, got.get(name))
            gradients[name] = max(gradients[name], difference)
        first = first or first_difference(wanted_steps, steps)
        for name, count in fallbacks(other).items():
            counts[name] = counts.get(name, 0) + count
    return Verification("scaled", gradients, first, counts, left, trials, seed)


def _step(model: nn.Module, batch: Any, loss_of: LossOf) -> tuple[dict[str, Tensor | None], list[Step]]:
    """The gradients of one step, decoded, and what its operators gave."""
    model.zero_grad()
    with torch.random.fork_rng(), Recorder(model) as recorder:
        torch.manual_seed(0)
        loss = loss_of(_called(model, batch))
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: give a scalar, loss=lambda output: ...")
        loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: None if grad is None else plain(grad) for name, grad in trained.items()}, recorder.steps


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _default_loss(seed: int) -> LossOf:
    """The output's own loss, or its elements under fixed random weights."""

    def loss_of(output: Any) -> Tensor:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if own is not None:
            return own
        generator = torch.Generator().manual_seed(seed)
        leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        floats = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]
        if not floats:
            raise ValueError("no floating output depends on the parameters: give loss=lambda output: ...")
        return sum((x * torch.randn(x.shape, generator=generator).to(x.device)).sum() for x in floats)

    return loss_of


def _under_scales(batch: Any, generator: torch.Generator) -> Any:
    def scaled(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        return _moved(ScaledTensor.encode(x.detach(), torch.float32), generator)

    if isinstance(batch, Mapping):
        # Masks stay plain, as at the door of every scaled model.
        return {name: x if "mask" in name else tree_map(scaled, x) for name, x in batch.items()}
    return tree_map(scaled, batch)


def _shift(parameters: Any, generator: torch.Generator) -> None:
    for parameter in parameters:
        if isinstance(parameter, ScaledTensor):
            parameter.data = _moved(parameter.data, generator)


def _moved(x: ScaledTensor, generator: torch.Generator) -> ScaledTensor:
    power = int(torch.randint(-SPREAD, SPREAD + 1, (), generator=generator))
    return x.with_scale((x.scale * 2.0**power).clamp(2.0**-126, 2.0**127)).detach()


def _difference(wanted: Tensor | None, got: Tensor | None) -> float:
    if wanted is None or got is None:
        return 0.0 if wanted is got else float("inf")
    return 0.0 if same_bits(wanted, got) else relative(wanted, got)
