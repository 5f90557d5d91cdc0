"""Plants of long sums in narrow formats."""

import torch
from torch import nn

from .plant import Run, batch, mlp, plant, steps

BF16 = torch.bfloat16


@plant("second-moment-stuck")
def second_moment_stuck(faulty: bool) -> Run:
    """Gradients fall after the first steps; in bfloat16 the second moment does not."""
    dtype = BF16 if faulty else torch.float32
    model = mlp(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    return Run(model, optimizer, steps(model, optimizer, 40, dtype, lambda loss, step: loss * (30 if step < 3 else 1)))


@plant("accumulation-swamped")
def accumulation_swamped(faulty: bool) -> Run:
    """A large penalty goes first into .grad, and swallows the micro-batches that follow."""
    dtype = BF16 if faulty else torch.float32
    model = mlp(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(6):
            sum(parameter.float().mul(30).sum() for parameter in model.parameters()).backward()
            for _ in range(8):
                x, y = batch(dtype)
                nn.functional.mse_loss(model(x).float(), y).mul(0.1).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return Run(model, optimizer, train)


@plant("average-stuck")
def average_stuck(faulty: bool) -> Run:
    """An EMA of the weights in bfloat16."""
    model = mlp()
    ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.999))
    ema.update_parameters(model)
    ema.module.to(BF16 if faulty else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(20):
            steps(model, optimizer, 1)()
            ema.update_parameters(model)

    return Run(model, optimizer, train, {"average": ema})
