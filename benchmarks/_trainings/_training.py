"""What a training is: models, optimizers, and the losses of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

Loss = Callable[[Sequence[nn.Module]], Tensor]


class Training:
    """One training from a seed: its models, and all that it will ever draw, follow from the seed alone.

    Attributes:
        title: In tables.
        judged: What `judge` returns, in words.
        steps: Iterations.
        clip: The norm to which gradients are clipped, after `unscale_`; None leaves them.
        update_each: Whether the scaler's `update` follows each optimizer's step, or all of an iteration's.
        models, optimizers: As the scaler is given them.
    """

    title: ClassVar[str]
    judged: ClassVar[str]
    steps: ClassVar[int] = 300
    clip: ClassVar[float | None] = None
    update_each: ClassVar[bool] = False

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]

    def __init__(self, data: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.draw = torch.Generator().manual_seed(seed)
        self.build(data)

    def build(self, data: Path) -> None:
        """Set models and optimizers, and read what is trained on."""
        raise NotImplementedError

    def losses(self, step: int) -> Iterator[tuple[int, Loss]]:
        """For each optimizer that steps in an iteration: its number, and the loss of given models (these or copies).

        It is called under autocast and goes on after the step before was made; what a loss reads is drawn before.
        """
        raise NotImplementedError

    def judge(self, models: Sequence[nn.Module]) -> Tensor:
        """How well models do on what they were not trained on, the smaller the better; the same draws at each call."""
        raise NotImplementedError

    def rows(self, count: int, of: int) -> Tensor:
        """Numbers of a batch's members, drawn from so many."""
        return torch.randint(of, (count,), generator=self.draw)


class Patches(nn.Conv2d):
    """A convolution as a linear layer of patches; torch's own is slow in float16 on processors."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, channels, height, width), as for `nn.Conv2d` with one group."""
        high, wide = ((size + 2 * p - k) // s + 1 for size, p, k, s in self._sizes(x))
        patches = nn.functional.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        out = nn.functional.linear(patches.transpose(1, 2), self.weight.flatten(1), self.bias)
        return out.transpose(1, 2).unflatten(2, (high, wide))

    def _sizes(self, x: Tensor) -> zip:
        return zip(x.shape[2:], self.padding, self.kernel_size, self.stride)


def with_patches(model: nn.Module) -> nn.Module:
    """The model, its convolutions replaced."""
    for module in model.modules():
        if type(module) is nn.Conv2d:
            if module.groups != 1 or isinstance(module.padding, str) or module.dilation != (1, 1):
                raise NotImplementedError(f"{module}: one group, padding in numbers and no dilation")
            module.__class__ = Patches
    return model
