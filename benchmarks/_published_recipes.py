"""Tasks planted for the ingredients of two published recipes: each is learned by the recipe, and not without one."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import halfulp as hu


@dataclass(frozen=True)
class Plant:
    """A task, and the ingredient of a recipe that it needs.

    Attributes:
        recipe: its name in the catalogue.
        ingredient: what is switched off, in words.
        without: the changed fields of the recipe; of a policy under "policy".
        task: `Small` or `Slow`, with its numbers.
    """

    recipe: str
    ingredient: str
    without: dict[str, Any]
    task: Any
    policy: Any = None

    def losses(self, seed: int) -> tuple[float, float]:
        """The last loss over the first one, with the ingredient and without it."""
        recipe = hu.recipes.get(self.recipe)
        fields = {key: value for key, value in self.without.items() if key != "policy"}
        policy = self.without.get("policy", self.policy)
        return self.task.train(recipe, self.policy, seed), self.task.train(recipe.replace(**fields), policy, seed)


@dataclass(frozen=True)
class Small:
    """A network's loss times a tiny factor, its learning rate over it: gradients are small, updates are not.

    Args:
        factor: of the loss.
        spikes: one batch in so many gives an infinite loss; 0 for none.
    """

    factor: float
    spikes: int = 0
    steps: int = 100
    rate: float = 0.5

    def train(self, recipe, policy, seed: int) -> float:
        """The last loss over the first one."""
        torch.manual_seed(seed)
        x = torch.randn(64, 16).sign()
        y = torch.tanh(x @ torch.randn(16, 4) / 4)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        run = _Run(model, recipe, policy, self.rate / self.factor, seed)
        first = run.loss(x, y)
        for step in range(self.steps):
            spike = math.inf if self.spikes and step % self.spikes == 0 else 1.0
            run.step(x, y, self.factor * spike)
        return run.loss(x, y) / first


@dataclass(frozen=True)
class Slow:
    """Weights of 1.25 whose targets are 1, by steps of less than half an ulp of float16 there (2^-11)."""

    steps: int = 300
    rate: float = field(default=2.0**-9.05)

    def train(self, recipe, policy, seed: int) -> float:
        """The last loss over the first one."""
        x, target = 4 * torch.eye(16), torch.full((16, 1), 4.0)
        model = nn.Sequential(nn.Linear(16, 1, bias=False))
        nn.init.constant_(model[0].weight, 1.25)
        run = _Run(model, recipe, policy, self.rate / 2, seed)
        first = run.loss(x, target)
        for _ in range(self.steps):
            run.step(x, target, 1.0)
        return run.loss(x, target) / first


class _Run:
    def __init__(self, model, recipe, policy, rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = hu.convert(model, recipe)
        self.optimizer = hu.recipes.optimizer(self.model, "SGD", lr=rate, seed=seed, report_interval=0)
        if policy is None:
            self.scaler = hu.recipes.scaler(recipe, self.model)
        else:
            options = {"format": recipe.gradient_format, "rounding": recipe.gradient_rounding}
            self.scaler = hu.AdaptiveGradScaler(self.model, policy=policy, **options)

    def loss(self, x, y) -> float:
        with torch.no_grad():
            return float((self.model(x) - y).square().mean())

    def step(self, x, y, factor: float) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale((self.model(x) - y).square().mean() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


FLOOR = hu.gradients.RisingFloor(floors=((0, 13),))
PLANTS = (
    Plant("mixed-precision", "float32 master weights", {"format": "fp16", "weight_update": "nearest"}, Slow()),
    Plant("mixed-precision", "loss scaling", {"gradient_scale": None}, Small(2.0**-22)),
    Plant("fp8-training", "stochastic float16 masters", {"weight_update": "nearest"}, Slow()),
    Plant("fp8-training", "loss scaling", {"gradient_scale": None}, Small(2.0**-20)),
    Plant("fp8-training", "stochastic gradients", {"gradient_rounding": "nearest"}, Small(2.0**-27)),
    Plant("fp8-training", "a floor of the scale", {"policy": hu.gradients.Dynamic()}, Small(2.0**-20, 3), FLOOR),
)
