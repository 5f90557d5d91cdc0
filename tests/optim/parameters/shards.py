"""Parameters sharded over ranks that take turns in one process, for tests."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

SHAPE = (7, 6, 32)  # uneven over 2, 3 and 4 along its first dimension


def on_every_rank(world, body):
    """body(rank, mesh) on each rank of a world in turn, in this one process.

    A thread each, because DTensor remembers per thread what an operator made of a mesh, whose rank it takes as fixed.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(world):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            with ThreadPoolExecutor(1) as own:
                own.submit(lambda rank=rank: body(rank, dist.init_device_mesh("cpu", (world,)))).result()
        finally:
            dist.destroy_process_group()


def part_of(tensor, dim, world, rank):
    chunks = list(tensor.chunk(world, dim))
    empty = tensor.narrow(dim, 0, 0)
    return (chunks[rank] if rank < len(chunks) else empty).clone(memory_format=torch.contiguous_format)


def sharded(tensor, mesh, dim, world, rank):
    local = part_of(tensor, dim, world, rank)
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def make_problem(seed):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(SHAPE, generator=generator).bfloat16()
    return start, [(torch.randn(SHAPE, generator=generator) * 0.1).bfloat16() for _ in range(3)]
