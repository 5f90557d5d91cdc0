"""Tasks digits, digits-slow, digits-fpu and two-heads: small networks on handwritten digits."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._files import import_sklearn
from ._task import Batch, Data, Task, compute_task_warm_cosine_factor


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
    batch: ClassVar[int] = 32
    judged_by: ClassVar[str] = "train_loss"
    target: ClassVar[str] = "image"

    def load(self) -> Data:
        """Load 1,437 images to train on and 360 to validate, the same split always."""
        return load_digits()

    def model(self, data: Data, seed: int) -> nn.Module:
        """Train six epochs of float32 SGD from a random start."""
        torch.manual_seed(seed)
        model = make_digits_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for inputs, targets in self.batches(data, seed + 1_000_003, 6 * 45):
            self.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model


def make_digits_network() -> nn.Module:
    """Build a network of 64 pixels, 128 hidden units and 10 classes."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_digits() -> Data:
    """Load scikit-learn's digits, pixels in [0, 1], split once and for all."""
    bunch = import_sklearn()[0].load_digits()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(bunch.target), generator=generator, dtype=torch.int64, device="cpu")
    inputs = torch.tensor(bunch.data / 16, dtype=torch.float32, device="cpu")[order]
    targets = torch.tensor(bunch.target, dtype=torch.long, device="cpu")[order]
    return Data(
        train=(inputs[:1437], targets[:1437]),
        validation=(inputs[1437:], targets[1437:]),
        note="scikit-learn's digits: 1,437 images to train on, 360 to validate",
    )


class DigitsSlow(Digits):
    """scikit-learn's digits fine-tuned at a tenth of the learning rate, where nearest rounding loses still more."""

    name: ClassVar[str] = "digits-slow"
    title: ClassVar[str] = "the same classifier, fine-tuned ten times as slowly"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-4, "momentum": 0.9}


class DigitsFromScratch(Digits):
    """A small classifier of digits, trained for forty epochs of SGD with momentum from a random start.

    Meant for the few-bit recipes (``e8m5``, ``e8m3``, ``e8m1``), which model a processor that knows no other
    format, as in "Revisiting BFloat16 Training" (arXiv 2010.06192). Differences are so large here that the accuracy
    on 360 images shows them; the training loss decides.
    """

    name: ClassVar[str] = "digits-fpu"
    title: ClassVar[str] = "small classifier of scikit-learn's digits, from scratch"
    hyper: ClassVar[dict[str, Any]] = {"lr": 0.01, "momentum": 0.9}
    steps: ClassVar[int] = 40 * 45

    def model(self, data: Data, seed: int) -> nn.Module:
        """Return the network with random initial weights."""
        torch.manual_seed(seed)
        return make_digits_network()


# Cells of the image along each side, and pixels of the page along a cell.
PAGE_CELLS, CELL_PIXELS = 24, 4
CLASS_COUNT_WITH_BACKGROUND = 1 + 10
CLASS_LOSS_WEIGHT = 0.001
_COPIES_PER_DIGIT = 4

BoxesAndClasses = tuple[Tensor, Tensor]


class TwoHeads(Task):
    """Detection of one of scikit-learn's digits on a page: its box and its class, by two losses far apart.

    Each digit stands at a random place, in a random size. The network sees the page of 96x96 pixels as an image of
    24x24 cells. A trunk of one convolution feeds two heads with layers of their own, and the loss is

        sum over the batch of |box error in pixels|^2  +  0.001 mean over all cells of cross-entropy(class of the cell)

    as such losses are often written: a sum beside a mean, and an auxiliary head with a small weight. The gradient of a
    box is then 2 x 4 x its error in pixels, and that of a class logit at most 0.001 / (32 x 576): 2^31 lie between
    the two at an error of 16 pixels. AdamW with a small epsilon moves every layer by the same however small its
    gradients are, so that both heads learn in float32; what underflows to zero does not move.

    Judged by both heads, in nats: the cross-entropy of the image's class, as all cells together tell it, plus the mean
    absolute error of the box in cells, the negative logarithm of a Laplace density but for a constant.
    """

    name: ClassVar[str] = "two-heads"
    title: ClassVar[str] = "boxes and classes of digits on a page, two losses far apart"
    rule: ClassVar[str] = "AdamW"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-2, "eps": 1e-12, "weight_decay": 0.01}
    steps: ClassVar[int] = 700
    batch: ClassVar[int] = 32
    target: ClassVar[str] = "image"
    lr_factor = compute_task_warm_cosine_factor

    def load(self) -> Data:
        """Place every digit at four positions; validate on digits that are not trained on."""
        digits = load_digits()
        generator = torch.Generator().manual_seed(0)
        train, validation = (place_digits_on_pages(*part, generator) for part in (digits.train, digits.validation))
        note = f"scikit-learn's digits on pages: {len(train[0]):,} to train on, {len(validation[0]):,} to validate"
        return Data(train=train, validation=validation, note=note)

    def model(self, data: Data, seed: int) -> nn.Module:
        """Return a random start; boxes start in the middle of the page."""
        torch.manual_seed(seed)
        return DigitDetector()

    def loss(self, logits: Tensor | BoxesAndClasses, targets: Tensor) -> Tensor:
        """Return the weighted sum of both heads' losses."""
        boxes, classes = logits
        return (boxes - targets[:, 1:]).square().sum() + CLASS_LOSS_WEIGHT * F.cross_entropy(
            classes, label_cells(targets)
        )

    def compute_judged_loss(self, logits: Tensor | BoxesAndClasses, targets: Tensor) -> Tensor:
        """Return both heads' loss in nats."""
        boxes, classes = logits
        distance = (boxes - targets[:, 1:]).abs().mean() / CELL_PIXELS
        return F.nll_loss(compute_image_log_probabilities(classes), targets[:, 0]) + distance

    def is_hit(self, logits: Tensor | BoxesAndClasses, targets: Tensor) -> Tensor:
        """Return whether the image's class is right."""
        return compute_image_log_probabilities(logits[1]).argmax(1) == targets[:, 0]

    def count_judged(self, targets: Tensor) -> int:
        """Return the number of images, each of which is one hit or miss."""
        return len(targets)


class DigitDetector(nn.Module):
    """A network from images (batch, 1, 24, 24) to boxes (batch, 4) and class logits (batch, 11, 24, 24)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        twice = 2 * width
        self.trunk = nn.Sequential(*_make_convolution_layer(1, width))
        down = nn.MaxPool2d(2)
        layers = [
            *_make_convolution_layer(width, twice),
            down,
            *_make_convolution_layer(twice, twice),
            down,
            nn.Flatten(),
        ]
        last = nn.Linear(32, 4)
        self.box = nn.Sequential(*layers, nn.Linear(twice * (PAGE_CELLS // 4) ** 2, 32), nn.ReLU(), last)
        nn.init.constant_(last.bias, PAGE_CELLS / 2)
        layers = [
            *_make_convolution_layer(width, twice),
            down,
            *_make_convolution_layer(twice, twice),
            down,
            *_make_convolution_layer(twice, twice),
        ]
        self.classes = nn.Sequential(*layers, nn.ConvTranspose2d(twice, CLASS_COUNT_WITH_BACKGROUND, 4, stride=4))

    def forward(self, images: Tensor) -> BoxesAndClasses:
        """Return the boxes of images, in pixels of the page, and the class logits of their cells."""
        found = self.trunk(images)
        return (CELL_PIXELS * self.box(found)).float(), self.classes(found).float()


def _make_convolution_layer(inputs: int, outputs: int) -> Iterator[nn.Module]:
    yield nn.Conv2d(inputs, outputs, 3, padding=1)
    yield nn.GroupNorm(4, outputs)
    yield nn.ReLU()


def compute_image_log_probabilities(classes: Tensor) -> Tensor:
    """Return log-probabilities (batch, 10) of an image's digit over all cells, the background left out."""
    return classes.log_softmax(1).flatten(2)[:, 1:].logsumexp(2).log_softmax(1)


def label_cells(targets: Tensor) -> Tensor:
    """Return the class of every cell, (batch, 24, 24): 1 + the digit where its middle is in the box, else 0.

    >>> label_cells(torch.tensor([[7, 48, 48, 8, 16]]))[0, 9:13, 10:14]
    tensor([[0, 0, 0, 0],
            [0, 8, 8, 0],
            [0, 8, 8, 0],
            [0, 8, 8, 0]])
    """
    middle = torch.arange(PAGE_CELLS, dtype=torch.float32, device="cpu") * CELL_PIXELS + CELL_PIXELS / 2
    across, down, width, height = targets[:, 1:, None].unbind(1)
    columns, rows = (middle - across).abs() < width / 2, (middle - down).abs() < height / 2
    return torch.where(rows[:, :, None] & columns[:, None, :], 1 + targets[:, :1, None], 0)


def place_digits_on_pages(images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
    """Place digits of 8x8 pixels (n, 64) on pages: images (4 n, 1, 24, 24), targets (4 n, 5) in page pixels.

    A target is the digit and its box: middle across, middle down, width and height, from 8 to 16 cells.
    """
    images, labels = images.repeat(_COPIES_PER_DIGIT, 1), labels.repeat(_COPIES_PER_DIGIT)
    count, page = len(images), PAGE_CELLS * CELL_PIXELS
    shape = (count, 2)
    sizes = torch.randint(
        8 * CELL_PIXELS, 16 * CELL_PIXELS + 1, shape, generator=generator, dtype=torch.int64, device="cpu"
    )
    places = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    middles = (sizes.float() / 2 + places * (page - sizes)).round().long()
    # From places on the page to places in the digit, both in [-1, 1].
    zoom = page / sizes.float()
    maps = torch.cat([torch.diag_embed(zoom), (zoom * (1 - 2 * middles / page))[:, :, None]], 2)
    grid = F.affine_grid(maps, [count, 1, PAGE_CELLS, PAGE_CELLS], align_corners=False)
    pages = F.grid_sample(images.view(count, 1, 8, 8), grid, align_corners=False)
    return pages, torch.cat([labels[:, None], middles, sizes], 1)
