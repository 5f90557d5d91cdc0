"""Checksums by rows: who has written a parameter since its companions were saved, for any number of processes."""

from types import SimpleNamespace

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.parameters._local_tensors import get_local
from halfulp.optim.parameters._outside_writes import compute_payload_checksums, has_differing_checksum

from .shards import make_problem, on_every_rank, sharded

WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
WORDS |= {torch.float8_e4m3fn: torch.uint8, torch.float64: torch.int64}


def checksums(x):
    return compute_payload_checksums(SimpleNamespace(payloads=[x], parameter=x, spec=SimpleNamespace(scaled=False)))


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (2, 3, 4), (1, 3000)])
def test_one_bit_changes_the_checksum_of_its_row_alone(shape, dtype, seed):
    x = torch.randn(shape).to(dtype)
    before = checksums(x)
    assert not has_differing_checksum(before, checksums(x.clone()))
    for _ in range(20):
        written = x.clone()
        bits = written.view(-1).view(WORDS[dtype])
        place, bit = int(torch.randint(bits.numel(), ())), int(torch.randint(8 * bits.element_size() - 1, ()))
        bits[place] ^= 1 << bit
        row = 0 if not shape else place // (bits.numel() // shape[0])
        changed = (checksums(written) != before).nonzero().flatten().tolist()
        assert changed == [row], (place, bit)
        assert has_differing_checksum(before, checksums(written))


def test_what_is_not_known_differs_from_nothing(seed):
    x = torch.zeros(4, 3)
    found = checksums(x)
    assert bool((found != 0).all())
    assert not has_differing_checksum(found, torch.zeros_like(found))
    assert not has_differing_checksum(torch.zeros_like(found), found)
    assert len(checksums(torch.empty(0, 3))) == 0
    assert torch.equal(checksums(x.T.contiguous().T), found)


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_that_are_loaded_before_their_model_keep_their_companions(dim):
    """Of rows that are cut there is no checksum, which would tell that the model comes later."""
    start, gradients = make_problem(0)

    def one_run(rank, mesh):
        def made():
            parameter = torch.nn.Parameter(sharded(start, mesh, dim, 2, rank))
            return parameter, hu.optim.SGD([parameter], lr=1e-2, weight_update="split")

        def step(parameter, optimizer, gradient):
            parameter.grad = sharded(gradient, mesh, dim, 2, rank)
            optimizer.step()

        parameter, optimizer = made()
        step(parameter, optimizer, gradients[0])
        with torch.no_grad():
            parameter.mul_(0.5)  # from here on a copy is kept
        step(parameter, optimizer, gradients[1])
        resumed, its_optimizer = made()
        its_optimizer.load_state_dict(optimizer.state_dict())
        with torch.no_grad():
            resumed.copy_(parameter)
        for one in ((parameter, optimizer), (resumed, its_optimizer)):
            step(*one, gradients[2])
        assert same_bits(resumed.detach()._local_tensor, parameter.detach()._local_tensor)
        low_bits = (one.state[p]["low_bits"] for p, one in ((parameter, optimizer), (resumed, its_optimizer)))
        assert same_bits(*map(get_local, low_bits))

    on_every_rank(2, one_run)


SCRIPT = """
import os, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limit = timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2, timeout=limit)
mesh = init_device_mesh("cpu", (2,))


def plain(model):
    return model


def rows(model):
    return fully_shard(model, mesh=mesh)


def columns(model):
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    return model


def made(wrap, update, own, steps):
    torch.manual_seed(seed + own)
    model = wrap(nn.Linear(6, 5))
    options = {"lr": 0.01, "weight_update": update, "param_dtype": torch.bfloat16}
    optimizer = hu.optim.AdamW(model.named_parameters(), **options)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.full_like(p.detach(), 0.3)
        optimizer.step()
    return model, optimizer


def whole(state):
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).float().clone() for name, x in state.items()}


def is_same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


for update in ("split", "kahan", "master"):
    for source in (plain, rows):
        model, optimizer = made(source, update, 0, 3)
        wanted = whole(optimizer.float32_state_dict(model))
        saved = get_state_dict(model, optimizer)
        folder = f"{path}-{update}-{source.__name__}"
        checkpoint.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)
        for target in (plain, rows, columns):
            model, optimizer = made(target, update, 1, 1)
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            checkpoint.load(state, checkpoint_id=folder)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            assert is_same(whole(optimizer.float32_state_dict(model)), wanted), (update, source, target)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5)
            shown, read = whole(model.state_dict()), whole(optimizer.float32_state_dict(model))
            if target is not columns:
                assert is_same(shown, read), (update, source, target)
            else:  # what is trusted adds at most half an ulp, where it can
                near = (read["weight"] - shown["weight"]).abs() <= 2.0**-8 * shown["weight"].abs()
                assert bool(near.all()), (update, source, read, shown)
dist.barrier()
# Threads of the group may outlive it, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""


def test_shards_and_whole_parameters_read_each_others_files_and_see_who_has_written_since(
    in_two_processes, needs_torch
):
    needs_torch("distributed.checkpoint that writes without torch's own warning")
    in_two_processes(SCRIPT)
