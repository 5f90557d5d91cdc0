"""Full-batch tasks whose data have as many digits as the recipe's weights: the experiments of MCTensor."""

import abc
import copy
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import recipes
from ...mctensor import MCTensor
from ...recipes import Recipe
from ...recipes._optimizer import MeasuredOptimizer
from ._task import Batch, Data, LossCourse, ReportLoss, Task


class FullBatchTask(Task):
    """Plain gradient descent on all the data at once, as in "MCTensor" (Yu et al., arXiv 2207.08867).

    Data are made in float64 and held as the recipe holds weights: rounded to its type, or as so many components. So
    each trial is a loop of its own. The losses that are kept are those of the weights, decoded to float64, on the
    float64 data: what a recipe rounds off its data shows, too.
    """

    rule: ClassVar[str] = "SGD"
    judged_by: ClassVar[str] = "train_loss"
    note: ClassVar[str]

    @abc.abstractmethod
    def load_float64(self) -> tuple[Batch, Batch]:
        """Return the float64 data to train on and to validate on."""

    def load(self) -> Data:
        """Return the data in float32."""
        train, validation = ((inputs.float(), targets.float()) for inputs, targets in self.load_float64())
        return Data(train=train, validation=validation, note=self.note)

    def batches(self, data: Data, seed: int, steps: int) -> Iterator[Batch]:
        """Yield all the data every time."""
        for _ in range(steps):
            yield data.train

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of a yes-or-no question, in nats, in the type of the logits."""
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), targets)

    def compute_accuracy(self, logits: Tensor, targets: Tensor) -> float | None:
        """Return the share of questions that are answered right."""
        return float(((logits.squeeze(-1) > 0) == (targets > 0.5)).double().mean())

    def trial(
        self,
        recipe: Recipe,
        seed: int,
        steps: int,
        data: Data,
        report: ReportLoss | None = None,
    ) -> dict[str, Any]:
        """Run one trial; return a trial's results."""
        torch.manual_seed(seed)
        start = self.model(data, seed)
        report_interval = max(1, min(50, steps // 12))
        model = recipes.convert(copy.deepcopy(start), recipe, seed=seed)
        optimizer = recipes.optimizer(model, self.rule, seed=seed, report_interval=report_interval, **self.hyper)
        train, validation = self.load_float64()
        inputs, targets = (encode_as_weights(recipe, x) for x in train)
        course, memory = LossCourse(steps, report), None
        for step in range(steps):
            begun = time.process_time()
            loss = self.loss(model(inputs), targets)
            loss.backward()
            memory = optimizer.bytes_per_parameter() if step == min(2, steps - 1) else memory
            optimizer.step()
            optimizer.zero_grad()
            course.seconds.append(time.process_time() - begun)
            if not course.add_loss(loss.item()):
                break
        lost = optimizer.report()
        failed = course.diverged_at is not None
        wide = start.double()
        if not failed:
            optimizer.eval()
            wide.load_state_dict(decode_weights(model, optimizer))
        scores = {
            name: self._score_model(wide, part, failed) for name, part in (("validation", validation), ("train", train))
        }
        own = self._score_model(model, [encode_as_weights(recipe, x) for x in validation], failed)
        size = {"parameters": sum(p.numel() for p in model.parameters()), "targets": len(validation[1])}
        described = course.summarize_training(lost.cancelled, lost.realised, memory)
        return {**described, "float32": scores, "own": own, **size, "data": self.note}

    @torch.no_grad()
    def _score_model(self, model: nn.Module, part: Batch | list[Tensor], failed: bool) -> dict[str, float | None]:
        if failed:
            return {"loss": None, "accuracy": None}
        logits, targets = (to_plain_float64(x) for x in (model(part[0]), part[1]))
        return {"loss": float(self.loss(logits, targets)), "accuracy": self.compute_accuracy(logits, targets)}


def encode_as_weights(recipe: Recipe, x: Tensor) -> Tensor:
    """Return float64 data in the format in which a recipe holds weights."""
    dtype = getattr(torch, recipe.param_dtype or "float32")
    return MCTensor.encode(x, recipe.components, dtype) if recipe.components else x.to(dtype)


def to_plain_float64(x: Tensor) -> Tensor:
    """Return a plain tensor or an MCTensor in float64."""
    return x.decode(torch.float64) if isinstance(x, MCTensor) else x.double()


def decode_weights(model: nn.Module, optimizer: MeasuredOptimizer) -> dict[str, Tensor]:
    """Return the weights in float64, with what the optimizer keeps beside them."""
    if any(isinstance(parameter, MCTensor) or parameter.dtype == torch.float64 for parameter in model.parameters()):
        return {name: to_plain_float64(parameter.detach()) for name, parameter in model.named_parameters()}
    return {name: value.double() for name, value in optimizer.float32_state_dict(model).items()}


class LinearRegression(FullBatchTask):
    """Five weights from ten equations that have a solution: the loss goes to zero as far as digits reach."""

    name: ClassVar[str] = "linear-regression"
    title: ClassVar[str] = "linear regression with an exact solution"
    hyper: ClassVar[dict[str, Any]] = {"lr": 0.04}
    steps: ClassVar[int] = 2000
    sizes: ClassVar[dict[str, int]] = {"smoke": 40, "small": 1000}
    batch: ClassVar[int] = 10
    target: ClassVar[str] = "equation"
    note: ClassVar[str] = "10 equations in 5 unknowns, all drawn from N(-1, 1.5)"

    def load_float64(self) -> tuple[Batch, Batch]:
        """Draw the data from NumPy's generator of seed 1234; the same data validate."""
        import numpy as np

        random = np.random.RandomState(1234)
        inputs, weights = random.normal(-1, 1.5, (10, 5)), random.normal(-1, 1.5, 5)
        part = torch.from_numpy(inputs), torch.from_numpy(inputs @ weights)
        return part, part

    def model(self, data: Data, seed: int) -> nn.Module:
        """Return a linear layer whose weights are drawn from N(0, 1)."""
        layer = nn.Linear(5, 1, bias=False)
        with torch.no_grad():
            layer.weight.normal_(generator=torch.Generator().manual_seed(seed))
        return layer

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean square of the residuals, in the type of the logits."""
        return (logits.squeeze(-1) - targets).square().mean()

    def compute_accuracy(self, logits: Tensor, targets: Tensor) -> float | None:
        """Return None: a regression has no right answers."""
        return None


class Logistic(FullBatchTask):
    """Logistic regression of a thousand synthetic points in the plane, which a line separates."""

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "logistic regression of separable points"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-3}
    steps: ClassVar[int] = 4000
    sizes: ClassVar[dict[str, int]] = {"smoke": 40}
    batch: ClassVar[int] = 670
    target: ClassVar[str] = "point"
    note: ClassVar[str] = "1,000 points of scikit-learn's make_classification, 670 to train on"

    def load_float64(self) -> tuple[Batch, Batch]:
        """Return the first draw that one coordinate separates, split once and for all."""
        return _make_separable()

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
    note: ClassVar[str] = "scikit-learn's breast cancer data: 455 patients to train on, 114 to validate"

    def load_float64(self) -> tuple[Batch, Batch]:
        """Return thirty features of mean 0 and deviation 1 over the training part."""
        return _load_cancer()


class CancerMLP(CancerLogistic):
    """A network 30-128-64-1 without biases on scikit-learn's breast cancer data."""

    name: ClassVar[str] = "cancer-mlp"
    title: ClassVar[str] = "small network on the breast cancer data"
    hyper: ClassVar[dict[str, Any]] = {"lr": 7e-3}
    steps: ClassVar[int] = 900
    sizes: ClassVar[dict[str, int]] = {"smoke": 20, "small": 300}

    def model(self, data: Data, seed: int) -> nn.Module:
        """Draw weights uniformly within 1 / sqrt(width), the last within 0.1."""
        generator = torch.Generator().manual_seed(seed)
        widths, ends = (30, 128, 64, 1), (128**-0.5, 64**-0.5, 0.1)
        layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
        with torch.no_grad():
            for layer, end in zip(layers, ends):
                layer.weight.uniform_(-end, end, generator=generator)
        return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


@functools.cache
def _make_separable() -> tuple[Batch, Batch]:
    datasets, selection, _ = _import_sklearn()
    for state in range(1000):
        shape = {"n_samples": 1000, "n_features": 2, "n_redundant": 0, "n_informative": 1, "n_clusters_per_class": 1}
        inputs, labels = datasets.make_classification(**shape, flip_y=0, random_state=state)
        low, high = inputs[labels == 0], inputs[labels == 1]
        if ((low.max(0) < high.min(0)) | (low.min(0) > high.max(0))).any():
            return _make_parts(*selection.train_test_split(inputs, labels, test_size=0.33, random_state=42))
    raise AssertionError("one draw in a few is separable")


@functools.cache
def _load_cancer() -> tuple[Batch, Batch]:
    datasets, selection, preprocessing = _import_sklearn()
    bunch = datasets.load_breast_cancer()
    train, test, *labels = selection.train_test_split(bunch.data, bunch.target, test_size=0.2, random_state=1234)
    scaler = preprocessing.StandardScaler().fit(train)
    return _make_parts(scaler.transform(train), scaler.transform(test), *labels)


def _make_parts(train: Any, validation: Any, train_labels: Any, validation_labels: Any) -> tuple[Batch, Batch]:
    """Return arrays of NumPy's as float64 data to train on and to validate on."""
    pairs = (train, train_labels), (validation, validation_labels)
    first, second = ((torch.from_numpy(inputs), torch.from_numpy(labels).double()) for inputs, labels in pairs)
    return first, second


def _import_sklearn() -> tuple[Any, Any, Any]:
    try:
        from sklearn import datasets, model_selection, preprocessing
    except ImportError:
        raise ValueError("this task reads scikit-learn's data: pip install 'halfulp[cli]'") from None
    return datasets, model_selection, preprocessing
