"""Random bits that are a pure function of (seed, counter, tensor, element): the same on any device, shard or thread.

A 64-bit key is mixed from (seed, step, tensor id) by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), and every
element's global index is hashed under it: a Weyl sequence followed by two rounds of multiply and xor-shift, with the
multipliers of the low-bias search by C. Wellons. Keys are mixed, never xored raw: a sequential key leaves successive
steps under-dispersed (measured .915 of the binomial variance).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels._device_function import record_words
from ..kernels._trace import Piece
from ..kernels.scalar._operations import Word, add, bit_xor, high_word, low_word, mul, shr
from ..kernels.tensors._writer import as_signed, run_on_tensors

WEYL = np.uint32(0x9E3779B9)
FIRST = np.uint32(0x21F0AAAD)
SECOND = np.uint32(0x735A2D97)
HIGH = np.uint32(0x85EBCA6B)
S15, S16 = np.uint32(15), np.uint32(16)
_MASK64 = (1 << 64) - 1
# SplitMix64 (see `mix64`) on arrays.
_FACTOR, _GOLDEN = np.uint64(0xD1342543DE82EF95), np.uint64(0x9E3779B97F4A7C15)
_FIRST_MIX, _SECOND_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def mix64(*values: int) -> int:
    """One 64-bit key out of several integers, each changing every bit of it.

    >>> mix64(0, 1) != mix64(1, 0)
    True
    """
    return mix64_on(0x243F6A8885A308D3, *values)


def mix64_on(key: int, *values: int) -> int:
    """Return the key of the integers that a key was mixed from, and more.

    >>> mix64_on(mix64(1, 2), 3, 4) == mix64(1, 2, 3, 4)
    True
    """
    for value in values:
        key = (key + (value & _MASK64) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK64
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK64
        key ^= key >> 31
    return key


def mix64_all(*values: int | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `mix64` of some integers, which are mixed once, and then of arrays, which broadcast against each other.

    >>> mix64_all(5, np.array([7, 2**63], np.uint64)).tolist() == [mix64(5, 7), mix64(5, 2**63)]
    True
    """
    numbers = [value for value in values if isinstance(value, int)]
    key: Any = np.array(mix64(*numbers), np.uint64)
    for value in values[len(numbers) :]:
        key = key + (value * _FACTOR + _GOLDEN)
        key ^= key >> _S30
        key *= _FIRST_MIX
        key ^= key >> _S27
        key *= _SECOND_MIX
        key ^= key >> _S31
    mixed: npt.NDArray[np.uint64] = key
    return mixed


def stream_start(key_low: Word, key_high: Word, index: Word) -> np.uint32:
    """Device function: the counter of the element at a global index; neighbours differ by WEYL.

    The high word of the index enters by a product of its own, so that elements 2^32 apart differ.
    """
    return add(mul(low_word(index), WEYL), bit_xor(key_low, mul(add(high_word(index), key_high), HIGH)))


@functools.cache
def recorded_start() -> Piece:
    """Return `stream_start` as a table of pointers takes it."""
    return record_words(stream_start, "w32", "w32", "w64")


def draw(counter: Word) -> np.uint32:
    """Device function: 32 random bits from an element's counter."""
    x = mul(bit_xor(counter, shr(counter, S16)), FIRST)
    return mul(bit_xor(x, shr(x, S15)), SECOND)


def random_words(key: int, index: torch.Tensor) -> torch.Tensor:
    """The words of `draw` at many elements.

    Args:
        key: a 64-bit key from `mix64`.
        index: int64 tensor of global flat indices, any shape.

    Returns:
        int64 tensor of the same shape, uniform in [0, 2^32).
    """
    return _at_elements(_recorded_draw(), key, index).to(torch.int64) & 0xFFFFFFFF


def counters(key: int, index: torch.Tensor) -> torch.Tensor:
    """The counters of elements at global indices under a key, as int32 words."""
    return _at_elements(recorded_start(), key, index)


def _at_elements(piece: Piece, key: int, index: torch.Tensor) -> torch.Tensor:
    halves = (as_signed(key & 0xFFFFFFFF, 32), as_signed(key >> 32, 32))
    return run_on_tensors(piece.trace, (), dict(enumerate((*halves, index))), piece.results)[0][0]


@functools.cache
def _recorded_draw() -> Piece:
    return record_words(lambda low, high, index: draw(stream_start(low, high, index)), "w32", "w32", "w64")
