"""Tasks text, tinyshakespeare, tinyshakespeare-lstm and gpt-scaled: next characters by a GPT or an LSTM."""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._files import TaskWithDataFiles, decode_file_content
from ._task import Batch, Data, Task, compute_task_warm_cosine_factor


class TransformerBlock(nn.Module):
    """A transformer block: pre-norm attention and feed-forward.

    Attention is spelled out, operator by operator, unless it is ``fused`` (and then causal, whatever is barred): on the
    CPU the backward of the fused bfloat16 operator takes as long as the rest of the step.
    """

    def __init__(self, width: int, heads: int, fused: bool = False):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """Return the block's output for x, (batch, time, width); ``future`` is True where attention is barred."""
        x = x + self.out(self._attend(self.attention_norm(x), future))
        return x + self.down(nn.functional.gelu(self.up(self.feed_norm(x))))

    def _attend(self, x: Tensor, future: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if self.fused:
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = (query @ key.transpose(-2, -1)) * (width // self.heads) ** -0.5
            attended = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        return attended.transpose(1, 2).reshape(batch, time, width)


class GPT(nn.Module):
    """A decoder-only transformer from token ids (batch, time) to logits (batch, time, outputs or vocabulary)."""

    future: Tensor

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 96,
        layers: int = 2,
        heads: int = 4,
        time: int = 64,
        fused: bool = False,
        outputs: int | None = None,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(time, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs or vocabulary)
        future = torch.ones(time, time, dtype=torch.bool, device=self.tokens.weight.device).triu(1)
        self.register_buffer("future", future, persistent=False)
        self.apply(init_weights)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (batch, time), time at most the model's."""
        time = ids.shape[1]
        x = self.tokens(ids) + self.positions.weight[:time]
        for block in self.blocks:
            x = block(x, self.future[:time, :time])
        return self.head(self.norm(x))


def init_weights(module: nn.Module) -> None:
    """Draw the weights of a layer from N(0, 0.02), its bias zero; for `nn.Module.apply`."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class LSTM(nn.Module):
    """A recurrent layer from (batch, time, inputs) to (batch, time, width) (Hochreiter and Schmidhuber, 1997).

    It starts from a state of zeros. torch's own runs as one operator, which no emulation can look into.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.width = width
        self.of_input = nn.Linear(inputs, 4 * width)
        self.of_state = nn.Linear(width, 4 * width, bias=False)
        with torch.no_grad():  # the forget gate starts open
            self.of_input.bias[width : 2 * width] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the states of every step for x, (batch, time, inputs)."""
        gates, *rest = self.of_input(x).unbind(1)
        into, _, out = gates[:, : 3 * self.width].sigmoid().chunk(3, -1)
        memory = into * gates[:, 3 * self.width :].tanh()
        states = [out * memory.tanh()]
        for given in rest:
            gates = given + self.of_state(states[-1])
            into, forget, out = gates[:, : 3 * self.width].sigmoid().chunk(3, -1)
            memory = forget * memory + into * gates[:, 3 * self.width :].tanh()
            states.append(out * memory.tanh())
        return torch.stack(states, 1)


CHARACTERS_PER_WINDOW = 64


class CharacterGPT(Task):
    """Next-character prediction by a GPT, for subclasses that load a text."""

    rule: ClassVar[str] = "AdamW"
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
    steps: ClassVar[int] = 600
    batch: ClassVar[int] = 16
    target: ClassVar[str] = "character"
    lr_factor = compute_task_warm_cosine_factor
    time: ClassVar[int] = CHARACTERS_PER_WINDOW

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build a GPT of width 96, two layers, four heads: a quarter of a million parameters."""
        torch.manual_seed(seed)
        return GPT(count_distinct_characters(data), time=CHARACTERS_PER_WINDOW)

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


def count_distinct_characters(data: Data) -> int:
    """Return how many different characters a text has."""
    return int(max(data.train[0].max(), data.validation[0].max())) + 1


class PythonHelpText(CharacterGPT):
    """Next-character prediction on ``pydoc_data.topics``, the help pages of Python itself (465,000 characters)."""

    name: ClassVar[str] = "text"
    # With three seeds and the default recipes two cores take about three minutes for both default tasks.
    steps: ClassVar[int] = 450
    title: ClassVar[str] = "character-level GPT on the help pages of Python"

    def load(self) -> Data:
        """Load text: the first nine tenths train, the last tenth validates."""
        from pydoc_data import topics

        return encode_characters("\n".join(topics.topics.values()), "pydoc_data.topics of this Python")


def encode_characters(text: str, source: str, time: int = CHARACTERS_PER_WINDOW, most: int | None = None) -> Data:
    """Convert text to character ids: a training stream, and at most so many disjoint validation windows."""
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([alphabet[character] for character in text], dtype=torch.int64, device="cpu")
    split = len(ids) * 9 // 10
    train, rest = ids[:split], ids[split:]
    if len(rest) <= time:
        raise ValueError(
            f"{source}: {len(ids):,} characters are too few, {10 * (time + 1):,} suffice: get the text again"
        )
    count = min((len(rest) - 1) // time, most or len(rest))
    validation = rest[: count * time].view(count, time), rest[1 : count * time + 1].view(count, time)
    note = (
        f"{source}: {split:,} characters to train on, {validation[0].numel():,} to validate, {len(alphabet)} different"
    )
    return Data(train=(train[:-1], train[1:]), validation=validation, note=note)


class TinyShakespeare(TaskWithDataFiles, CharacterGPT):
    """Next-character prediction on ``input.txt`` (1.1 million characters); needs ``data``."""

    name: ClassVar[str] = "tinyshakespeare"
    title: ClassVar[str] = "character-level GPT on Shakespeare"
    folder: ClassVar[str] = "tinyshakespeare"
    files: ClassVar[tuple[str, ...]] = ("input.txt",)
    how: ClassVar[str] = (
        "input.txt is the 1.1 MB file of karpathy/char-rnn: "
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    )

    def load(self) -> Data:
        """Load text: the first nine tenths train; of the last tenth, 256 windows validate."""
        path = Path(self.data or "", "input.txt")
        text = decode_file_content(str(path), bytes.decode, path.read_bytes())
        return encode_characters(text, "tinyshakespeare", self.time, 256)


class TinyShakespeareLSTM(TinyShakespeare):
    """Next-character prediction on ``input.txt`` by a recurrent network of one layer; needs ``data``."""

    name: ClassVar[str] = "tinyshakespeare-lstm"
    title: ClassVar[str] = "character-level LSTM on Shakespeare"
    hyper: ClassVar[dict[str, Any]] = {"lr": 4e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
    time: ClassVar[int] = 32

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build an LSTM of width 128, from token ids (batch, time) to logits (batch, time, vocabulary)."""
        torch.manual_seed(seed)
        vocabulary = count_distinct_characters(data)
        return nn.Sequential(
            OrderedDict(tokens=nn.Embedding(vocabulary, 64), recurrent=LSTM(64, 128), head=nn.Linear(128, vocabulary))
        )


class FusedAttentionGPT(PythonHelpText):
    """Next-character prediction with the paper's AdamW (beta 0.9 and 0.95) and fused attention.

    "Scalify" (Balança et al., arXiv 2407.17353) trains 168 million parameters on WikiText-103; these are half a million
    on the help pages of Python.
    """

    name: ClassVar[str] = "gpt-scaled"
    title: ClassVar[str] = "GPT with fused attention on the help pages of Python"
    hyper: ClassVar[dict[str, Any]] = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    steps: ClassVar[int] = 500

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build a GPT of width 128, three layers, four heads."""
        torch.manual_seed(seed)
        return GPT(
            count_distinct_characters(data), width=128, layers=3, heads=4, time=CHARACTERS_PER_WINDOW, fused=True
        )
