"""Scaling: how a trial differentiates and steps where its recipe rounds gradients, and what that lost."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import recipes
from ...gradients import AdaptiveGradScaler
from ...recipes import Recipe
from ..tasks import Batch

# Underflow is counted in steps that a scaler measures anyway: every sixteenth, and no more than so many of them.
INTERVAL = 16
SAMPLES = 12

LossOn = Callable[[nn.Module, Batch], Tensor]
Zeros = dict[str, tuple[float, int]]


class Scaling:
    """Plain gradients: the loss is differentiated and the optimizer steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def before(self, step: int) -> None:
        """Before the forward pass of a step."""

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss."""
        loss.backward()

    def step(self) -> None:
        """Step the optimizer."""
        self._optimizer.step()

    def after(self, step: int, loss_on: LossOn, batch: Batch) -> None:
        """After a step, with what its loss was made of."""

    def readings(self) -> dict[str, Any]:
        """What a trial's result says of it."""
        return {}


class Rounded(Scaling):
    """Gradients in the recipe's format: a step that overflows is skipped and counted.

    Underflow is counted in sampled steps, against the same step without rounding: of the gradient elements that are
    not zero there, the share that is stored as zero.
    """

    def __init__(
        self, scaler: AdaptiveGradScaler, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
    ) -> None:
        super().__init__(optimizer)
        self._model = model
        self._scaler = scaler
        self._sample_interval = INTERVAL * max(1, steps // (INTERVAL * SAMPLES))
        self._skipped = 0
        self._lost: dict[str, list[tuple[float, float]]] = {}
        self._copy: nn.Module | None = None

    def before(self, step: int) -> None:
        """At a sampled step, keep the model and the random state that it starts from."""
        self._copy = None
        if step % self._sample_interval == 0:
            self._copy, self._random = copy.deepcopy(self._model), torch.get_rng_state()

    def backward(self, loss: Tensor) -> None:
        """Differentiate the scaled loss."""
        self._scaler.scale(loss).backward()

    def step(self) -> None:
        """Step unless a gradient is not finite, and set the next scales."""
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._skipped += not self._applied()

    def after(self, step: int, loss_on: LossOn, batch: Batch) -> None:
        """At a sampled step, count what underflowed; what overflowed is skipped and shows nothing."""
        if self._copy is None or not self._applied():
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            wanted = _exact_zeros(self._copy, loss_on, batch)
        for key, (zeros, elements) in _zeros(self._scaler).items():
            if key in wanted:
                lost = max(0.0, zeros - wanted[key][0])
                self._lost.setdefault(key, []).append((lost, elements - wanted[key][0]))

    def readings(self) -> dict[str, Any]:
        """Steps skipped, and shares that underflowed: of all sampled elements, and of the worst site's."""
        sites = {key: _share(counts) for key, counts in self._lost.items()}
        worst = max(sites, key=lambda site: sites[site], default=None)
        counts = [pair for pairs in self._lost.values() for pair in pairs]
        mean = _share(counts) if counts else None
        return {
            "skipped": self._skipped,
            "underflow": {"mean": mean, "worst": None if worst is None else sites[worst], "site": worst},
        }

    def close(self) -> None:
        """Give the model its plain forward pass back."""
        self._scaler.detach()

    def _applied(self) -> bool:
        last = self._scaler.last_step
        return last is not None and last.applied


@contextlib.contextmanager
def scaling(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[Scaling]:
    """The recipe's way to differentiate and step, while it trains."""
    scaler = recipes.scaler(recipe, model)
    if scaler is None:
        yield Scaling(optimizer)
        return
    rounded = Rounded(scaler, model, optimizer, steps)
    try:
        yield rounded
    finally:
        rounded.close()


def _exact_zeros(model: nn.Module, loss_on: LossOn, batch: Batch) -> Zeros:
    """Zeros of one step's gradients without rounding, by site."""
    # Rounding to float32's own format changes nothing, and lets zeros be counted.
    plain = AdaptiveGradScaler(model, policy="constant", init_scale=1.0, format="fp32")
    plain.scale(loss_on(model, batch)).backward()
    plain.step(torch.optim.SGD(model.parameters(), lr=0.0))
    plain.update()
    return _zeros(plain)


def _zeros(scaler: AdaptiveGradScaler) -> Zeros:
    """Zeros of the last measured step's gradients, as stored, and how many elements there are, by site."""
    rows = [row for row in scaler.sites() if row.elements]
    return {row.site: (row.zero * row.elements, row.elements) for row in rows if row.zero is not None}


def _share(counts: list[tuple[float, float]]) -> float:
    """What was lost of what could be."""
    whole = sum(could for _, could in counts)
    return sum(lost for lost, _ in counts) / whole if whole else 0.0
