"""Two gloo processes: replicas that agree and that do not, extremes of both ranks, the same bits as unwatched."""

START = """
import copy, os, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
torch.manual_seed(seed)
start = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
inputs = torch.randn(2, 6, 8) * torch.tensor([1.0, 100.0]).view(2, 1, 1)


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(wrap, watch, spoil=False):
    model = wrap(copy.deepcopy(start))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = hu.observe(model, optimizer, interval=2)
    if watch:
        seen.start()
    for step in range(5):
        if spoil and rank and step == 2:
            with torch.no_grad():
                next(model.parameters()).add_(1e-3)
        model(inputs[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen.stop()
    values = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    return values, seen.record
"""
CHECK = """
for wrap in (DistributedDataParallel, sharded):
    plain, _ = trained(wrap, False)
    watched, record = trained(wrap, True)
    assert all(map(hu.kernels.same_bits, plain, watched)), wrap
    assert record.replica_of == (rank, 2)
    assert not record.unseen, record.unseen
    assert record.sampled_steps == [0, 2, 4]
    assert len(record.replicas) == (4 if wrap is DistributedDataParallel else 0), record.replicas
    assert all(record.replicas.values())
    every = [None, None]
    first = next(key for key in record.tensors if key[0] == "activation")
    dist.all_gather_object(every, record.tensors[first].amax)
    assert every[0] == every[1]
    assert all(parameter.update.seen for parameter in record.parameters.values())
_, record = trained(DistributedDataParallel, True, spoil=True)
different = [name for name, same in record.replicas.items() if not same]
assert different, record.replicas
codes = {finding.code for finding in hu.observation.findings.findings_of("observe", record)}
assert "replicas-differ" in codes
dist.destroy_process_group()
"""
FLAT = """
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own words of the first version of FSDP
    from torch.distributed.fsdp import FullyShardedDataParallel

for original in (False, True):


    def flat(model):
        cpu = torch.device("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FullyShardedDataParallel(model, use_orig_params=original, device_id=cpu)


    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, _ = trained(flat, False)
        watched, record = trained(flat, True)
    assert all(map(hu.kernels.same_bits, plain, watched))
    assert not record.replicas and not record.unseen, (record.replicas, record.unseen)
    found = hu.observation.findings.findings_of("observe", record)
    assert not [finding for finding in found if finding.severity != "note"], list(map(str, found))
dist.destroy_process_group()
"""


def test_replicas_and_shards(in_two_processes, needs_torch):
    needs_torch("observations that compare ranks")
    in_two_processes(START + CHECK)


def test_flat_shards_are_no_replicas(in_two_processes, needs_torch):
    needs_torch("observations that compare ranks")
    in_two_processes(START + FLAT)
