"""Plants of quantizers."""

import torch
from torch import Tensor, nn

from .plant import Run, mlp, plant, steps


class FakeQuantize(nn.Module):
    """Rounds to multiples of a step, with a straight-through gradient."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.round(x / self.step) * self.step - x).detach()


@plant("quantized-to-zero")
def quantized_to_zero(faulty: bool) -> Run:
    """A step that was calibrated on other data."""
    model = mlp(torch.float32, FakeQuantize(100.0 if faulty else 0.01))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer))


class Float8(nn.Module):
    """Stores its input as e4m3, divided by a scale that does not change."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (x / self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)


class Decoded(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.scale


@plant("payload-saturated")
def payload_saturated(faulty: bool) -> Run:
    """A scale from before the activations grew."""
    scale = 2.0**-9 if faulty else 2.0**-6
    model = mlp(torch.float32, Float8(scale), Decoded(scale))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer))


@plant("block-hidden")
def block_hidden(faulty: bool) -> Run:
    """One massive channel in each block of 32."""
    model = mlp()
    with torch.no_grad():
        model[0].bias[::32] += 1000.0 if faulty else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer, 8), {"quantized": {"0": "mxfp4" if faulty else "mxfp8_e4m3"}})


@plant("gradient-below-noise")
def gradient_below_noise(faulty: bool) -> Run:
    """Four bits with one scale for all, and with a scale for each block."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer, 8), {"quantized": {"3": "e2m1fn" if faulty else "mxfp8_e4m3"}})
