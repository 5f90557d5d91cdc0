"""Plants of computations that should agree."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .plant import Run, batch, mlp, plant, steps


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


class Checkpointed(nn.Module):
    """Layers with dropout that run again in the backward pass."""

    def __init__(self, keeps_random_state: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64))
        self.keeps_random_state = keeps_random_state

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False, preserve_rng_state=self.keeps_random_state)


@plant("recompute-differs")
def recompute_differs(faulty: bool) -> Run:
    """Dropout that draws again."""
    model = mlp(torch.float32, Checkpointed(not faulty))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer, 8), {"check": True})


class Narrowed(nn.Module):
    """A cast to bfloat16 and back, which a compiler may leave out."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1.1).to(torch.bfloat16).float() + 0.1


@plant("compiled-differs")
def compiled_differs(faulty: bool) -> Run:
    """Inductor leaves the cast out, unless it is told to keep it."""
    options = {"emulate_precision_casts": not faulty}
    model = mlp()
    model.insert(2, torch.compile(Narrowed(), options=options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer, 8), {"check": True})
