"""A scaler's state of two processes in a checkpoint of torch.distributed, read by one, two and three."""

SCRIPT = """
import os, sys, torch, warnings
torch.set_num_threads(1)
import torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limit = timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=3, timeout=limit)
warnings.filterwarnings("ignore", "TypedStorage is deprecated")
GROUPS = {1: dist.new_group([0]), 2: dist.new_group([0, 1]), 3: dist.new_group([0, 1, 2])}
inputs = torch.randn(20, 3, 5, 6, generator=torch.Generator().manual_seed(seed))


def parallel(model, group):
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def sharded(model, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Training:
    # Of a wrapped model, each process on inputs and at exponents of its own.
    def __init__(self, wrap, size, format, start):
        torch.manual_seed(seed + start)
        layers = nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)
        self.group = GROUPS[size]
        self.model = wrap(nn.Sequential(*layers), self.group)
        self.scaler = hu.AdaptiveGradScaler(self.model, format=format)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def advance(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.model(inputs[step, rank]).square().mean() * 2.0 ** (-20 * rank)
            self.scaler.scale(loss * (float("nan") if step == 3 else 1.0)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self

    def state(self):
        return {"model": self.model.state_dict(), "scaler": self.scaler.state_dict()}

    def everywhere(self, what):
        found = [None] * self.group.size()
        dist.all_gather_object(found, what, group=self.group)
        return found


for wrap in (parallel, sharded):
    for format in (None, "fp16"):
        folder = f"{path}-{wrap.__name__}-{format}"
        saved = [None, None]
        if rank < 2:
            training = Training(wrap, 2, format, 0).advance(range(7))
            checkpoint.save(training.state(), checkpoint_id=folder, process_group=training.group)
            saved = training.everywhere(training.scaler.state_dict())
            assert (saved[0] != saved[1]) == (format is not None), "processes have exponents of their own"
            # An entry may be any process's: only what stands in one with the exponents may differ.
            first, second = ({**state, "sites": None} for state in saved)
            assert first == second, (first, second)
        dist.broadcast_object_list(saved, src=0)
        for size in GROUPS:
            if rank < size:
                begun = (size + (wrap is sharded) + (format is None)) % 2
                training = Training(wrap, size, format, 1).advance(range(2 * begun))
                state = training.state()
                checkpoint.load(state, checkpoint_id=folder, process_group=training.group)
                training.model.load_state_dict(state["model"])
                training.scaler.load_state_dict(state["scaler"])
                read = training.everywhere(training.scaler.state_dict())
                assert read[0] in saved and all(one == read[0] for one in read), (wrap, format, size, begun)
                training.advance(range(8, 12))
                assert training.scaler.last_step.applied
                assert len(set(training.everywhere(training.scaler.get_scale()))) == 1
dist.barrier()
# Threads of the group may outlive it, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""


def test_the_state_of_two_processes_is_read_by_one_two_and_three(in_processes):
    in_processes(SCRIPT, 3)
