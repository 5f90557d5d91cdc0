"""Trainings of models written by hand: a recurrent one that grows, experts, and many layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._training import Loss, Training


@cache
def characters(data: Path) -> tuple[Tensor, Tensor, int]:
    """Shakespeare's plays as numbers of characters, to train on and to judge by, and how many characters there are."""
    text = (data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([alphabet[character] for character in text])
    split = len(ids) * 9 // 10
    return ids[:split], ids[split:], len(alphabet)


def windows(ids: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(n, length) characters from each start on, and those that follow them."""
    places = starts[:, None] + torch.arange(length)
    return ids[places], ids[places + 1]


class OnCharacters(Training):
    """A model of the next character."""

    judged = "cross-entropy of the next character"
    LENGTH, BATCH, RATE = 48, 32, 2e-3
    sums: ClassVar[bool] = False  # losses are sums over the batch's characters, and not means

    def build(self, data: Path) -> None:
        self.train, self.rest, count = characters(data)
        self.models = [self.model(count)]
        self.optimizers = [torch.optim.AdamW(self.models[0].parameters(), lr=self.RATE)]

    def model(self, count: int) -> nn.Module:
        """From (n, length) characters to logits (n, length, count), or of the last ones (n, count)."""
        raise NotImplementedError

    def length(self, step: int) -> int:
        """Of the sequences of a step."""
        return self.LENGTH

    def losses(self, step: int) -> Iterator[tuple[int, Loss]]:
        read = windows(self.train, self.rows(self.BATCH, len(self.train) - self.LENGTH - 1), self.length(step))
        factor = read[1].numel() if self.sums else 1
        yield 0, lambda models: factor * self.error(models[0], *read)

    def error(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, a mean."""
        logits = model(inputs).float()
        wanted = targets if logits.dim() == 3 else targets[:, -1]
        return F.cross_entropy(logits.flatten(0, -2), wanted.flatten())

    def judge(self, models: Sequence[nn.Module]) -> Tensor:
        starts = torch.arange(0, len(self.rest) - self.LENGTH - 1, 331)
        return self.error(models[0], *windows(self.rest, starts, self.LENGTH))


class Recurrent(nn.Module):
    """h = tanh(W x + U h), character by character."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(count, width)
        self.inputs, self.state = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, count)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids)
        h, found = torch.zeros_like(x[:, 0]), []
        for time in range(ids.shape[1]):
            h = torch.tanh(self.inputs(x[:, time]) + self.state(h))
            found.append(self.head(h))
        return torch.stack(found, 1)


class GrowingRNN(OnCharacters):
    """Sequences of 1 character at first, and of 48 at the end; the loss is a sum over them."""

    title, steps, sums = "growing RNN", 160, True

    def model(self, count: int) -> nn.Module:
        return Recurrent(count, 64)

    def length(self, step: int) -> int:
        return 1 + (self.LENGTH - 1) * step // (self.steps - 1)


class Mixture(nn.Module):
    """Eight characters to the next one, by that of 32 experts which a router chooses."""

    def __init__(self, count: int, length: int, width: int, experts: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(count, 16)
        self.inputs, self.router = nn.Linear(16 * length, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, count)

    def forward(self, ids: Tensor) -> Tensor:
        h = F.gelu(self.inputs(self.characters(ids).flatten(1)))
        share, chosen = self.router(h).float().softmax(1).max(1)
        out = torch.zeros_like(h)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, (self.experts[number](h[rows]) * share[rows, None]).to(out.dtype))
        return self.head(h + out)


class Experts(OnCharacters):
    """32 experts without a loss that would balance them, so that some are used seldom; the loss is a sum."""

    title, steps, sums = "32 experts", 240, True
    LENGTH, BATCH = 8, 128

    def model(self, count: int) -> nn.Module:
        return Mixture(count, self.LENGTH, 64, 32)


class TanhLayers(Training):
    """Digits by 40 layers of width 48."""

    title, judged, steps = "40 tanh layers", "cross-entropy of the digit", 200

    def build(self, data: Path) -> None:
        from halfulp.trials.tasks._digits import load_digits

        self.data = load_digits()
        widths = [64] + 40 * [48]
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            parts += [nn.Linear(inputs, outputs), nn.Tanh()]
            nn.init.xavier_normal_(parts[-2].weight)
        self.models = [nn.Sequential(*parts, nn.Linear(48, 10))]
        self.optimizers = [torch.optim.AdamW(self.models[0].parameters(), lr=5e-4)]

    def losses(self, step: int) -> Iterator[tuple[int, Loss]]:
        rows = self.rows(64, len(self.data.train[1]))
        inputs, targets = (x[rows] for x in self.data.train)
        yield 0, lambda models: F.cross_entropy(models[0](inputs).float(), targets)

    def judge(self, models: Sequence[nn.Module]) -> Tensor:
        inputs, targets = self.data.validation
        return F.cross_entropy(models[0](inputs), targets)
