"""The global index map of a shard: from its elements to those of the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True)
class IndexMap:
    """The global flat indices of a local tensor, dimension by dimension.

    Element (i_0, i_1, ...) of the local tensor stands at coordinate `offset[d] + i_d * step[d]` along dimension d of
    the global tensor. Random bits and blocks are keyed by the global flat index, so that any sharding draws the same.

    Attributes:
        shape: the local shape.
        global_shape: the shape of the whole tensor.
        offset: per dimension, the global coordinate of local coordinate 0.
        step: per dimension, the distance of neighbours in global coordinates.

    >>> IndexMap.shard((4, 6), dim=1, start=2, stop=5).list_contiguous_runs()
    array([[ 0,  2,  3],
           [ 3,  8,  3],
           [ 6, 14,  3],
           [ 9, 20,  3]])
    """

    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    step: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.shape), len(self.global_shape), len(self.offset), len(self.step)}
        if len(lengths) != 1:
            raise ValueError(f"an index map needs the same number of dimensions everywhere, got {self}")
        for n, whole, start, step in zip(self.shape, self.global_shape, self.offset, self.step):
            if step < 1 or start < 0 or (n > 0 and start + (n - 1) * step >= whole):
                raise ValueError(f"an index map must stay inside the global shape, got {self}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> IndexMap:
        """Return the map of a tensor that is not sharded."""
        shape = tuple(shape)
        return cls(shape, shape, (0,) * len(shape), (1,) * len(shape))

    @classmethod
    def shard(cls, global_shape: tuple[int, ...], dim: int, start: int, stop: int) -> IndexMap:
        """Return the map of the slice [start, stop) along one dimension."""
        shape, offset = list(global_shape), [0] * len(global_shape)
        shape[dim], offset[dim] = stop - start, start if stop > start else 0
        return cls(tuple(shape), tuple(global_shape), tuple(offset), (1,) * len(shape))

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return prod(self.shape)

    def list_contiguous_runs(self) -> np.ndarray:
        """Return the local tensor as consecutive runs, int64 (runs, 3): local and global start, length."""
        if self.numel == 0:
            return np.empty((0, 3), np.int64)
        inner, length = self._find_outer_dims_and_run_length()
        strides = [prod(self.global_shape[d + 1 :]) for d in range(len(self.shape))]
        start = np.array(sum(o * s for o, s in zip(self.offset, strides)), np.int64)
        for d in range(inner):
            coordinates = np.arange(self.shape[d], dtype=np.int64) * (self.step[d] * strides[d])
            start = start[..., None] + coordinates
        start = start.reshape(-1)
        local = np.arange(start.size, dtype=np.int64) * length
        return np.stack([local, start, np.full(start.size, length, np.int64)], 1)

    def _find_outer_dims_and_run_length(self) -> tuple[int, int]:
        """Return how many leading dimensions to iterate over, and the length of each consecutive run behind them."""
        length = 1
        for d in reversed(range(len(self.shape))):
            if self.shape[d] > 1 and self.step[d] != 1:
                return d + 1, length
            length *= self.shape[d]
            if self.shape[d] != self.global_shape[d]:
                return d, length
        return 0, length


CHUNK_ELEMENTS = 16_384


def cut_into_chunks(index_map: IndexMap, tensor_row: int) -> np.ndarray:
    """Cut a tensor's runs at the global indices that are multiples of CHUNK_ELEMENTS.

    A block whose length divides CHUNK_ELEMENTS is thus never cut but by the shard itself, and no piece crosses a
    multiple of 2^32, where the high word of the index changes. Pieces are int64 (pieces, 4): the tensor's row in the
    kernel's pointer table, local start, length, global start.
    """
    rows = [np.empty((0, 4), np.int64)]
    for local, start, length in index_map.list_contiguous_runs():
        first = min(length, CHUNK_ELEMENTS - start % CHUNK_ELEMENTS)
        cuts = np.concatenate([[0], np.arange(first, length, CHUNK_ELEMENTS, dtype=np.int64), [length]])
        places = np.full(len(cuts) - 1, tensor_row, np.int64)
        rows.append(np.stack([places, local + cuts[:-1], np.diff(cuts), start + cuts[:-1]], 1))
    return np.concatenate(rows).astype(np.int64)


def make_chunk_table(index_maps: Sequence[IndexMap]) -> np.ndarray:
    """Return `cut_into_chunks` of tensors, each in the row of its place in the sequence; equal maps are cut once."""
    cut = {index_map: cut_into_chunks(index_map, 0) for index_map in dict.fromkeys(index_maps)}
    pieces = [cut[index_map] for index_map in index_maps]
    table = np.concatenate([np.empty((0, 4), np.int64), *pieces])
    table[:, 0] = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    return table
