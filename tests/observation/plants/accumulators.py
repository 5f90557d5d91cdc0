"""Plants of long sums in narrow formats."""

import torch
from torch import Tensor, nn

import halfulp as hu

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


class Residual(nn.Module):
    """A layer beside a stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


class Times(nn.Module):
    """Embeddings that are scaled up."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@plant("residual-swamped")
def residual_swamped(faulty: bool) -> Run:
    """A stream in bfloat16 whose numbers are thousands of times what layers add."""
    model = nn.Sequential(nn.Linear(16, 64), Times(5000.0 if faulty else 3.0), Residual(64), Residual(64))
    model.extend([nn.LayerNorm(64), nn.Linear(64, 4)]).to(BF16)
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer, 20, BF16))


class Positions(nn.Module):
    """Sines and cosines of positions that are counted in a dtype."""

    def __init__(self, counted: torch.dtype) -> None:
        super().__init__()
        self.counted = counted

    def forward(self, x: Tensor) -> Tensor:
        frequencies = 10000 ** -torch.linspace(0, 1, x.shape[-1] // 2)
        angles = torch.arange(x.shape[-2], dtype=self.counted)[:, None] * frequencies.to(self.counted)
        return torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)


class Tagger(nn.Module):
    def __init__(self, counted: torch.dtype) -> None:
        super().__init__()
        self.inner, self.positions, self.head = nn.Linear(16, 32), Positions(counted), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.head((x + self.positions(x)).relu()).mean(-2)


@plant("positions-collide")
def positions_collide(faulty: bool) -> Run:
    """Positions to 400, in bfloat16 or as integers."""
    model = Tagger(BF16 if faulty else torch.float32).to(BF16)
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(6):
            loss = nn.functional.mse_loss(model(torch.randn(4, 400, 16).to(BF16)).float(), torch.randn(4, 4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return Run(model, optimizer, train)
