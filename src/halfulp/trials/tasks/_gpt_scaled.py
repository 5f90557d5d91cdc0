"""Task gpt-scaled: a GPT of the kind that Scalify was shown on, at a size for two cores."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._gpt import GPT, Block
from ._task import Data
from ._text import TIME, Text


class FusedBlock(Block):
    """A transformer block with torch's own attention operator."""

    def _attend(self, x: Tensor, future: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, time, width)


@dataclasses.dataclass(frozen=True)
class ScaledGPT(Text):
    """Next-character prediction with the paper's AdamW (beta 0.9 and 0.95) and fused attention.

    "Scalify" (Balança et al., arXiv 2407.17353) trains 168 million parameters on WikiText-103; these are half a million
    on the help pages of Python.
    """

    name: ClassVar[str] = "gpt-scaled"
    title: ClassVar[str] = "GPT with fused attention on the help pages of Python"
    hyper: ClassVar[dict[str, Any]] = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    steps: ClassVar[int] = 500
    sizes: ClassVar[dict[str, int]] = {"smoke": 3, "small": 100, "full": 20_000}
    paper_gaps: ClassVar[dict[str, float]] = {
        "scaled-fp16-master": 0.0,
        "scaled-fp16": 0.05,
        "scaled-fp8": 0.05,
        "scaled-fp8-state16": 0.06,
    }
    paper_note: ClassVar[str] = (
        "The paper's gaps are those of its table 3 (arXiv 2407.17353): training loss, 168 million parameters."
    )

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build a GPT of width 128, three layers, four heads."""
        torch.manual_seed(seed)
        vocabulary = int(max(data.train[0].max(), data.validation[0].max())) + 1
        return GPT(vocabulary, width=128, layers=3, heads=4, time=TIME, block=FusedBlock)
