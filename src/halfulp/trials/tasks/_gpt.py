"""A small decoder-only transformer."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block: pre-norm attention and feed-forward.

    Attention is spelled out, operator by operator: on the CPU the backward of the fused bfloat16 operator takes as long
    as the rest of the step.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
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
        scores = (query @ key.transpose(-2, -1)) * (width // self.heads) ** -0.5
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).reshape(batch, time, width)


class GPT(nn.Module):
    """A decoder-only transformer from token ids (batch, time) to logits (batch, time, vocabulary)."""

    future: Tensor

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 96,
        layers: int = 2,
        heads: int = 4,
        time: int = 64,
        block: type[Block] = Block,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(time, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer(
            "future",
            torch.ones(time, time, dtype=torch.bool, device=self.tokens.weight.device).triu(1),
            persistent=False,
        )
        self.apply(start)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (batch, time), time at most the model's."""
        time = ids.shape[1]
        x = self.tokens(ids) + self.positions.weight[:time]
        for block in self.blocks:
            x = block(x, self.future[:time, :time])
        return self.head(self.norm(x))


def start(module: nn.Module) -> None:
    """Draw the weights of a layer from N(0, 0.02), its bias zero; for `nn.Module.apply`."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
