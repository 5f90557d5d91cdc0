"""Task text: a character-level GPT on English text that every Python carries."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._gpt import GPT
from ._task import Batch, Data, Task, warm_cosine

TIME = 64


class CharacterGPT(Task):
    """What every character-level task shares; a subclass says where the text comes from."""

    rule: ClassVar[str] = "AdamW"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
    steps: ClassVar[int] = 600
    batch: ClassVar[int] = 16
    target: ClassVar[str] = "character"

    def model(self, data: Data, seed: int) -> nn.Module:
        """A quarter of a million parameters: width 96, two layers, four heads."""
        torch.manual_seed(seed)
        return GPT(int(max(data.train[0].max(), data.validation[0].max())) + 1, time=TIME)

    def batches(self, data: Data, seed: int, steps: int) -> Iterator[Batch]:
        """Windows of 64 characters at random places of the training text."""
        stream = data.train[0]
        window = torch.arange(TIME, dtype=torch.int64, device="cpu")
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            shape = (self.batch,)
            starts = torch.randint(len(stream) - TIME, shape, generator=generator, dtype=torch.int64, device="cpu")
            places = starts[:, None] + window
            yield stream[places], stream[places + 1]

    def rate(self, step: int, steps: int) -> float:
        """A warm-up over a tenth of the steps, then a cosine."""
        return warm_cosine(step, steps)


@dataclasses.dataclass(frozen=True)
class Text(CharacterGPT):
    """Next-character prediction on ``pydoc_data.topics``, the help pages of Python itself (465,000 characters)."""

    name: ClassVar[str] = "text"
    # With three seeds and the default recipes two cores take about three minutes for both default tasks.
    steps: ClassVar[int] = 450
    title: ClassVar[str] = "character-level GPT on the help pages of Python"

    def load(self) -> Data:
        """The first nine tenths train, the last tenth validates."""
        from pydoc_data import topics

        return characters("\n".join(topics.topics.values()), "pydoc_data.topics of this Python")


def characters(text: str, source: str) -> Data:
    """Text as character ids: a training stream, and validation windows that do not overlap."""
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([alphabet[character] for character in text], dtype=torch.int64, device="cpu")
    split = len(ids) * 9 // 10
    train, rest = ids[:split], ids[split:]
    note = f"{source}: {split:,} characters to train on, {len(rest):,} to validate, {len(alphabet)} different"
    return Data(train=(train[:-1], train[1:]), validation=_windows(rest), note=note)


def _windows(ids: Tensor) -> Batch:
    count = (len(ids) - 1) // TIME
    return ids[: count * TIME].view(count, TIME), ids[1 : count * TIME + 1].view(count, TIME)
