"""Tasks digits, digits-slow and digits-fpu: a small classifier, fine-tuned at low learning rates or from scratch."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from ._task import Data, Task


@dataclasses.dataclass(frozen=True)
class Digits(Task):
    """scikit-learn's 8x8 digits and a 64-128-10 network, fine-tuned by SGD with momentum.

    Each trial pre-trains in float32, the same for every recipe, and then fine-tunes: that is where updates are
    small against the weights and rounding to nearest loses them. Accuracy has too coarse a step to tell recipes
    apart here (one image of 360 is 0.28%), so the loss on the training set decides.
    """

    name: ClassVar[str] = "digits"
    title: ClassVar[str] = "small classifier of scikit-learn's digits, fine-tuned"
    rule: ClassVar[str] = "SGD"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-3, "momentum": 0.9}
    steps: ClassVar[int] = 1500
    sizes: ClassVar[dict[str, int]] = {"smoke": 30, "small": 600}
    batch: ClassVar[int] = 32
    judged_by: ClassVar[str] = "train_loss"
    target: ClassVar[str] = "image"

    def load(self) -> Data:
        """Load 1,437 images to train on and 360 to validate, the same split always."""
        return load_digits()

    def model(self, data: Data, seed: int) -> nn.Module:
        """Train six epochs of float32 SGD from a random start."""
        torch.manual_seed(seed)
        model = make_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for inputs, targets in self.batches(data, seed + 1_000_003, 6 * 45):
            self.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model


def make_network() -> nn.Module:
    """Build a network of 64 pixels, 128 hidden units and 10 classes."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_digits() -> Data:
    """Load scikit-learn's digits, pixels in [0, 1], split once and for all."""
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


@dataclasses.dataclass(frozen=True)
class DigitsSlow(Digits):
    """scikit-learn's digits fine-tuned at a tenth of the learning rate, where nearest rounding loses still more."""

    name: ClassVar[str] = "digits-slow"
    title: ClassVar[str] = "the same classifier, fine-tuned ten times as slowly"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-4, "momentum": 0.9}


@dataclasses.dataclass(frozen=True)
class DigitsFPU(Digits):
    """A small classifier of digits, trained for forty epochs of SGD with momentum from a random start.

    Meant for the few-bit recipes (``e8m5``, ``e8m3``, ``e8m1``), which model a processor that knows no other
    format, as in "Revisiting BFloat16 Training" (arXiv 2010.06192). Differences are so large here that the accuracy
    on 360 images shows them; the training loss decides.
    """

    name: ClassVar[str] = "digits-fpu"
    title: ClassVar[str] = "small classifier of scikit-learn's digits, from scratch"
    hyper: ClassVar[dict[str, Any]] = {"lr": 0.01, "momentum": 0.9}
    steps: ClassVar[int] = 40 * 45
    sizes: ClassVar[dict[str, int]] = {"smoke": 30, "small": 1350}

    def model(self, data: Data, seed: int) -> nn.Module:
        """Return the network with random initial weights."""
        torch.manual_seed(seed)
        return make_network()
