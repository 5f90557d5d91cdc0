"""Healthy trainings of eight models, in float32 and in mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ._finding_gpt import GPT, tokens

Batch = Callable[[], tuple[Tensor, Tensor]]
STEPS = 40


class LastOutput(nn.Module):
    """The last output of an LSTM, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, num_layers=2, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.head(self.lstm(x)[0][:, -1])


class Residual(nn.Module):
    """Two convolutions beside a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return torch.relu(x + self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


def _classes(*shape: int) -> Batch:
    centres = torch.randn(10, *shape)

    def batch() -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 10, (32,))
        return centres[y] + 0.7 * torch.randn(32, *shape), y

    return batch


def _regression() -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 12, 8)
    return x, x.mean((1, 2)).mul(3)[:, None]


def _same() -> tuple[Tensor, Tensor]:
    x = torch.rand(32, 64)
    return x, x


def _language() -> tuple[Tensor, Tensor]:
    given = tokens()
    return given[:, :-1], given[:, 1:]


def _words() -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 1000, (32, 20))
    return x, (x.sum(1) % 10)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(12 * 32, 1))


def _models() -> dict[str, tuple[nn.Module, Batch, bool]]:
    """Each with its batches, and whether it is trained by SGD."""
    first, last = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(64, 10)
    perceptron = nn.Sequential(*first, nn.Linear(64, 64), nn.GELU(), last)
    convolution = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 9, 10)
    )
    residual = nn.Sequential(
        nn.Conv2d(1, 12, 3), Residual(12), Residual(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10)
    )
    autoencoder = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8), nn.Linear(8, 64), nn.Sigmoid())
    bag = nn.Sequential(nn.EmbeddingBag(1000, 32), nn.LayerNorm(32), nn.Linear(32, 10))
    return {
        "perceptron": (perceptron, _classes(20), False),
        "convolutions": (convolution, _classes(1, 8, 8), True),
        "residual network": (residual, _classes(1, 8, 8), True),
        "GPT of 12 layers": (GPT(), _language, False),
        "LSTM": (LastOutput(), _regression, False),
        "transformer encoder": (_encoder(), _regression, False),
        "autoencoder": (autoencoder, _same, False),
        "embeddings": (bag, _words, False),
    }


def runs() -> Iterator[tuple[str, str]]:
    """Yield names of models and precisions: all in float32 and bfloat16 autocast, four in float16 with a loss scale."""
    names = list(_models())
    for name in names:
        yield name, "float32"
    for name in names:
        yield name, "bfloat16 autocast"
    for name in names[:3] + names[6:7]:
        yield name, "float16 autocast"


def findings(name: str, precision: str) -> list:
    """Train, and return what was found."""
    import halfulp as hu

    model, batch, plain = _models()[name]
    made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) if plain else None
    optimizer = made or torch.optim.AdamW(model.parameters(), lr=2e-3)
    dtype = {"float32": None, "bfloat16 autocast": torch.bfloat16, "float16 autocast": torch.float16}[precision]
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    with hu.observe(model, optimizer, interval=5, scaler=scaler, scheduler=scheduler) as seen:
        for _ in range(STEPS):
            x, y = batch()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                out = model(x)
                loss = _loss(out, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    return seen.findings


def _loss(out: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return nn.functional.mse_loss(out, y)
    return nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
