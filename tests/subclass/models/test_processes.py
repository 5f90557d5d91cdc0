"""Two processes with half of each batch, under every wrapper, beside one with all of it: some of the benchmark."""

SAMPLE = """{
    "scaled, float16": [*CASES],
    "2 x bfloat16": ["join, uneven inputs", "unused branches", "ZeroRedundancyOptimizer"],
    '2 x float32, gradients="components"': ["DDP", "unused branches", "gradients as views of buckets"],
    'scaler, format="fp16"': ["DDP", "no_sync"],
}"""
SHARDED = """{'scaler, format="fp16"': ["FSDP2", "FSDP2, MixedPrecisionPolicy"]}"""
SCRIPT = """
import os, sys, warnings, torch
torch.set_num_threads(1)
sys.path.insert(0, os.getcwd())
import torch.distributed as dist
warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
from benchmarks._process_cases import CASES, KINDS, LIMIT, STEPS, Process

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2, timeout=LIMIT)
for kind, names in (SAMPLE).items():
    process = Process(kind, seed)
    for name in names:
        found = process.examine(CASES[name])
        if "FSDP2" in name and "scaler" not in kind:
            assert found["refused"] == "wrapping" and "Use DistributedDataParallel" in found["words"], (kind, found)
        else:
            assert "refused" not in found and not found["drift"], (kind, name, found)
            assert found["error"] <= STEPS, (kind, name, found)
dist.barrier()
# Threads of the group may outlive it, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""


def test_two_processes_are_one_on_the_whole_batch_or_are_refused(in_two_processes, needs_torch):
    needs_torch("fully_shard on the CPU")
    in_two_processes(SCRIPT.replace("(SAMPLE)", SAMPLE))


def test_two_processes_that_share_parameters_are_one_on_the_whole_batch(in_two_processes, needs_torch):
    needs_torch("fully_shard on the CPU that averages gradients, not sums them")
    in_two_processes(SCRIPT.replace("(SAMPLE)", SHARDED))
