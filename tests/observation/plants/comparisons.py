"""Plants of computations that should agree."""

import torch
from torch import Tensor, nn

from .plant import Run, batch, mlp, plant


class WithLoss(nn.Module):
    """A model that returns its loss, in a dtype."""

    def __init__(self, dtype: torch.dtype, offset: float) -> None:
        super().__init__()
        self.model, self.dtype, self.offset = mlp(), dtype, offset

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (nn.functional.mse_loss(self.model(x), y) + self.offset).to(self.dtype)


@plant("loss-cancels")
def loss_cancels(faulty: bool) -> Run:
    """A constant term in bfloat16 hides what changes."""
    model = WithLoss(torch.bfloat16 if faulty else torch.float32, 300.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(40):
            model(*batch()).backward()
            optimizer.step()
            optimizer.zero_grad()

    return Run(model, optimizer, train)
