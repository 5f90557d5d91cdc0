"""Stages of a pipeline in two processes: the one with the loss has a scaler, the other is told what to do instead."""

SCRIPT = """
import copy, inspect, os, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limit = timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2, timeout=limit)
torch.manual_seed(seed)
PARTS = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
inputs, targets, CHUNKS = torch.randn(8, 6), torch.randn(8, 3), 4
whole = copy.deepcopy(nn.Sequential(*PARTS))
for x, t in zip(inputs.chunk(CHUNKS), targets.chunk(CHUNKS)):
    ((whole(x) - t).square().mean() / CHUNKS).backward()


def run(stage, scaled):
    # Forward and backward of all micro-batches, and the gradients of this stage.
    pipeline = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(pipeline, CHUNKS, loss_fn=lambda y, t: scaled((y - t).square().mean()))
    schedule.step(*([inputs] if rank == 0 else []), **({"target": targets} if rank else {}))


# torch 2.6 adds the micro-batches' gradients up, newer ones average them.
TERMS = 1 if "scale_grads" in inspect.signature(ScheduleGPipe).parameters else CHUNKS


def check(stage, divisor):
    for p, wanted in zip(stage.parameters(), whole[rank].parameters(), strict=True):
        assert torch.equal(p.grad / TERMS / divisor, wanted.grad)


# What the message says to do.
stage = copy.deepcopy(PARTS[rank])
run(stage, lambda loss: loss * 2.0**10)
check(stage, 2.0**10)

stage = copy.deepcopy(PARTS[rank])
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
scaler = hu.AdaptiveGradScaler(stage)
run(stage, scaler.scale)
before = [p.detach().clone() for p in stage.parameters()]
try:
    scaler.unscale_(optimizer)
except ValueError as error:
    assert rank == 0 and "in pipelines train in bfloat16, or multiply the loss by a constant" in str(error), error
    assert all(map(torch.equal, stage.parameters(), before))
else:
    assert rank == 1, "gradients at another process's scale were let through"
    check(stage, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied
dist.barrier()
# Threads of the group may outlive it, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""


def test_a_stage_without_a_loss_is_told_what_to_do(in_two_processes):
    in_two_processes(SCRIPT)
