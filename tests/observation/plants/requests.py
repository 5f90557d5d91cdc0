"""Plants of requests that were not met."""

import torch
from torch import nn

from .plant import Run, batch, mlp, plant

BF16 = torch.bfloat16


@plant("state-mismatch")
def state_mismatch(faulty: bool) -> Run:
    """The model is cast after the optimizer has made its states."""
    model = mlp(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(dtype: torch.dtype) -> None:
        x, y = batch(dtype)
        nn.functional.mse_loss(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    if faulty:
        step(BF16)
    model.float()
    return Run(model, optimizer, lambda: [step(torch.float32) for _ in range(10)])
