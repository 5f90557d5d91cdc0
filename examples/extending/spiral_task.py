"""A task of one's own: two spirals, told apart by a small network that AdaBelief trains."""

from typing import ClassVar

import adabelief  # noqa: F401  registers the optimizer, and lies beside this file
import torch

import halfulp as hu
from halfulp.trials.tasks import Data, Task


@hu.trials.tasks.register
class Spirals(Task):
    """512 points on two spirals."""

    name = "spirals"
    title = "two spirals told apart by a network of 64 units"
    rule = "AdaBelief"
    hyper: ClassVar = {"lr": 3e-3}
    steps = 400
    batch = 64
    judged_by = "train_loss"
    target = "point"

    def load(self):
        """The same points always."""
        angle = torch.linspace(0.5, 9.0, 256)
        arm = torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 9
        train = torch.cat([arm, -arm]), torch.tensor([0] * 256 + [1] * 256)
        return Data(train, train, "512 points on two spirals")

    def model(self, data, seed):
        """One hidden layer."""
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
