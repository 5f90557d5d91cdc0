"""The models whose steps `bench_gradient_overhead` times, in plain torch, each with a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Workload = tuple[nn.Module, Callable[[nn.Module], Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, and what exponents may cost there.

    Attributes:
        build: gives the model and a function from it to its loss; takes ``sizes``.
        sizes: of the model and the batch, the first of them the width.
        bar: of a step in eager mode.
        statistics: the bar of what measuring adds; None where none is set.
        compiled: the bar of a compiled step; None where it is timed in eager mode only.
    """

    build: Callable[..., Workload]
    sizes: dict[str, int]
    bar: float
    statistics: float | None = 0.01
    compiled: float | None = 1.03


def gpt(width: int, layers: int, rows: int, time: int = 128) -> Workload:
    """A decoder-only transformer over 64 tokens."""
    from halfulp.trials.tasks._text import GPT

    ids = torch.randint(0, 64, (rows, time + 1))
    model = GPT(64, width=width, layers=layers, heads=max(1, width // 64), time=time)
    return model, lambda made: nn.functional.cross_entropy(made(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def perceptron(width: int, layers: int, rows: int, relu: bool = True) -> Workload:
    """Linear layers, with a ReLU after each or without."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), *([nn.ReLU()] if relu else []))]
    return squared(nn.Sequential(*parts), torch.randn(rows, width))


def linears(width: int, layers: int, rows: int) -> Workload:
    """Linear layers and nothing between them."""
    return perceptron(width, layers, rows, relu=False)


class Steps(nn.Module):
    """An LSTMCell in a Python loop over the time."""

    def __init__(self, width: int):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (time, rows, width)."""
        h, c = x.new_zeros(x.shape[1:]), x.new_zeros(x.shape[1:])
        for now in x:
            h, c = self.cell(now, (h, c))
        return self.head(h)


class Recurrent(nn.Module):
    """An nn.LSTM of two layers, and a linear layer on its last output."""

    def __init__(self, width: int):
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (time, rows, width)."""
        return self.head(self.lstm(x)[0][-1])


def lstm_cells(width: int, rows: int, time: int) -> Workload:
    """`Steps` over random sequences."""
    return squared(Steps(width), torch.randn(time, rows, width))


def lstm(width: int, rows: int, time: int) -> Workload:
    """`Recurrent` over random sequences."""
    return squared(Recurrent(width), torch.randn(time, rows, width))


class Residual(nn.Module):
    """Two 3x3 convolutions around which the input goes ("Deep Residual Learning", He et al., arXiv 1512.03385)."""

    def __init__(self, planes: int, out: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(planes, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
        self.aside = nn.Sequential()
        if stride != 1 or planes != out:
            self.aside = nn.Sequential(nn.Conv2d(planes, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """x: (rows, planes, height, width)."""
        h = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(h)) + self.aside(x)).relu()


def resnet18(width: int, rows: int, side: int) -> Workload:
    """ResNet-18 with ``width`` planes first (64 in the paper) on images of side x side."""
    planes = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = [
        Residual(planes[i] if j == 0 else planes[i + 1], planes[i + 1], 2 if i and j == 0 else 1)
        for i in range(4)
        for j in range(2)
    ]
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 1000)]
    images, labels = torch.randn(rows, 3, side, side), torch.randint(1000, (rows,))
    return nn.Sequential(*stem, *blocks, *head), lambda made: nn.functional.cross_entropy(made(images), labels)


def squared(model: nn.Module, inputs: Tensor) -> Workload:
    """A model and the mean of its output's squares."""
    return model, lambda made: made(inputs).square().mean()


def workload(case: Case, **sizes: Any) -> Workload:
    """A model and its loss from a fixed seed; ``sizes`` replace the case's."""
    torch.manual_seed(0)
    return case.build(**{**case.sizes, **sizes})


_WALKS: dict[str, Any] = {"statistics": None, "compiled": None}
CASES = {
    "GPT": Case(gpt, {"width": 256, "layers": 4, "rows": 8}, 1.10),
    "perceptron": Case(perceptron, {"width": 256, "layers": 12, "rows": 1024}, 1.10),
    "perceptron, wide": Case(perceptron, {"width": 1024, "layers": 6, "rows": 1024}, 1.05),
    "500 linear layers": Case(linears, {"width": 16, "layers": 500, "rows": 8}, 1.30, **_WALKS),
    "500 linear layers with ReLU": Case(perceptron, {"width": 16, "layers": 500, "rows": 8}, 1.30, **_WALKS),
    "LSTMCell, 50 steps": Case(lstm_cells, {"width": 64, "rows": 16, "time": 50}, 1.30, **_WALKS),
    "LSTM, 50 steps": Case(lstm, {"width": 64, "rows": 16, "time": 50}, 1.10, **_WALKS),
    "ResNet-18": Case(resnet18, {"width": 64, "rows": 4, "side": 64}, 1.10, **_WALKS),
}
