"""A 12-layer GPT whose layers take weights of any dtype, and a training that a plant can change in one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 12, 32, 2, 16, 64


class Linear(nn.Linear):
    """Computes in the dtype of its input, whatever its weight is stored in."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Norm(nn.LayerNorm):
    """The same for a norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention and a multilayer perceptron beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = Norm(WIDTH), Attention(), Norm(WIDTH)
        self.mlp = nn.Sequential(Linear(WIDTH, 4 * WIDTH), nn.GELU(), Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = Norm(WIDTH), Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of (batch, length, vocabulary)."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def tokens(batch: int = 8) -> Tensor:
    """Return sequences that a model can learn: each token is the one before plus a step that stays."""
    start, step = torch.randint(0, VOCABULARY, (batch, 1)), torch.randint(1, 4, (batch, 1))
    return (start + step * torch.arange(LENGTH + 1)) % VOCABULARY


@dataclass
class Training:
    """A training of the GPT that a plant changes before it begins.

    Attributes:
        model: the model.
        layer: the number of the layer that the plant is in.
        steps: how many.
        special: parameters with options of their own, by name.
        left_out: names of parameters that no optimizer gets.
        optimizer: makes the optimizer of param groups.
        before: called with the optimizer before the observation begins.
        penalty: a loss whose backward pass goes before the batch's.
        around: called after each step.
        loss_scale: what the loss is multiplied by.
        scaler: a gradient scaler, under float16 autocast.
        watched: what `hu.observe` is given besides.
    """

    model: GPT
    layer: int
    steps: int = 16
    special: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = lambda groups: torch.optim.AdamW(
        groups, lr=1e-3, weight_decay=0.0
    )
    before: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
    penalty: Callable[[], Tensor] | None = None
    after: Callable[[], None] = lambda: None
    loss_scale: float = 1.0
    scaler: torch.amp.GradScaler | None = None
    watched: dict[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> Block:
        """The layer that the plant is in."""
        return self.model.blocks[self.layer]

    def backward(self) -> None:
        """One batch."""
        given = tokens()
        with torch.autocast("cpu", torch.float16, enabled=self.scaler is not None):
            logits = self.model(given[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), given[:, 1:].flatten()) * self.loss_scale
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of the optimizer."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()
        self.after()

    def findings(self) -> list[Any]:
        """Train under observation, and return what was found, loudest first."""
        import halfulp as hu

        named = {name: p for name, p in self.model.named_parameters() if name not in self.left_out}
        plain = [p for name, p in named.items() if name not in self.special]
        groups = [{"params": plain}, *({"params": [named[name]], **given} for name, given in self.special.items())]
        optimizer = self.optimizer(groups)
        self.before(optimizer)
        with hu.observe(self.model, optimizer, interval=4, scaler=self.scaler, **self.watched) as seen:
            for _ in range(self.steps):
                if self.penalty is not None:
                    self.penalty().backward()
                for _ in range(1 if self.penalty is None else 4):
                    self.backward()
                self.step(optimizer)
        return seen.findings
