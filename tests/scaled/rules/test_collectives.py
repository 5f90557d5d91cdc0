"""Collectives on scaled tensors: two processes agree on scales, then payloads travel."""

import pytest
import torch

from halfulp.scaled import ScaledTensor, payload_hook

START = """
import os, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from halfulp.scaled import ScaledTensor, payload_hook

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
# The ranks' magnitudes differ by 2^20: the payloads cannot be added as they are.
generator = torch.Generator().manual_seed(int(sys.argv[3]))
plain = [torch.randn(6, generator=generator) * 2.0 ** (20 * r - 30) for r in range(2)]
EPS = {torch.float32: 0, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}


def close(x, wanted, eps):
    # Against all that travelled under one scale: a minimum may be 2^20 below it.
    error = (x.decode() - wanted).abs().max() / torch.stack(plain).abs().max()
    assert error <= eps, (error, eps)


"""
WHOLE = """
def named(module, *names):
    return next(getattr(module, name) for name in names if hasattr(module, name))


# The second name is that before torch 2.13.
gather = named(dist, "all_gather_single", "all_gather_into_tensor")
for storage, eps in EPS.items():
    x = ScaledTensor.encode(plain[rank], storage)
    both = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(both, x)
    a, b = (y.decode() for y in both)
    assert torch.equal((a, b)[rank], x.decode())
    reductions = {"SUM": a + b, "AVG": (a + b) / 2, "MAX": torch.maximum(a, b), "MIN": torch.minimum(a, b)}
    for op, wanted in reductions.items():
        y = x.clone()
        dist.all_reduce(y, op=getattr(dist.ReduceOp, op))
        close(y, wanted, eps)
    y = x.clone()
    dist.broadcast(y, 1)
    close(y, b, 0)
    y = x.clone()
    dist.reduce(y, 0)
    close(y, a + b if rank == 0 else b, eps)
    y = torch.zeros_like(torch.cat([x, x]))
    gather(y, x)
    close(y, torch.cat([a, b]), eps)
    try:
        functional.all_reduce(x, "sum", dist.group.WORLD)
    except NotImplementedError as error:
        assert "send x.payload and x.scale, or x.decode()" in str(error)
    else:
        raise AssertionError("a functional collective was let through")
    try:
        dist.all_reduce(x.clone(), op=dist.ReduceOp.PRODUCT)
    except NotImplementedError as error:
        assert "allowed are SUM, AVG, MAX and MIN" in str(error)
    else:
        raise AssertionError("a product was let through")
large = ScaledTensor(torch.full((4,), 60000.0, dtype=torch.float16), 1.0)
dist.all_reduce(large)
assert large.tolist() == [120000.0] * 4, large
dist.barrier()
dist.destroy_process_group()
# Threads of the group may outlive it, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""
TRAINING = """
def net(seed, storage):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for module in model.modules():
        for key, value in list(module._parameters.items()):
            if storage is not None:
                value = nn.Parameter(ScaledTensor.encode(value.detach(), storage))
            module._parameters[key] = value
    return model


def given(x, storage):
    return x if storage is None else ScaledTensor.encode(x, storage)


def value(x):
    return x.decode() if isinstance(x, ScaledTensor) else x


batches = torch.randn(2, 6, 4, generator=generator)
full, half = torch.float32, torch.float16
for storage, wire in ((full, None), (full, full), (half, half), (None, half)):
    model = nn.parallel.DistributedDataParallel(net(rank, storage))
    if wire is not None:
        model.register_comm_hook(wire, payload_hook)
    single = net(0, storage)
    for ours, theirs in zip(model.parameters(), single.parameters()):
        assert torch.equal(value(ours), value(theirs))
    model(given(batches[rank], storage)).square().mean().backward()
    for batch in batches:
        (single(given(batch, storage)).square().mean() / 2).backward()
    for ours, theirs in zip(model.parameters(), single.parameters()):
        error = (value(ours.grad) - value(theirs.grad)).norm() / value(theirs.grad).norm()
        assert error <= (2e-7 if wire is not torch.float16 else 2e-3), error
dist.barrier()
dist.destroy_process_group()
# Threads of the group may outlive it, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("body", [WHOLE, TRAINING], ids=["operations", "DistributedDataParallel"])
def test_two_processes(body, in_two_processes, needs_torch):
    if body is WHOLE:
        needs_torch("a ReduceOp that collectives of tensor classes can read")
    in_two_processes(START + body)


def test_eight_bits_do_not_go_through_the_hook():
    with pytest.raises(ValueError, match=r"cannot be added on the wire, give torch\.float16"):
        payload_hook(torch.float8_e4m3fn, None)


def test_what_has_no_rule_is_refused():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = ScaledTensor.encode(torch.ones(2))
        with pytest.raises(NotImplementedError, match=r"send x\.payload and x\.scale, or x\.decode"):
            torch.distributed.all_to_all_single(x.clone(), x)
    finally:
        torch.distributed.destroy_process_group()
