"""Law: every optimizer steps, saves while it goes on, and loads on another mesh with the bits of one process."""

import pytest

from halfulp._torch_versions import HAS_SRC_DATA_RANK_ARGUMENT

ON_MESHES = """
import functools, gc, os, sys, warnings
warnings.simplefilter("ignore")  # torch's advice on checkpoints
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from datetime import timedelta
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import halfulp as hu

gc.freeze()  # what a first step looks through
rank, path, seed, world = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(os.environ["RANKS"])
dist.init_process_group(
    "cpu:gloo", init_method="file://" + path, rank=rank, world_size=world, timeout=timedelta(seconds=120)
)
BEFORE, AFTER = 1, 1
# FSDP with tensor parallel, uneven on both; then a mesh of one dimension, cut along the others.
square = init_device_mesh("cpu", (2, world // 2))
line = init_device_mesh("cpu", (world,))
SHAPES = {"both": (5, 6), "rows": (7, 4), "columns": (3, 9)}
ON_SQUARE = {
    "both": [Shard(0), Shard(1)],
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
}
ON_LINE = {"both": [Shard(0)], "rows": [Replicate()], "columns": [Shard(0)]}


def draw(step):
    generator = torch.Generator().manual_seed(10 * seed + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def whole(name, tensor):
    return tensor


def on(mesh, placements, name, tensor):
    return distribute_tensor(tensor, mesh, placements[name], src_data_rank=None)


class Training:
    def __init__(self, kind, place):
        self.place = place
        self.held = {name: torch.nn.Parameter(place(name, value)) for name, value in draw(0).items()}
        self.optimizer = kind(self.held.items(), lr=0.05, param_dtype=torch.bfloat16, weight_update="stochastic")

    def steps(self, first, count):
        for step in range(first, first + count):
            for name, value in draw(step).items():
                self.held[name].grad = self.place(name, value.bfloat16())
            self.optimizer.step()
        return self

    def same(self, other):
        for name, parameter in self.held.items():
            found = parameter.detach()
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            assert torch.equal(found, other.held[name].detach()), (type(self.optimizer).__name__, name)

    def file(self):
        weights = {name: parameter.detach() for name, parameter in self.held.items()}
        return {"weights": weights, "optimizer": self.optimizer.state_dict()["state"]}


saves = dist.new_group()
on_square = functools.partial(on, square, ON_SQUARE)
on_line = functools.partial(on, line, ON_LINE)
kinds = hu.optim.OPTIMIZERS
with hu.kernels.engine("reference"):  # nothing is compiled for numbers this small
    alone = {name: Training(kind, whole).steps(1, BEFORE) for name, kind in kinds.items()}
    trained = {name: Training(kind, on_square).steps(1, BEFORE) for name, kind in kinds.items()}
    for name in kinds:
        trained[name].same(alone[name])
    # A thread saves, whose collectives would meet those of the steps in one group.
    files = {name: one.file() for name, one in trained.items()}
    saving = dcp.async_save(files, checkpoint_id=path + "-saved", process_group=saves)
    for name in kinds:
        trained[name].steps(1 + BEFORE, AFTER).same(alone[name].steps(1 + BEFORE, AFTER))
    saving.result()
    again = {name: Training(kind, on_line).steps(50, 1) for name, kind in kinds.items()}
    files = {name: one.file() for name, one in again.items()}
    dcp.load(files, checkpoint_id=path + "-saved")
    for name, one in again.items():
        state = {"state": files[name]["optimizer"], "param_groups": one.optimizer.state_dict()["param_groups"]}
        one.optimizer.load_state_dict(state)
        one.steps(1 + BEFORE, AFTER).same(alone[name])
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif(
    not HAS_SRC_DATA_RANK_ARGUMENT, reason="this torch cannot distribute a tensor that all processes have"
)
def test_meshes_step_save_and_load_as_one_process(in_processes):
    in_processes(ON_MESHES, 4, RANKS="4")  # any even number will do
