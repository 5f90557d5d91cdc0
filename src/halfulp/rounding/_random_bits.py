"""Random bits that are a pure function of (seed, counter, tensor, element): the same on any device, shard or thread.

A 64-bit key is mixed from (seed, step, tensor id) by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), and every
element's global index is hashed under it: a Weyl sequence, then multiply and xor-shift with the multipliers of the
low-bias search by C. Wellons. One half of the key says where the sequence starts; the other is xored in before both
products, where each exclusive or takes a third operand for nothing: streams of different keys are not shifted copies of
one sequence (behind the first product alone, lower halves of streams whose counters agree were seen to depend on each
other). Keys are mixed: a sequential key leaves successive steps under-dispersed (measured .915 of the binomial
variance).

An element is hashed once, however many words are drawn for it: they differ in the last factor, which is a power of one
whose multiples fill the plane and the cube evenly (L'Ecuyer, Math. Comp. 68 (1999) 249). Upper halves of all words and
the lower half of one are independent in every test here; two lower halves are not.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels._device_function import record_word_function
from ..kernels._interpreter import run_trace_on_tensors, to_signed_integer
from ..kernels._operations import Word, add, bit_xor, high_word, low_word, mul, shr
from ..kernels._trace import RecordedFunction

WEYL_STEP = np.uint32(0x9E3779B9)
FIRST_FACTOR = np.uint32(0x21F0AAAD)
SECOND_FACTOR = np.uint32(0x735A2D97)
HIGH_WORD_FACTOR, STREAM_FACTOR = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
NEXT_WORD_FACTOR = 2891336453
# Of these words; their bits change with it.
STREAM_VERSION = 2
SHIFT_15, SHIFT_16 = np.uint32(15), np.uint32(16)
_WORD64_MASK = (1 << 64) - 1
# SplitMix64 (see `mix64`) on arrays.
_MIX_FACTOR, _MIX_INCREMENT = np.uint64(0xD1342543DE82EF95), np.uint64(0x9E3779B97F4A7C15)
_FIRST_MIX, _SECOND_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_27, _SHIFT_30, _SHIFT_31 = np.uint64(27), np.uint64(30), np.uint64(31)


def mix64(*values: int, key: int = 0x243F6A8885A308D3) -> int:
    """Mix several integers into one 64-bit key, each changing every bit of it.

    Args:
        values: the integers, in order.
        key: of those that were mixed before.

    >>> mix64(0, 1) != mix64(1, 0), mix64(0, 1) == mix64(1, key=mix64(0))
    (True, True)
    """
    for value in values:
        key = (key + (value & _WORD64_MASK) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _WORD64_MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _WORD64_MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _WORD64_MASK
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
        key = key + (value * _MIX_FACTOR + _MIX_INCREMENT)
        key ^= key >> _SHIFT_30
        key *= _FIRST_MIX
        key ^= key >> _SHIFT_27
        key *= _SECOND_MIX
        key ^= key >> _SHIFT_31
    mixed: npt.NDArray[np.uint64] = key
    return mixed


def compute_stream_position(key_low: Word, key_high: Word, index: Word) -> tuple[Word, Word]:
    """Device function: the counter of the element at a global index, and what its hash is xored with.

    Neighbours' counters differ by WEYL_STEP, and the second word is the same for all elements up to 2^32 apart.
    """
    own = add(key_high, mul(high_word(index), HIGH_WORD_FACTOR))
    return add(mul(low_word(index), WEYL_STEP), bit_xor(key_low, mul(own, STREAM_FACTOR))), own


@functools.cache
def get_stream_position_trace() -> RecordedFunction:
    """Return the trace of the device function `compute_stream_position`, for kernels that take a table of pointers."""
    return record_word_function(compute_stream_position, "w32", "w32", "w64")


def hash_element(counter: Word, own: Word) -> Word:
    """Device function: the hash of an element from its counter and its stream's own word, short of the last product."""
    x = mul(bit_xor(bit_xor(counter, shr(counter, SHIFT_16)), own), FIRST_FACTOR)
    return bit_xor(bit_xor(x, shr(x, SHIFT_15)), own)


def draw_word(hash_of_element: Word, number: int) -> Word:
    """Device function: one of an element's random words."""
    return mul(hash_of_element, np.uint32(int(SECOND_FACTOR) * pow(NEXT_WORD_FACTOR, number, 1 << 32) & 0xFFFFFFFF))


def draw_first_word(counter: Word, own: Word) -> Word:
    """Device function: 32 random bits of an element, its first word."""
    return draw_word(hash_element(counter, own), 0)


def random_words(key: int, index: torch.Tensor) -> torch.Tensor:
    """Return the words of `draw_first_word` at many elements.

    Args:
        key: a 64-bit key from `mix64`.
        index: int64 tensor of global flat indices, any shape.

    Returns:
        int64 tensor of the same shape, uniform in [0, 2^32).
    """
    return _run_recorded_function_at_elements(_record_word_draw(), key, index)[0].to(torch.int64) & 0xFFFFFFFF


def compute_stream_counters(key: int, index: torch.Tensor) -> list[torch.Tensor]:
    """Return the counters of elements at global indices under a key, and their stream's own words, as int32 words."""
    return _run_recorded_function_at_elements(get_stream_position_trace(), key, index)


def _run_recorded_function_at_elements(piece: RecordedFunction, key: int, index: torch.Tensor) -> list[torch.Tensor]:
    halves = (to_signed_integer(key & 0xFFFFFFFF, 32), to_signed_integer(key >> 32, 32))
    return run_trace_on_tensors(piece.trace, (), dict(enumerate((*halves, index))), piece.results)[0]


@functools.cache
def _record_word_draw() -> RecordedFunction:
    return record_word_function(
        lambda low, high, index: draw_first_word(*compute_stream_position(low, high, index)), "w32", "w32", "w64"
    )
