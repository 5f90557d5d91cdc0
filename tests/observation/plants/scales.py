"""Plants of loss scales."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .plant import Run, batch, mlp, plant

FP16 = torch.float16


def scaled_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    count: int,
    loss_of: Callable[[Tensor, int], Tensor] = lambda loss, step: loss,
    after: Callable[[int, bool], None] = lambda step, skipped: None,
) -> Callable[[], None]:
    """A loop as torch.amp shows it, in float16; `after` is told the step and whether the scale fell."""

    def train() -> None:
        for step in range(count):
            x, y = batch()
            with torch.autocast("cpu", dtype=FP16):
                out = model(x)
            loss = loss_of(nn.functional.mse_loss(out.float(), y), step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            after(step, scaler.get_scale() < before)
            optimizer.zero_grad()

    return train


@plant("scale-collapsed")
def scale_collapsed(faulty: bool) -> Run:
    """The gradient of a norm at zero is NaN at every scale."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    eps = 0.0 if faulty else 1e-6

    def penalty(loss: Tensor, step: int) -> Tensor:
        return loss if step < 4 else loss + (model[-1].bias * 0).square().sum().add(eps).sqrt()

    return Run(model, optimizer, scaled_steps(model, optimizer, scaler, 24, penalty), {"scaler": scaler})


class LargeGradient(nn.Module):
    """Nothing forward; a large factor on the way back, as a layer with large weights has."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + (x * (1 - self.factor)).detach()


@plant("site-holds-scale")
def site_holds_scale(faulty: bool) -> Run:
    """One layer's gradient is 2^24 larger, so that the scale which it allows is too small for the rest."""
    large, small = LargeGradient(2.0**12 if faulty else 1.0), LargeGradient(2.0**-25 if faulty else 1.0)
    model = nn.Sequential(
        nn.Linear(16, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        small,
        nn.Linear(64, 64),
        nn.Linear(64, 4),
        large,
        nn.Linear(4, 4),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    return Run(model, optimizer, scaled_steps(model, optimizer, scaler, 60), {"scaler": scaler})


@plant("scheduler-on-skips")
def scheduler_on_skips(faulty: bool) -> Run:
    """Every fourth loss overflows; the scheduler steps all the same."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    def after(step: int, skipped: bool) -> None:
        if faulty or not skipped:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()

    def overflow(loss: Tensor, step: int) -> Tensor:
        return loss * torch.inf if step % 4 == 3 else loss

    train = scaled_steps(model, optimizer, scaler, 40, overflow, after)
    return Run(model, optimizer, train, {"scaler": scaler, "scheduler": scheduler})
