"""A converted model beside its optimizer, for tests."""

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
