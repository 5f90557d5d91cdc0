"""Plants of numbers that leave a format's range."""

import torch
from torch import Tensor, nn

from .plant import Run, mlp, plant, steps

FP16 = torch.float16


@plant("eps-zero")
def eps_zero(faulty: bool) -> Run:
    """The default eps of Adam, in float16."""
    dtype = FP16 if faulty else torch.float32
    model = mlp(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer, 6, dtype))


class Computed(nn.Module):
    """Computes layers in a dtype, whatever comes in."""

    def __init__(self, dtype: torch.dtype, *layers: nn.Module) -> None:
        super().__init__()
        self.dtype = dtype
        self.layers = nn.Sequential(*layers).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(self.dtype)).float()


@plant("gradient-underflow")
def gradient_underflow(faulty: bool) -> Run:
    """A float16 layer under a small loss, without a loss scale."""
    dtype = FP16 if faulty else torch.float32
    model = mlp(torch.float32, Computed(dtype, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    return Run(model, optimizer, steps(model, optimizer, loss_of=lambda loss, step: loss * 1e-5))


class Shrunk(nn.Module):
    """Multiplies by a number, and hands gradients on as they are."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * (self.factor - 1)).detach()


@plant("activation-underflow")
def activation_underflow(faulty: bool) -> Run:
    """A float16 layer whose input was scaled far down, and whose output is scaled up again."""
    down = 1e-7 if faulty else 1.0
    model = mlp(torch.float32, Shrunk(down), Computed(FP16, nn.Identity()), Shrunk(1 / down))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer))


class Massive(nn.Module):
    """Puts a large number into one channel, as transformers do with their first tokens."""

    def __init__(self, large: float) -> None:
        super().__init__()
        self.large = large

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.full_like(x[:, :1], self.large), x[:, 1:]], 1)


@plant("overflow-near")
def overflow_near(faulty: bool) -> Run:
    layer = Computed(FP16, Massive(30000.0 if faulty else 3.0))
    model = mlp(torch.float32, layer, Massive(0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Run(model, optimizer, steps(model, optimizer))


class Logarithm(nn.Module):
    """The logarithm of a number that may be negative."""

    def __init__(self, least: float | None) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x if self.least is None else x.clamp(min=self.least))


@plant("first-nonfinite")
def first_nonfinite(faulty: bool) -> Run:
    model = mlp(torch.float32, Logarithm(None if faulty else 0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer))
