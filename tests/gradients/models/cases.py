"""A small model with its batch and its loss, and the register that a new one joins."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
CLASSES = 5
VOCABULARY = 19


@dataclass
class Case:
    """A model, what it is called with (arguments, or keywords) and the loss of what it returns."""

    model: nn.Module
    batch: tuple | dict
    loss: Callable[[Any], Tensor]
    family: str = ""

    def run(self) -> Tensor:
        """The loss of one forward pass."""
        output = self.model(**self.batch) if isinstance(self.batch, dict) else self.model(*self.batch)
        return self.loss(output)


ARCHITECTURES: dict[str, Callable[[], Case]] = {}


def architecture(family: str) -> Callable:
    """Register a function that makes a case, under its name with hyphens."""

    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        def made() -> Case:
            case = make()
            case.family = family
            return case

        name = make.__name__.replace("_", "-")
        assert name not in ARCHITECTURES, name
        ARCHITECTURES[name] = made
        return make

    return register


def classes(*shape: int, count: int = CLASSES) -> Callable[[Tensor], Tensor]:
    """Cross entropy of logits (*shape, count) against labels drawn here."""
    labels = torch.randint(count, (*shape,)).flatten()
    return lambda logits: F.cross_entropy(logits.flatten(0, -2), labels)


def target(*shape: int) -> Callable[[Tensor], Tensor]:
    """Squared distance to numbers drawn here."""
    wanted = torch.randn(shape)
    return lambda output: F.mse_loss(output, wanted)


def mlp(*widths: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), act())]
    return nn.Sequential(*layers[:-1])
