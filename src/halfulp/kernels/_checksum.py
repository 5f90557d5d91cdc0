"""Checksums of a tensor's rows, which detect changed bits without a copy.

Rows are those of the first dimension. Of a row's words b_1 to b_n, which are its elements, or their halves where they
have 8 bytes,

    sum_j w_j b_j  mod 2^64,    w_j = (((j c mod 2^64) xor m) m) or 1

with two odd constants c and m. Every w_j is odd and no word has more than 32 bits, so that a row in which one word is
another has another checksum; changes of several words, of which a plain sum of bits may see nothing, cancel by chance
alone. Files hold these numbers: they stay what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Odd 64-bit constants with about as many ones as zeros, as signed integers; the first is 2^64 / golden ratio (Knuth,
# vol. 3, 6.4).
_STEP, _MIX = -0x61C8864680B583EB, -0x4B47D0C5E2A3A5A7
_AT_ONCE = 2**22


def row_checksums(values: Tensor) -> Tensor:
    """Return the int64 checksum of each row of a tensor; a 0-d tensor has one.

    >>> before = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> after = before + torch.tensor([[0.0, 0.0], [0.0, 1e-6]])
    >>> row_checksums(before) == row_checksums(after)
    tensor([ True, False])
    """
    rows = (values.detach() if values.dim() else values.detach()[None]).unsqueeze(-1).flatten(1)
    parts = rows.split(max(1, _AT_ONCE // max(1, rows.shape[1])))
    words = rows.shape[1] * (2 if rows.element_size() == 8 else 1)
    weights = (torch.arange(1, words + 1, dtype=torch.int64, device=rows.device) * _STEP) ^ _MIX
    weights = (weights * _MIX) | 1
    return torch.cat([(_words(part) * weights).sum(1) for part in parts])


def checksum(values: Tensor) -> int:
    """Return one checksum of a whole tensor: that of its rows' checksums."""
    return int(row_checksums(row_checksums(values)[None]))


def _words(rows: Tensor) -> Tensor:
    return rows.contiguous().view(_WORDS[rows.element_size()]).long()
