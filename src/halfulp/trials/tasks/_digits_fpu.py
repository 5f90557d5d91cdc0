"""Task digits-fpu: the digits classifier from scratch, for recipes that round every operator's output."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from ._digits import load_digits, network
from ._task import Data, Task


@dataclasses.dataclass(frozen=True)
class DigitsFPU(Task):
    """Forty epochs of SGD with momentum from a random start.

    Meant for the few-bit recipes (``e8m5``, ``e8m3``, ``e8m1``), which model a processor that knows no other
    format, as in "Revisiting BFloat16 Training" (arXiv 2010.06192). Differences are so large here that the accuracy
    on 360 images shows them; the training loss decides.
    """

    name: ClassVar[str] = "digits-fpu"
    title: ClassVar[str] = "small classifier of scikit-learn's digits, from scratch"
    rule: ClassVar[str] = "SGD"
    hyper: ClassVar[dict[str, Any]] = {"lr": 0.01, "momentum": 0.9}
    steps: ClassVar[int] = 40 * 45
    batch: ClassVar[int] = 32
    judged_by: ClassVar[str] = "train_loss"
    target: ClassVar[str] = "image"

    def load(self) -> Data:
        """1437 images to train on, 360 to validate, the same split always."""
        return load_digits()

    def model(self, data: Data, seed: int) -> nn.Module:
        """Return the network with random initial weights."""
        torch.manual_seed(seed)
        return network()
