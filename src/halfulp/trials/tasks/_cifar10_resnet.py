"""Task cifar10-resnet: a small residual network on photographs."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from ._cifar10 import Cifar10
from ._task import Data


class Residual(nn.Module):
    """Two convolutions beside a path that skips them; group norms, as running averages have no place in a recipe."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(4, outputs)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        inner = self.first_norm(self.first(x)).relu()
        return (self.skip(x) + self.second_norm(self.second(inner))).relu()


@dataclasses.dataclass(frozen=True)
class Cifar10ResNet(Cifar10):
    """CIFAR-10 with a residual network of eight layers (He et al., arXiv 1512.03385); needs ``data``."""

    name: ClassVar[str] = "cifar10-resnet"
    title: ClassVar[str] = "residual network of eight layers on CIFAR-10"
    steps: ClassVar[int] = 500

    def model(self, data: Data, seed: int) -> nn.Module:
        """Three stages of one block, 16 to 64 channels."""
        torch.manual_seed(seed)
        stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU()
        blocks = Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
