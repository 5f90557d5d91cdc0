"""A copy of a model trained for a few steps under a recipe, observed, with what it gave first."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import recipes
from .._messages import a_kind
from ..emulation import emulate
from ..mctensor import MCTensor
from ..observation import Finding, observe
from ..recipes import Recipe
from ..recipes._training_step import LossOf, call_model, same_randomness
from ..scaled import ScaledTensor

# A scale of 2^16 halves as often before it is 1; iterations that are skipped are no steps.
MOST_SKIPPED = 24


@dataclasses.dataclass
class ShortTraining:
    """The losses, gradients and findings of a few training steps.

    Attributes:
        losses: of each step that was taken.
        terms: of each loss that is computed in plain float32, the norm of the outputs times its derivatives by them.
        outputs: floating outputs of the first, in float64.
        gradients: of the first, by parameter, in float64.
        findings: what observing them showed.
        skipped: iterations whose gradients were not finite.
        unseen: sentences that say what could not be observed.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    terms: list[float] = dataclasses.field(default_factory=list)
    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    skipped: int = 0
    unseen: list[str] = dataclasses.field(default_factory=list)


def run_short_training(
    model: nn.Module,
    batch: Any,
    recipe: Recipe,
    loss_of: LossOf,
    rule: str,
    hyper: dict[str, Any],
    steps: int,
    seed: int,
) -> ShortTraining:
    """Convert a model, which is a copy, and train it on one batch, with the same random numbers in each step."""
    recipes.convert(model, recipe, seed=seed)
    optimizer = recipes.optimizer(model, rule, seed=seed, **hyper)
    scaler = recipes.scaler(recipe, model)
    is_plain = recipe == recipes.get("fp32")
    found = ShortTraining()
    seen = observe(model, optimizer, interval=1, scaler=scaler)
    with _arithmetic(recipe, model, loss_of) as loss_under, seen:
        while len(found.losses) < steps and found.skipped < MOST_SKIPPED:
            with same_randomness():
                output = call_model(model, batch)
                loss = loss_under(output)
                _check_loss(loss)
                leaves = tree_leaves(output if not hasattr(output, "items") else dict(output))
                outputs = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
                terms = _measure_terms(loss, outputs) if is_plain else 0.0
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            first = not found.losses
            gradients = _gradients(model) if first else {}
            seen.log_loss(_plain(loss))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if scaler is not None and scaler.last_step is not None and not scaler.last_step.applied:
                found.skipped += 1
                continue
            if first:
                found.outputs, found.gradients = [*map(_plain, outputs)], gradients
            found.losses.append(float(_plain(loss)))
            found.terms.append(terms)
    if scaler is not None:
        scaler.detach()
    found.findings, found.unseen = seen.findings, seen.record.unseen
    return found


@contextlib.contextmanager
def _arithmetic(recipe: Recipe, model: nn.Module, loss_of: LossOf) -> Iterator[Callable[[Any], Tensor]]:
    """Put the model under the recipe's emulation, if it has one; gives the loss under the same."""
    if recipe.emulate is None:
        yield loss_of
        return
    with emulate(model, recipe.emulate) as emulation:

        def rounded(output: Any) -> Tensor:
            with emulation.region():
                return loss_of(output)

        yield rounded


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else a_kind(loss)
        raise ValueError(f"under the recipe the loss gave {given}: give a scalar, loss=lambda output: ...")


def _measure_terms(loss: Tensor, outputs: list[Tensor]) -> float:
    """Return the norm of the terms x dL/dx: how far the loss moves if each output is off by as much as its own size.

    Terms of both signs may cancel in the loss, and errors of the outputs do not.
    """
    moving = [x for x in outputs if x.requires_grad]
    if not moving or not loss.requires_grad:
        return 0.0
    derivatives = torch.autograd.grad(loss, moving, retain_graph=True, allow_unused=True)
    terms = [(_plain(x) * _plain(d)).norm() for x, d in zip(moving, derivatives) if d is not None]
    return math.hypot(*map(float, terms))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: _plain(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _plain(x: Tensor) -> Tensor:
    """Return the values in float64."""
    x = x.detach()
    return x.decode(torch.float64) if isinstance(x, ScaledTensor | MCTensor) else x.to(torch.float64, copy=True)
