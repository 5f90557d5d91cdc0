"""Full-batch tasks whose data have as many digits as the recipe's weights: the experiments of MCTensor."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._files import import_sklearn
from ._task import Batch, Data, Task


class FullBatchTask(Task):
    """Plain gradient descent on all the data at once, as in "MCTensor" (Yu et al., arXiv 2207.08867).

    The data are float64: what a recipe rounds off its data shows, too.
    """

    rule: ClassVar[str] = "SGD"
    judged_by: ClassVar[str] = "train_loss"

    def batches(self, data: Data, seed: int, steps: int) -> Iterator[Batch]:
        """Yield all the data every time."""
        return itertools.repeat(data.train, steps)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of a yes-or-no question, in nats, in the type of the logits."""
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), targets)

    def is_hit(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return whether each question is answered right."""
        return (logits.squeeze(-1) > 0) == (targets > 0.5)


class LinearRegression(FullBatchTask):
    """Five weights from ten equations that have a solution: the loss goes to zero as far as digits reach."""

    name: ClassVar[str] = "linear-regression"
    title: ClassVar[str] = "linear regression with an exact solution"
    hyper: ClassVar[dict[str, Any]] = {"lr": 0.04}
    steps: ClassVar[int] = 2000
    batch: ClassVar[int] = 10
    target: ClassVar[str] = ""

    def load(self) -> Data:
        """Draw the data from NumPy's generator of seed 1234; the same data validate."""
        import numpy as np

        random = np.random.RandomState(1234)
        inputs, weights = random.normal(-1, 1.5, (10, 5)), random.normal(-1, 1.5, 5)
        part = torch.from_numpy(inputs), torch.from_numpy(inputs @ weights)
        return Data(train=part, validation=part, note="10 equations in 5 unknowns, all drawn from N(-1, 1.5)")

    def model(self, data: Data, seed: int) -> nn.Module:
        """Return a linear layer whose weights are drawn from N(0, 1)."""
        layer = nn.Linear(5, 1, bias=False)
        with torch.no_grad():
            layer.weight.normal_(generator=torch.Generator().manual_seed(seed))
        return layer

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean square of the residuals, in the type of the logits."""
        return (logits.squeeze(-1) - targets).square().mean()


class Logistic(FullBatchTask):
    """Logistic regression of a thousand synthetic points in the plane, which a line separates."""

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "logistic regression of separable points"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-3}
    steps: ClassVar[int] = 4000
    batch: ClassVar[int] = 670
    target: ClassVar[str] = "point"

    def load(self) -> Data:
        """Return the first draw that one coordinate separates, split once and for all."""
        datasets, selection, _ = import_sklearn()
        shape = {"n_samples": 1000, "n_features": 2, "n_redundant": 0, "n_informative": 1, "n_clusters_per_class": 1}
        for state in itertools.count():  # one draw in a few
            inputs, labels = datasets.make_classification(**shape, flip_y=0, random_state=state)
            low, high = inputs[labels == 0], inputs[labels == 1]
            if ((low.max(0) < high.min(0)) | (low.min(0) > high.max(0))).any():
                break
        parts = selection.train_test_split(inputs, labels, test_size=0.33, random_state=42)
        return _make_data_from_arrays(parts, "1,000 points of scikit-learn's make_classification, 670 to train on")

    def model(self, data: Data, seed: int) -> nn.Module:
        """Start from small weights."""
        width = data.train[0].shape[1]
        layer, end = nn.Linear(width, 1, bias=False), 0.1 * width**-0.5
        with torch.no_grad():
            layer.weight.uniform_(-end, end, generator=torch.Generator().manual_seed(seed))
        return layer


class CancerLogistic(Logistic):
    """Logistic regression of scikit-learn's breast cancer data, standardized."""

    name: ClassVar[str] = "cancer-logistic"
    title: ClassVar[str] = "logistic regression of the breast cancer data"
    hyper: ClassVar[dict[str, Any]] = {"lr": 3e-3}
    steps: ClassVar[int] = 2000
    batch: ClassVar[int] = 455
    target: ClassVar[str] = "patient"

    def load(self) -> Data:
        """Return thirty features of mean 0 and deviation 1 over the training part."""
        datasets, selection, preprocessing = import_sklearn()
        bunch = datasets.load_breast_cancer()
        train, test, *labels = selection.train_test_split(bunch.data, bunch.target, test_size=0.2, random_state=1234)
        scaler = preprocessing.StandardScaler().fit(train)
        note = "scikit-learn's breast cancer data: 455 patients to train on, 114 to validate"
        return _make_data_from_arrays((scaler.transform(train), scaler.transform(test), *labels), note)


class CancerMLP(CancerLogistic):
    """Classification of scikit-learn's breast cancer data by a network 30-128-64-1 without biases."""

    name: ClassVar[str] = "cancer-mlp"
    title: ClassVar[str] = "small network on the breast cancer data"
    hyper: ClassVar[dict[str, Any]] = {"lr": 7e-3}
    steps: ClassVar[int] = 900

    def model(self, data: Data, seed: int) -> nn.Module:
        """Draw weights uniformly within 1 / sqrt(width), the last within 0.1."""
        generator = torch.Generator().manual_seed(seed)
        widths, ends = (30, 128, 64, 1), (128**-0.5, 64**-0.5, 0.1)
        layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
        with torch.no_grad():
            for layer, end in zip(layers, ends):
                layer.weight.uniform_(-end, end, generator=generator)
        return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def _make_data_from_arrays(parts: Sequence[Any], note: str) -> Data:
    """Return arrays of NumPy's, inputs to train and to validate on and then their labels, as float64 data."""
    train, validation, train_labels, validation_labels = parts
    pairs = (train, train_labels), (validation, validation_labels)
    first, second = ((torch.from_numpy(inputs), torch.from_numpy(labels).double()) for inputs, labels in pairs)
    return Data(train=first, validation=second, note=note)
