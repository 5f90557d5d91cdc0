"""Digests of a payload, one per chunk, by which a step that finds it written knows whether it holds the same bits.

A step computes them while a chunk is in the cache, so that they cost no pass over memory of their own. With v_j the
chunk's bytes as little-endian words of 64 bits, zeros behind the last one, and k_j = j c mod 2^64,

    sum_j  v_j + low(v_j xor k_j) high(v_j xor k_j)  mod 2^64,

the product of the halves of 32 bits. Bits that differ cancel by chance alone, once in about 2^32 chunks. Digests live
in one process and are not saved: files hold checksums of rows (`compute_checksums`), on which processes that share a
parameter agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from ...kernels import IndexMap, Trace, address, cut_into_chunks, run_chunks, select_engine, to_plain_memory
from ...kernels._device_function import Digest, Table, record_word_function
from ...kernels._operations import add, bit_and, bit_xor, shr
from ...kernels.vector._machine_function import address_of
from ...kernels.vector._table_loop import compile_table

# 2^64 / golden ratio, odd (Knuth, vol. 3, 6.4).
KEY_STEP = np.uint64(0x9E3779B97F4A7C15)
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def compute_digests(payload: torch.Tensor, index_map: IndexMap) -> np.ndarray | None:
    """Return a payload's digests; None off the CPU, where a step computes none."""
    if payload.device.type != "cpu":
        return None
    payload = to_plain_memory(payload.detach(), "a parameter").contiguous()
    table, size = cut_into_chunks(index_map, 0), payload.element_size()
    if select_engine("cpu") == "llvm":
        found, pointers = np.zeros(len(table), np.uint64), np.array([[address(payload)]], np.int64)
        kernel, table_address = _compile_digest_kernel(size), address_of(table)
        run_chunks(kernel, table[:, 2], table_address, address_of(pointers), 0, 0, 0, 0, address_of(found))
        return found
    memory = payload.reshape(-1).view(torch.uint8).numpy()
    pieces = [memory[begin * size : (begin + length) * size] for _, begin, length, _ in table.tolist()]
    return np.array([_compute_digest(piece) for piece in pieces], np.uint64)


def _compute_digest(memory: np.ndarray) -> np.uint64:
    """Return the digest of some bytes, by NumPy."""
    words = np.zeros(len(memory) // 8 + 1, np.uint64)
    words.view(np.uint8)[: len(memory)] = memory
    mixed = words ^ (np.arange(1, len(words) + 1, dtype=np.uint64) * KEY_STEP)
    return (words + (mixed & LOW) * (mixed >> HALF)).sum(dtype=np.uint64)


@functools.cache
def _compile_digest_kernel(size: int) -> Callable:
    return compile_table(f"digest_{size}", Table(Trace(torch.float32), 1, digest=payload_digest(size)))


def payload_digest(size: int) -> Digest:
    """Return how the payload, column 0 of a table, is digested."""
    return Digest(0, size, record_word_function(digest_term, "w64", "w64"), int(KEY_STEP))


def digest_term(value, key):
    """Device function: what one word adds."""
    mixed = bit_xor(value, key)
    return add(value, bit_and(mixed, LOW) * shr(mixed, HALF))
