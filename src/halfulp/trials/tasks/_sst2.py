"""Task sst2: whether a sentence of a film review is favourable, by a small transformer of BERT's kind."""

import collections
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._files import TaskWithDataFiles, read_parquet
from ._task import Batch, Data, compute_task_warm_cosine_factor
from ._text import GPT

SENTENCE_LENGTH = 32
# The first numbers of the vocabulary: padding, the token that is classified, and every rare word.
_PAD_TOKEN, _CLASS_TOKEN, _RARE_TOKEN = 0, 1, 2


class SST2(TaskWithDataFiles):
    """Sentiment of the sentences of SST-2, by a transformer from a random start; needs ``data``.

    "Revisiting BFloat16 Training" (arXiv 2010.06192) fine-tunes BERT with AdamW; this is its kind at a size for two
    cores: attention in both directions, a token in front whose last state is classified, words as tokens.
    """

    name: ClassVar[str] = "sst2"
    title: ClassVar[str] = "transformer of BERT's kind on sentences of film reviews"
    rule: ClassVar[str] = "AdamW"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
    steps: ClassVar[int] = 650
    batch: ClassVar[int] = 32
    target: ClassVar[str] = "sentence"
    lr_factor = compute_task_warm_cosine_factor
    folder: ClassVar[str] = "sst2"
    files: ClassVar[tuple[str, ...]] = ("train.parquet", "validation.parquet")
    how: ClassVar[str] = (
        "They are the Parquet files (columns sentence and label) of the data set SetFit/sst2 on the Hugging Face hub, "
        "named so"
    )

    def load(self) -> Data:
        """Load sentences, with the words that occur twice or more in training as the vocabulary."""
        parts = [read_parquet(f"{self.data}/{name}.parquet", ["sentence", "label"]) for name in ("train", "validation")]
        counts = collections.Counter(word for sentence in parts[0][0] for word in sentence.split())
        words = sorted(word for word, count in counts.items() if count > 1)
        vocabulary = {word: number for number, word in enumerate(words, 1 + _RARE_TOKEN)}
        train, validation = (_encode_sentences(sentences, labels, vocabulary) for sentences, labels in parts)
        note = (
            f"SST-2: {len(train[0]):,} sentences to train on, {len(validation[0]):,} to validate, {len(words):,} words"
        )
        return Data(train=train, validation=validation, note=note)

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build a transformer of width 64, two layers, four heads."""
        torch.manual_seed(seed)
        return SentenceClassifier(1 + int(data.train[0].max()), width=64, time=SENTENCE_LENGTH, outputs=2)


class SentenceClassifier(GPT):
    """A transformer from word numbers (batch, time), 0 where a sentence has ended, to logits (batch, 2)."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of word numbers (batch, time)."""
        x = self.tokens(ids) + self.positions.weight
        barred = (ids == _PAD_TOKEN)[:, None, None, :]
        for block in self.blocks:
            x = block(x, barred)
        return self.head(self.norm(x[:, 0]))


def _encode_sentences(sentences: list[str], labels: list[int], vocabulary: dict[str, int]) -> Batch:
    """Encode sentences as numbers (n, TIME), cut or padded, and their labels.

    >>> _encode_sentences(["a film , a film"], [1], {"a": 3, "film": 4})[0][0, :8]
    tensor([1, 3, 4, 2, 3, 4, 0, 0])
    """
    rows = []
    for sentence in sentences:
        row = [_CLASS_TOKEN, *(vocabulary.get(word, _RARE_TOKEN) for word in sentence.split())][:SENTENCE_LENGTH]
        rows.append(row + [_PAD_TOKEN] * (SENTENCE_LENGTH - len(row)))
    return torch.tensor(rows, dtype=torch.int64, device="cpu"), torch.tensor(labels, dtype=torch.int64, device="cpu")
