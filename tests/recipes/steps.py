"""Models, steps and converted models beside their optimizers, for tests."""

import torch
from torch import nn

from halfulp import recipes
from halfulp.recipes import Recipe


def converted(
    recipe: Recipe | str, model: nn.Module, rule: str, seed: int = 0, **hyper
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model converted in place, and the recipe's optimizer."""
    recipes.convert(model, recipe, seed=seed)
    return model, recipes.optimizer(model, rule, seed=seed, **hyper)


HYPER = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scaled=None) -> None:
    loss = model(torch.arange(7)).float().square().mean()
    if scaled is None:
        loss.backward()
        optimizer.step()
    else:
        scaled.scale(loss).backward()
        scaled.step(optimizer)
        scaled.update()
    optimizer.zero_grad()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first_norm(self.first(x)).relu()
        return (x + self.second_norm(self.second(inner))).relu()


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(stem, Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
