"""The index map of a shard against brute force."""

import random

import numpy as np
import pytest

from halfulp.kernels import CHUNK_ELEMENTS, IndexMap, cut_into_chunks


def brute(index_map: IndexMap) -> np.ndarray:
    """The global flat index of every local element, by numpy's own indexing."""
    whole = np.arange(int(np.prod(index_map.global_shape, dtype=np.int64))).reshape(index_map.global_shape)
    slices = tuple(
        slice(start, start + (n - 1) * step + 1 if n else start, step)
        for n, start, step in zip(index_map.shape, index_map.offset, index_map.step)
    )
    return whole[slices].reshape(-1)


def unrolled(pieces: np.ndarray) -> np.ndarray:
    """(local start, global start, length) rows as one global index per local element."""
    found = np.full(int(pieces[:, 2].sum()), -1)
    for local, start, length in pieces:
        found[local : local + length] = np.arange(start, start + length)
    return found


def check(index_map: IndexMap) -> None:
    wanted = brute(index_map)
    assert index_map.numel == wanted.size
    assert unrolled(index_map.list_contiguous_runs()).tolist() == wanted.tolist()
    table = cut_into_chunks(index_map, 7)
    assert (table[:, 0] == 7).all()
    assert unrolled(table[:, [1, 3, 2]]).tolist() == wanted.tolist()
    assert (table[:, 3] // CHUNK_ELEMENTS == (table[:, 3] + table[:, 2] - 1) // CHUNK_ELEMENTS).all()
    assert (table[:, 2] > 0).all()


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (1, 1, 3), (0,), (3, 0), (40_000,), (3, 20_000)])
def test_whole(shape):
    check(IndexMap.whole(shape))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(7,), (5, 6), (4, 5, 6), (2, 40_000), (33_000, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_uneven_shards(shape, ranks):
    """Every dimension cut as torch.chunk does, with shards that are shorter or empty."""
    for dim in range(len(shape)):
        size = -(-shape[dim] // ranks)
        seen = []
        for rank in range(ranks):
            start, stop = min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim])
            index_map = IndexMap.shard(shape, dim, start, stop)
            check(index_map)
            seen.append(brute(index_map))
        assert sorted(np.concatenate(seen).tolist()) == list(range(int(np.prod(shape))))


def test_random_strided_shards(seed):
    for _ in range(200):
        shape, whole, offset, step = [], [], [], []
        for _ in range(random.randint(1, 4)):
            n, every, start = random.randint(0, 4), random.randint(1, 3), random.randint(0, 2)
            shape.append(n)
            step.append(every)
            offset.append(start)
            whole.append(start + max(n - 1, 0) * every + 1 + random.randint(0, 2))
        check(IndexMap(tuple(shape), tuple(whole), tuple(offset), tuple(step)))


@pytest.mark.parametrize(
    "fields",
    [
        ((3,), (3, 3), (0,), (1,)),
        ((3,), (3,), (1,), (1,)),
        ((3,), (9,), (0,), (0,)),
        ((3,), (5,), (-1,), (1,)),
        ((3,), (6,), (0,), (3,)),
    ],
)
def test_bad_maps(fields):
    with pytest.raises(ValueError, match="index map"):
        IndexMap(*fields)


def test_large_tensors_are_not_walked():
    """A shard of 2^40 elements costs as many rows as it has runs."""
    index_map = IndexMap((2, 3), (2**20, 2**20), (2**19, 5), (1, 1))
    assert index_map.list_contiguous_runs().tolist() == [[0, 2**39 + 5, 3], [3, 2**39 + 2**20 + 5, 3]]
