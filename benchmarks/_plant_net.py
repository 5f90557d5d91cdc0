"""A small residual network whose layers take weights of any dtype, and what a plant makes of it in three states."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._finding_gpt import Linear, Norm

BLOCKS, WIDTH, INPUTS, OUTPUTS = 6, 32, 8, 4


class Block(nn.Module):
    """A norm and a multilayer perceptron beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(WIDTH)
        inner = {"up": Linear(WIDTH, 2 * WIDTH), "act": nn.GELU(), "down": Linear(2 * WIDTH, WIDTH)}
        self.mlp = nn.Sequential(OrderedDict(inner))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Six blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(INPUTS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = Norm(WIDTH), Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.head(self.norm(self.blocks(self.first(x))))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.function(x)


class FakeQuantize(Function):
    """A quantizer."""


class _Back(torch.autograd.Function):
    """Nothing forward, a factor on the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        """Hand on."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """Multiply."""
        return gradient * ctx.factor, None


class _Sized(torch.autograd.Function):
    """A factor forward, nothing on the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        """Multiply."""
        return x * factor

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """Hand on."""
        return gradient, None


def back(factor: float) -> Function:
    """A module that multiplies gradients alone."""
    return Function(lambda x: _Back.apply(x, factor))


def sized(factor: float) -> Function:
    """A module that multiplies outputs alone."""
    return Function(lambda x: _Sized.apply(x, factor))


def to(dtype: torch.dtype) -> Function:
    """A cast as a module."""
    return Function(lambda x: x.to(dtype))


def batch(step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """The same batch for the same step: a fixed function of random inputs."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, INPUTS, generator=generator)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3:6].sum(1).tanh(), x[:, 6].abs()], 1)


@dataclass
class Setup:
    """A training that is ready to run.

    Attributes:
        model: the network.
        optimizer: its optimizer.
        measure: what is wrong with the run after it, as one number; 0 is nothing.
        steps: how many.
        scale: what a step's loss is multiplied by.
        micro: micro-batches of a step.
        before: called before the micro-batches of a step, and after an optimizer's step.
        after: called after each step.
        scaler: a gradient scaler.
        size: examples of a micro-batch.
        autocast: whether the model runs under float16 autocast.
        watched: what `hu.observe` is given besides.
        prepare: called before the observation.
    """

    model: Net
    optimizer: torch.optim.Optimizer
    measure: Callable[[], float]
    steps: int = 12
    scale: Callable[[int], float] = lambda step: 1.0
    micro: int = 1
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    scaler: torch.amp.GradScaler | None = None
    size: int = 32
    autocast: bool = False
    watched: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Setup], None] = lambda setup: None

    def step(self, number: int) -> None:
        """One step."""
        self.before()
        for part in range(self.micro):
            self.loss(number * self.micro + part, self.scale(number)).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.after()

    def loss(self, number: int, scale: float = 1.0) -> Tensor:
        """The loss of a batch, as it goes backward."""
        x, y = batch(number, self.size)
        with torch.autocast("cpu", torch.float16, enabled=self.autocast):
            out = self.model(x)
        loss = nn.functional.mse_loss(out.float(), y) * scale
        return loss if self.scaler is None else self.scaler.scale(loss)

    def train(self) -> None:
        """All steps."""
        for number in range(self.steps):
            self.step(number)

    def findings(self) -> list[Any]:
        """Train under observation, and return what was found above a note, the worst first."""
        import halfulp as hu

        self.prepare(self)
        with hu.observe(self.model, self.optimizer, interval=3, scaler=self.scaler, **self.watched) as seen:
            self.train()
        return [one for one in seen.findings if one.severity != "note"]


def groups(
    model: nn.Module, special: dict[str, dict[str, Any]], left_out: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Param groups of a model: parameters whose names begin as some do get options of their own, others none at all."""
    named = {name: p for name, p in model.named_parameters() if not (left_out and name.startswith(left_out))}
    own = {name: options for name in named for start, options in special.items() if name.startswith(start)}
    plain = [p for name, p in named.items() if name not in own]
    return [{"params": plain}, *({"params": [named[name]], **options} for name, options in own.items())]


def apart(one: Tensor, other: Tensor) -> float:
    """How far a tensor is from another, over the other's size; infinite where it is not finite."""
    one, other = one.detach().double().flatten(), other.detach().double().flatten()
    if not one.isfinite().all():
        return float("inf")
    size = float(other.norm())
    return float((one - other).norm()) / size if size else float((one - other).norm())


def missing(model: nn.Module, start: nn.Module, twin: nn.Module, name: str) -> float:
    """The share of the movement of a float32 twin that a parameter did not make."""
    moved, wanted = (
        (one.get_parameter(name).detach().double() - start.get_parameter(name).detach().double()).flatten()
        for one in (model, twin)
    )
    return 1 - float(moved @ wanted / (wanted @ wanted))


def float32_twin(model: nn.Module, train: Callable[[nn.Module], None]) -> nn.Module:
    """A float32 copy of a model as it is, after a training."""
    twin = copy.deepcopy(model).float()
    train(twin)
    return twin
