"""Trainings of small models of transformers, from random weights: Llama, BERT, ViT, ResNet."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._by_hand import OnCharacters
from ._training import Loss, Training, with_patches

WORDS, LONGEST = 4000, 24
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "attn_implementation": "eager"}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@cache
def photographs(data: Path, part: str, count: int) -> tuple[Tensor, Tensor]:
    """The first so many images of CIFAR-10 (n, 3, 32, 32), of about unit spread, and their classes."""
    import numpy as np
    import pyarrow.parquet as parquet
    from PIL import Image

    table = parquet.read_table(data / "cifar10" / f"{part}.parquet", columns=["img", "label"]).slice(0, count)
    images = [np.asarray(Image.open(io.BytesIO(one["bytes"])).convert("RGB")) for one in table["img"].to_pylist()]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
    return (pixels - 121.0) / 64.0, torch.tensor(table["label"].to_pylist())


@cache
def sentences(data: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """SST-2, words as numbers (n, 24), 0 after the end and 1 for rare words; with each whether it praises."""
    import pyarrow.parquet as parquet

    parts = [parquet.read_table(data / "sst2" / f"{part}.parquet").to_pydict() for part in ("train", "validation")]
    counts = Counter(word for sentence in parts[0]["sentence"] for word in sentence.split())
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common(WORDS - 2), 2)}
    found = []
    for part in parts:
        rows = [[numbers.get(word, 1) for word in sentence.split()[:LONGEST]] for sentence in part["sentence"]]
        ids = torch.tensor([row + [0] * (LONGEST - len(row)) for row in rows])
        found.append((ids, torch.tensor(part["label"])))
    return tuple(found)


class Llama(OnCharacters):
    """Shakespeare's characters by two layers of width 64, gradients clipped."""

    title, steps, clip = "tiny Llama", 160, 1.0
    LENGTH, BATCH = 48, 12

    def model(self, count: int) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        more = {"intermediate_size": 160, "num_hidden_layers": 2, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=count, max_position_embeddings=64, **SIZES, **more))

    def error(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs, use_cache=False).logits.float().flatten(0, 1), targets.flatten())


class OnImages(Training):
    """CIFAR-10: 10,000 images to train on, 500 to judge by."""

    judged = "cross-entropy of the class"
    BATCH, RATE = 32, 1e-3

    def build(self, data: Path) -> None:
        self.train, self.rest = photographs(data, "train", 10_000), photographs(data, "test", 500)
        self.models = [with_patches(self.model())]
        self.optimizers = [torch.optim.AdamW(self.models[0].parameters(), lr=self.RATE, weight_decay=0.05)]

    def model(self) -> nn.Module:
        """Of transformers."""
        raise NotImplementedError

    def losses(self, step: int) -> Iterator[tuple[int, Loss]]:
        rows = self.rows(self.BATCH, len(self.train[1]))
        images, classes = (x[rows] for x in self.train)
        yield 0, lambda models: F.cross_entropy(models[0](pixel_values=images).logits.float(), classes)

    def judge(self, models: Sequence[nn.Module]) -> Tensor:
        return F.cross_entropy(models[0](pixel_values=self.rest[0]).logits, self.rest[1])


class ViT(OnImages):
    """Patches of 8x8, three layers of width 64."""

    title, steps = "ViT", 160

    def model(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        shape = {"image_size": 32, "patch_size": 8, "num_labels": 10}
        return ViTForImageClassification(
            ViTConfig(intermediate_size=128, num_hidden_layers=3, **shape, **SIZES, **QUIET)
        )


class ResNet(OnImages):
    """Three stages of basic blocks, 16 to 64 channels, with batch norms."""

    title, steps = "ResNet", 120

    def model(self) -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        shape = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "layer_type": "basic"}
        return ResNetForImageClassification(ResNetConfig(num_labels=10, **shape))


class BERT(Training):
    """Sentences of SST-2, whether they praise, by two layers of width 64; gradients clipped."""

    title, judged = "BERT", "cross-entropy of the class"
    steps, clip = 160, 1.0

    def build(self, data: Path) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        self.train, self.rest = sentences(data)
        more = {"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": WORDS, "max_position_embeddings": 32}
        self.models = [BertForSequenceClassification(BertConfig(num_labels=2, **more, **SIZES, **QUIET))]
        self.optimizers = [torch.optim.AdamW(self.models[0].parameters(), lr=3e-4)]

    def losses(self, step: int) -> Iterator[tuple[int, Loss]]:
        rows = self.rows(32, len(self.train[1]))
        ids, classes = (x[rows] for x in self.train)
        yield 0, lambda models: self.error(models[0], ids, classes)

    def error(self, model: nn.Module, ids: Tensor, classes: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model(ids, attention_mask=(ids != 0).long()).logits.float(), classes)

    def judge(self, models: Sequence[nn.Module]) -> Tensor:
        return self.error(models[0], *self.rest)
