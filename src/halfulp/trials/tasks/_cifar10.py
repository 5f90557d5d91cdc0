"""Task cifar10: a small convolutional network on photographs."""

import dataclasses
import io
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import _task as _files
from ._task import Batch, Data, Task, warm_cosine

_HOW = (
    "They are the Parquet files (columns img.bytes and label) of the data set uoft-cs/cifar10 on the Hugging Face "
    "hub, plain_text/train-*.parquet and test-*.parquet, renamed"
)


@dataclasses.dataclass(frozen=True)
class Cifar10(Task):
    """CIFAR-10, 32x32 photographs of ten classes; needs ``data``. Judged by the loss on the test images."""

    data: str | None = None

    name: ClassVar[str] = "cifar10"
    title: ClassVar[str] = "small convolutional network on CIFAR-10"
    rule: ClassVar[str] = "SGD"
    hyper: ClassVar[dict[str, Any]] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
    steps: ClassVar[int] = 800
    batch: ClassVar[int] = 64
    target: ClassVar[str] = "image"

    def __post_init__(self) -> None:
        folder = _files.find("cifar10", self.data, ("train.parquet", "test.parquet"), _HOW)
        object.__setattr__(self, "data", str(folder))

    def load(self) -> Data:
        """All training images; of the test images the first 2,000."""
        train = _read(f"{self.data}/train.parquet")
        validation = _read(f"{self.data}/test.parquet", 2000)
        note = f"CIFAR-10: {len(train[1]):,} images to train on, {len(validation[1]):,} test images"
        return Data(train=train, validation=(_pixels(validation[0]), validation[1]), note=note)

    def model(self, data: Data, seed: int) -> nn.Module:
        """Three stages of two convolutions, group norms instead of batch norms: no running averages."""
        torch.manual_seed(seed)
        return nn.Sequential(
            *_stage(3, 16), *_stage(16, 32), *_stage(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
        )

    def batches(self, data: Data, seed: int, steps: int) -> Iterator[Batch]:
        """Shuffled epochs, half of the images mirrored."""
        generator = torch.Generator().manual_seed(seed + 7)
        for images, labels in super().batches(data, seed, steps):
            mirrored = torch.rand(len(images), generator=generator, dtype=torch.float32, device="cpu") < 0.5
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
            yield _pixels(images), labels

    def rate(self, step: int, steps: int) -> float:
        """A warm-up over a tenth of the steps, then a cosine."""
        return warm_cosine(step, steps)


def _stage(inputs: int, outputs: int) -> Iterator[nn.Module]:
    for channels in (inputs, outputs):
        yield nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        yield nn.GroupNorm(4, outputs)
        yield nn.ReLU()
    yield nn.MaxPool2d(2)


def _pixels(images: Tensor) -> Tensor:
    """Bytes to floats of about unit spread."""
    return (images.float() - 121.0) / 64.0


def _read(path: str, limit: int | None = None) -> Batch:
    try:
        import numpy as np
        import pyarrow.parquet as parquet
        from PIL import Image
    except ImportError as error:
        raise ValueError(f"task 'cifar10' reads Parquet and images ({error}): pip install 'halfulp[cli]'") from None
    table = parquet.read_table(path, columns=["img", "label"])
    table = table.slice(0, limit) if limit else table
    images = [np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")) for image in table["img"].to_pylist()]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return pixels, torch.tensor(table["label"].to_pylist(), dtype=torch.long, device="cpu")
