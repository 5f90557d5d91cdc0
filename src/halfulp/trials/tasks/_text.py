"""Tasks text, tinyshakespeare and tinyshakespeare-lstm: next characters by a GPT or an LSTM."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._files import FileTask, decode
from ._gpt import GPT
from ._lstm import CharacterLSTM
from ._task import Batch, Data, Task, warm_cosine_rate

TIME = 64
_HOW = (
    "input.txt is the 1.1 MB file of karpathy/char-rnn: "
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


class CharacterGPT(Task):
    """Next-character prediction by a GPT, for subclasses that load a text."""

    rule: ClassVar[str] = "AdamW"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
    steps: ClassVar[int] = 600
    sizes: ClassVar[dict[str, int]] = {"smoke": 4, "small": 60, "full": 20_000}
    batch: ClassVar[int] = 16
    target: ClassVar[str] = "character"
    rate = warm_cosine_rate
    time: ClassVar[int] = TIME

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build a GPT of width 96, two layers, four heads: a quarter of a million parameters."""
        torch.manual_seed(seed)
        return GPT(int(max(data.train[0].max(), data.validation[0].max())) + 1, time=TIME)

    def batches(self, data: Data, seed: int, steps: int) -> Iterator[Batch]:
        """Yield windows of characters at random places of the training text."""
        stream = data.train[0]
        window = torch.arange(self.time, dtype=torch.int64, device="cpu")
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            shape = (self.batch,)
            starts = torch.randint(len(stream) - self.time, shape, generator=generator, dtype=torch.int64, device="cpu")
            places = starts[:, None] + window
            yield stream[places], stream[places + 1]


@dataclasses.dataclass(frozen=True)
class Text(CharacterGPT):
    """Next-character prediction on ``pydoc_data.topics``, the help pages of Python itself (465,000 characters)."""

    name: ClassVar[str] = "text"
    # With three seeds and the default recipes two cores take about three minutes for both default tasks.
    steps: ClassVar[int] = 450
    title: ClassVar[str] = "character-level GPT on the help pages of Python"

    def load(self) -> Data:
        """Load text: the first nine tenths train, the last tenth validates."""
        from pydoc_data import topics

        return encode_characters("\n".join(topics.topics.values()), "pydoc_data.topics of this Python")


def encode_characters(text: str, source: str, time: int = TIME, most: int | None = None) -> Data:
    """Convert text to character ids: a training stream, and at most so many disjoint validation windows."""
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([alphabet[character] for character in text], dtype=torch.int64, device="cpu")
    split = len(ids) * 9 // 10
    train, rest = ids[:split], ids[split:]
    if len(rest) <= time:
        raise ValueError(
            f"{source}: {len(ids):,} characters are too few, {10 * (time + 1):,} suffice: get the text again"
        )
    validation = _cut_windows(rest, time, most)
    note = (
        f"{source}: {split:,} characters to train on, {validation[0].numel():,} to validate, {len(alphabet)} different"
    )
    return Data(train=(train[:-1], train[1:]), validation=validation, note=note)


def _cut_windows(ids: Tensor, time: int, most: int | None) -> Batch:
    count = min((len(ids) - 1) // time, most or len(ids))
    return ids[: count * time].view(count, time), ids[1 : count * time + 1].view(count, time)


@dataclasses.dataclass(frozen=True)
class TinyShakespeare(FileTask, CharacterGPT):
    """Next-character prediction on ``input.txt`` (1.1 million characters); needs ``data``."""

    name: ClassVar[str] = "tinyshakespeare"
    title: ClassVar[str] = "character-level GPT on Shakespeare"
    folder: ClassVar[str] = "tinyshakespeare"
    files: ClassVar[tuple[str, ...]] = ("input.txt",)
    how: ClassVar[str] = _HOW

    def load(self) -> Data:
        """Load text: the first nine tenths train; of the last tenth, 256 windows validate."""
        path = Path(self.data or "", "input.txt")
        return encode_characters(decode(str(path), bytes.decode, path.read_bytes()), "tinyshakespeare", self.time, 256)


@dataclasses.dataclass(frozen=True)
class TinyShakespeareLSTM(TinyShakespeare):
    """Next-character prediction on ``input.txt`` by a recurrent network of one layer; needs ``data``."""

    name: ClassVar[str] = "tinyshakespeare-lstm"
    title: ClassVar[str] = "character-level LSTM on Shakespeare"
    hyper: ClassVar[dict[str, Any]] = {"lr": 4e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
    sizes: ClassVar[dict[str, int]] = {"smoke": 3, "small": 60, "full": 10_000}
    time: ClassVar[int] = 32

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build an LSTM of width 128."""
        torch.manual_seed(seed)
        return CharacterLSTM(int(max(data.train[0].max(), data.validation[0].max())) + 1)
