"""Tasks cifar10 and cifar10-resnet: small convolutional and residual networks on photographs."""

import io
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._files import TaskWithDataFiles, decode_file_content, read_parquet
from ._task import Batch, Data, compute_task_warm_cosine_factor


class Cifar10(TaskWithDataFiles):
    """CIFAR-10, 32x32 photographs of ten classes; needs ``data``. Judged by the loss on the test images."""

    name: ClassVar[str] = "cifar10"
    title: ClassVar[str] = "small convolutional network on CIFAR-10"
    rule: ClassVar[str] = "SGD"
    hyper: ClassVar[dict[str, Any]] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
    steps: ClassVar[int] = 800
    batch: ClassVar[int] = 64
    target: ClassVar[str] = "image"
    lr_factor = compute_task_warm_cosine_factor
    folder: ClassVar[str] = "cifar10"
    files: ClassVar[tuple[str, ...]] = ("train.parquet", "test.parquet")
    how: ClassVar[str] = (
        "They are the Parquet files (columns img.bytes and label) of the data set uoft-cs/cifar10 on the Hugging Face "
        "hub, plain_text/train-*.parquet and test-*.parquet, renamed"
    )

    def load(self) -> Data:
        """Load all training images, and the first 2,000 test images."""
        train = _read_images(f"{self.data}/train.parquet")
        validation = _read_images(f"{self.data}/test.parquet", 2000)
        note = f"CIFAR-10: {len(train[1]):,} images to train on, {len(validation[1]):,} test images"
        return Data(train=train, validation=(_scale_pixels(validation[0]), validation[1]), note=note)

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build three stages of two convolutions, with group norms: no running averages."""
        torch.manual_seed(seed)
        return nn.Sequential(
            *_make_conv_stage(3, 16),
            *_make_conv_stage(16, 32),
            *_make_conv_stage(32, 64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    def batches(self, data: Data, seed: int, steps: int) -> Iterator[Batch]:
        """Yield shuffled epochs, half of the images mirrored."""
        generator = torch.Generator().manual_seed(seed + 7)
        for images, labels in super().batches(data, seed, steps):
            mirrored = torch.rand(len(images), generator=generator, dtype=torch.float32, device="cpu") < 0.5
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
            yield _scale_pixels(images), labels


def _make_conv_stage(inputs: int, outputs: int) -> Iterator[nn.Module]:
    for channels in (inputs, outputs):
        yield nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        yield nn.GroupNorm(4, outputs)
        yield nn.ReLU()
    yield nn.MaxPool2d(2)


def _scale_pixels(images: Tensor) -> Tensor:
    """Convert bytes to floats of about unit spread."""
    return (images.float() - 121.0) / 64.0


def _read_images(path: str, rows: int | None = None) -> Batch:
    try:
        import numpy as np
        from PIL import Image
    except ImportError as error:
        raise ValueError(f"task 'cifar10' reads images ({error}): pip install 'halfulp[cli]'") from None

    def decode_pixels(image: dict[str, bytes]) -> Any:
        return np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB"))

    images, labels = read_parquet(path, ["img", "label"], rows)
    whole: Any = np.stack(
        [decode_file_content(f"row {row} of {path}", decode_pixels, image) for row, image in enumerate(images)]
    )
    pixels_first = torch.from_numpy(whole).permute(0, 3, 1, 2).contiguous()
    return pixels_first, torch.tensor(labels, dtype=torch.long, device="cpu")


class ResidualBlock(nn.Module):
    """A residual block with group norms, as running averages have no place in a recipe."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(4, outputs)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, outputs, height / stride, width / stride) of (batch, inputs, height, width)."""
        inner = self.first_norm(self.first(x)).relu()
        return (self.skip(x) + self.second_norm(self.second(inner))).relu()


class Cifar10ResNet(Cifar10):
    """CIFAR-10 with a residual network of eight layers (He et al., arXiv 1512.03385); needs ``data``."""

    name: ClassVar[str] = "cifar10-resnet"
    title: ClassVar[str] = "residual network of eight layers on CIFAR-10"
    steps: ClassVar[int] = 500
    stride: ClassVar[int] = 1

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build three stages of one block, 16 to 64 channels."""
        torch.manual_seed(seed)
        stem = nn.Conv2d(3, 16, 3, self.stride, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU()
        blocks = ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2)
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Cifar10HalfResolutionResNet(Cifar10ResNet):
    """CIFAR-10 with that residual network at half the resolution, for a quarter of the cost; needs ``data``."""

    name: ClassVar[str] = "cifar10-resnet-half"
    title: ClassVar[str] = "the same residual network on CIFAR-10 at half the resolution"
    stride: ClassVar[int] = 2
