"""Plants: small trainings that have one fault, each with a healthy twin."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import halfulp as hu


@dataclass
class Run:
    """A training that is ready to run; `watched` is what `hu.observe` is given beside model and optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Callable[[], None]
    watched: dict[str, Any] = field(default_factory=dict)

    def findings(self) -> list[hu.observation.Finding]:
        """Train under observation."""
        with hu.observe(self.model, self.optimizer, interval=4, **self.watched) as seen:
            self.train()
        return seen.findings


@dataclass
class Measured:
    """What another instrument measures."""

    findings: Callable[[], list[hu.observation.Finding]]


Make = Callable[[bool], Run | Measured]
PLANTS: dict[str, Make] = {}


def plant(code: str) -> Callable[[Make], Make]:
    """List a function that makes the run with the fault of a code (True), or its healthy twin (False)."""

    def enter(make: Make) -> Make:
        assert code not in PLANTS
        PLANTS[code] = make
        return make

    return enter


def mlp(dtype: torch.dtype = torch.float32, *between: nn.Module, width: int = 64) -> nn.Sequential:
    """Two layers and a norm of a dtype, and what stands between them."""
    first, norm, last = (layer.to(dtype) for layer in (nn.Linear(16, width), nn.LayerNorm(width), nn.Linear(width, 4)))
    return nn.Sequential(first, norm, *between, nn.ReLU(), last)


def batch(dtype: torch.dtype = torch.float32, size: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 16).to(dtype), torch.randn(size, 4)


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    count: int = 20,
    dtype: torch.dtype = torch.float32,
    loss_of: Callable[[Tensor, int], Tensor] = lambda loss, step: loss,
) -> Callable[[], None]:
    """A plain loop on fresh batches."""

    def train() -> None:
        for step in range(count):
            x, y = batch(dtype)
            loss = nn.functional.mse_loss(model(x).float(), y)
            loss_of(loss, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train
