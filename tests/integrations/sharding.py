"""The start of a script of two gloo processes in which accelerate shards models on the CPU."""

# accelerate shards on accelerators alone, by a check where its state is made.
SHARDED = """
import os, sys, warnings, torch
warnings.simplefilter("ignore")  # advice of accelerate
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
import accelerate
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
import halfulp as hu

made = AcceleratorState.__init__


def make(self, *given, fsdp_plugin=None, **more):
    made(self, *given, fsdp_plugin=fsdp_plugin, **more)
    plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
    if plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin


AcceleratorState.__init__ = make


def end():
    dist.barrier()
    dist.destroy_process_group()
    # Threads of the group may outlive it, and then the interpreter's end is an abort.
    sys.stdout.flush()
    os._exit(0)


"""
