"""MCTensors in torch.distributed: DistributedDataParallel with two processes, and what is refused."""

import pytest
import torch

from halfulp.mctensor import MCTensor
from halfulp.subclass import strict

WORKER = """
import os, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
from halfulp.mctensor._convert_model import multicomponent

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
batches = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(3))


def net(seed, dtype, components=2):
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return multicomponent(plain.double(), components, dtype)


def values(model):
    return [p.detach().decode() for p in model.parameters()]


for dtype in (torch.float16, torch.float32):
    start = net(0, dtype)
    model = nn.parallel.DistributedDataParallel(net(rank, dtype))
    kept = all(map(torch.equal, values(model), values(start)))
    assert kept or dtype == torch.float16, dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(batches[rank].to(dtype)).square().mean().backward()
        optimizer.step()
    for x in [*values(model), *(p.grad for p in model.parameters())]:
        both = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(both, x)
        torch.testing.assert_close(*both, rtol=2**-20 if dtype == torch.float16 else 0, atol=0)
    single = net(0, dtype)
    for inputs in batches:
        (single(inputs.to(dtype)).square().mean() / 2).backward()
    model = nn.parallel.DistributedDataParallel(net(rank, dtype))
    model(batches[rank].to(dtype)).square().mean().backward()
    for ours, theirs in zip(model.parameters(), single.parameters()):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=16 * eps, atol=eps)
dist.barrier()
dist.destroy_process_group()
# Threads of the group may outlive it, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""


def test_two_processes_start_alike_and_average_gradients(in_two_processes):
    in_two_processes(WORKER)


def test_reductions_of_components_are_refused():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x = MCTensor.encode([1.0, 2.0])
        with pytest.raises(NotImplementedError, match=r"allreduce_.*gradients='first'"):
            torch.distributed.all_reduce(x)
        before = x.clone()
        torch.distributed.broadcast(x, 0)
        assert torch.equal(x, before)
    finally:
        torch.distributed.destroy_process_group()


def test_a_number_fills_rows_with_all_its_digits(seed):
    x, rows = MCTensor.encode(torch.randn(3, 2, dtype=torch.float64), 3, torch.float32), torch.tensor([0, 2])
    with strict():
        found = x.index_fill(0, rows, 1 / 3)
    assert torch.equal(found.decode(torch.float64), x.decode(torch.float64).index_fill(0, rows, 1 / 3))


IN_A_MEMORY_FORMAT = {
    "to": lambda x, format: x.to(memory_format=format, copy=True),
    "to float64": lambda x, format: x.to(torch.float64, memory_format=format),
    "to float16": lambda x, format: x.to(torch.float16, memory_format=format),
    "to integers": lambda x, format: x.to(torch.int32, memory_format=format),
    "clone": lambda x, format: x.clone(memory_format=format),
    "contiguous": lambda x, format: x.contiguous(memory_format=format),
    "zeros_like": lambda x, format: torch.zeros_like(x, memory_format=format),
}


@pytest.mark.parametrize("formats", [("channels_last",), ("channels_last", "contiguous_format")], ids=str)
@pytest.mark.parametrize("name", IN_A_MEMORY_FORMAT)
def test_memory_formats_are_torchs(name, formats, seed):
    """Of the tensor, and of each component."""
    plain = torch.randn(2, 3, 4, 5, dtype=torch.float32)
    wanted, found = plain, MCTensor.encode(plain, 2)
    for format in formats:
        wanted, found = (IN_A_MEMORY_FORMAT[name](x, getattr(torch, format)) for x in (wanted, found))
    assert found.stride() == wanted.stride()
    if isinstance(found, MCTensor):
        assert all(part.stride() == wanted.stride() for part in found.components)
        found = found.decode(wanted.dtype)
    assert torch.equal(found, wanted)
