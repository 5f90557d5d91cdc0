"""Task digits: a small classifier, pre-trained in float32, fine-tuned at a low learning rate."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from ._task import Data, Task


@dataclasses.dataclass(frozen=True)
class Digits(Task):
    """scikit-learn's 8x8 digits and a 64-128-10 network, SGD with momentum.

    Each trial pre-trains in float32, the same for every recipe, and then fine-tunes: that is where updates are
    small against the weights and rounding to nearest loses them. Accuracy has too coarse a step to tell recipes
    apart here (one image of 360 is 0.28%), so the loss on the training set decides.
    """

    name: ClassVar[str] = "digits"
    title: ClassVar[str] = "small classifier of scikit-learn's digits, fine-tuned"
    rule: ClassVar[str] = "SGD"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-3, "momentum": 0.9}
    steps: ClassVar[int] = 1500
    batch: ClassVar[int] = 32
    judged_by: ClassVar[str] = "train_loss"
    target: ClassVar[str] = "image"

    def load(self) -> Data:
        """1437 images to train on, 360 to validate, the same split always."""
        return load_digits()

    def model(self, data: Data, seed: int) -> nn.Module:
        """Six epochs of float32 SGD from a random start."""
        torch.manual_seed(seed)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for inputs, targets in self.batches(data, seed + 1_000_003, 6 * 45):
            self.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model


def network() -> nn.Module:
    """64 pixels, 128 hidden units, 10 classes."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_digits() -> Data:
    """scikit-learn's digits, pixels in [0, 1], split once and for all."""
    try:
        from sklearn import datasets
    except ImportError:
        raise ValueError("task 'digits' reads scikit-learn's digits: pip install 'halfulp[cli]'") from None
    bunch = datasets.load_digits()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(bunch.target), generator=generator, dtype=torch.int64, device="cpu")
    inputs = torch.tensor(bunch.data / 16, dtype=torch.float32, device="cpu")[order]
    targets = torch.tensor(bunch.target, dtype=torch.long, device="cpu")[order]
    return Data(
        train=(inputs[:1437], targets[:1437]),
        validation=(inputs[1437:], targets[1437:]),
        note="scikit-learn's digits: 1,437 images to train on, 360 to validate",
    )
