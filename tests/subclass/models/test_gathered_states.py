"""Whole checkpoints of two processes: gathered on one, sent from one, bit for bit in models, states and companions."""

SCRIPT = """
import os, sys, torch, warnings
torch.set_num_threads(1)
import torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limit = timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2, timeout=limit)
Parallel = nn.parallel.DistributedDataParallel


class Net(nn.Module):
    # A submodule whose name is that of a wrapper's prefix, and a parameter whose name is that of a companion.
    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return self.module(x) * self.scale


def plain(model):
    return model


CHANGES = {
    "float16": hu.scalify,
    "e4m3": lambda model: hu.scalify(model, torch.float8_e4m3fn),
    "two components": lambda model: hu.multicomponent(model, 2, torch.bfloat16),
    "three with a scale": lambda model: hu.multicomponent(model, 3, torch.float16),
}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def narrow(model):
    options = {"weight_update": "split", "param_dtype": torch.bfloat16}
    return hu.optim.AdamW(model.named_parameters(), lr=0.1, **options)


def made(change, wrap, optimizer, own):
    torch.manual_seed(seed + own)
    inner = change(Net())
    # DistributedDataParallel cannot be told that a parameter changes its dtype.
    early = optimizer(inner) if optimizer is narrow and wrap is Parallel else None
    model = wrap(inner)
    optimizer = early or optimizer(model)
    for _ in range(2):
        for p in model.parameters():
            p.grad = p.detach() * 0.3
        optimizer.step()
    return model, optimizer


def bits(x):
    if not isinstance(x, torch.Tensor):
        return [x]
    x = x.to_local() if hasattr(x, "to_local") else x.detach()
    inner = [getattr(x, name) for name in ("payload", "scale", "components") if hasattr(x, name)]
    return [one for part in inner or [x] for one in (part if isinstance(part, tuple) else [part]) if one is not None]


def all_bits(model, optimizer):
    states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
    held = [*model.parameters(), *model.buffers(), *(state[name] for state in states for name in sorted(state))]
    return [one for x in held for one in bits(x)]


def is_same(found, wanted):
    assert len(found) == len(wanted)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(found, wanted))


def check(change, wrap, optimizer, what):
    source = made(change, wrap, optimizer, 0)
    wanted = all_bits(*source)
    for offload in (False, True):
        gathered = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        saved = get_state_dict(*source, options=gathered)
        assert bool(saved[0]) == (rank == 0 or not offload)
        for sent in (False, True):
            given = [saved if not (sent and rank) else ({}, {})]
            if offload and not sent:
                dist.broadcast_object_list(given, src=0)
            target = made(change, plain, optimizer, 1) if wrap is Parallel else made(change, wrap, optimizer, 1)
            assert not is_same(all_bits(*target), wanted)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sent)
            if sent and change is not plain:
                try:
                    set_model_state_dict(target[0], {**given[0][0]}, options=options)
                except NotImplementedError as error:
                    assert "load the file on every process" in str(error)
                else:
                    raise AssertionError(what)
                continue
            set_model_state_dict(target[0], {**given[0][0]}, options=options)
            set_optimizer_state_dict(*target, {**given[0][1]}, options=options)
            assert is_same(all_bits(*target), wanted), (what, wrap, offload, sent)


for name, change in CHANGES.items():
    check(change, Parallel, adam, name)

mesh = init_device_mesh("cpu", (2,))
for wrap in (Parallel, lambda model: fully_shard(model, mesh=mesh)):
    check(plain, wrap, narrow, "bfloat16 with low bits of 16-bit integers")
dist.barrier()
# Threads of the group may outlive it, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""


def test_whole_checkpoints_are_gathered_and_sent(in_two_processes, needs_torch):
    needs_torch("distributed.checkpoint that sets dictionaries inside a state")
    in_two_processes(SCRIPT)
