"""Several processes: replicas that agree and do not, ranks that observe unevenly; all bits as
unwatched, and nothing that hangs."""

import random

import torch

import halfulp as hu
from halfulp.observation.observing._ranks import hash_sampled_elements

WATCHED = """
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
REPLICAS = """
for wrap in (DistributedDataParallel, sharded):
    plain, _ = trained(wrap, False)
    watched, record = trained(wrap, True)
    assert all(map(hu.kernels.same_bits, plain, watched)), wrap
    assert record.replica_of == (rank, 2)
    assert not record.unseen, record.unseen
    assert record.sampled_steps == [0, 2, 4]
    assert len(record.replicas) == (4 if wrap is DistributedDataParallel else 0), record.replicas
    assert all(record.replicas.values())
    assert all(parameter.update.seen for parameter in record.parameters.values())
_, record = trained(DistributedDataParallel, True, spoil=True)
different = [name for name, same in record.replicas.items() if not same]
assert different, record.replicas
codes = {finding.code for finding in hu.observation.findings.collect_findings("observe", record)}
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
    found = hu.observation.findings.collect_findings("observe", record)
    assert not [finding for finding in found if finding.severity != "note"], list(map(str, found))
dist.destroy_process_group()
"""


def test_replicas_and_shards(in_two_processes):
    in_two_processes(WATCHED + REPLICAS)


def test_flat_shards_are_no_replicas(in_two_processes):
    in_two_processes(WATCHED + FLAT)


START = """
import sys, types, torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
import halfulp as hu
from halfulp.observation.observing import _ranks

_ranks.OTHER_RANKS_WAIT_SECONDS = 30.0  # of a loaded machine
rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
APART = "ranks are not compared: not all began to observe at the same step"
OTHERS = "ranks that are not compared, as they began or ended at another step, or have not stopped: "


def run():
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps, own=True, each=lambda step: None):
    for step in range(steps):
        model(torch.randn(6, 8) * (1 + rank)).square().mean().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            assert "planted" in str(error)
        optimizer.zero_grad()
        if own:
            total = torch.tensor([1.0 + rank])
            dist.all_reduce(total)
            assert total.item() == 3.0, total
        each(step)


def agree(record):
    assert len(record.replicas) == 4, record.replicas
    assert all(record.replicas.values()), record.replicas
"""
ONE_RANK = """
model, optimizer = run()
if rank == 0:
    with hu.observe(model, optimizer, interval=2) as seen:
        train(model, optimizer, 5)
    assert seen.record.unseen == [APART], seen.record.unseen
    assert not seen.record.replicas
else:
    train(model, optimizer, 5)
for _ in range(2):  # the first run of rank 1 is the second one of rank 0
    model, optimizer = run()
    with hu.observe(model, optimizer, interval=2) as seen:
        train(model, optimizer, 5)
        assert seen.record.unseen == [], seen.record.unseen
        assert seen.record.replicas == {}  # ranks are compared where observing stops
    assert seen.record.unseen == [], seen.record.unseen
    agree(seen.record)
seen.start()
train(model, optimizer, 5)
seen.stop()
assert seen.record.unseen == [] and len(seen) == 10
agree(seen.record)
"""
JOINED = """
model, optimizer = run()
with hu.observe(model, optimizer, interval=1) as seen, Join([model]):
    train(model, optimizer, 3 + 2 * rank, own=False)
assert seen.record.unseen == [f"{OTHERS}{1 - rank}"], seen.record.unseen
assert len(seen) == 3 + 2 * rank
"""
FAILING = """
model, optimizer = run()
seen = hu.observe(model, optimizer, interval=1).start()


def fail(*arguments):
    raise RuntimeError("planted")


def each(step):
    if rank and step == 0:
        each.finish = seen._scales.list_site_exponents
        seen._scales.list_site_exponents = fail  # a hook of ours in step 1
    if rank and step == 1:
        seen._scales.list_site_exponents = each.finish
        each.handle = optimizer.register_step_pre_hook(fail)  # the optimizer in step 2
    if rank and step == 2:
        each.handle.remove()


train(model, optimizer, 5, each=each)
seen.stop()
assert len(seen) == 5 - rank
assert not seen.record.replicas  # a step was not taken
wanted = ["could not end run step: it raised RuntimeError"] if rank else []
assert seen.record.unseen == [*wanted, f"{OTHERS}{1 - rank}"], seen.record.unseen
"""
THREE = """
pair = dist.new_group([1, 2])


def trained(model, spoiled=None, ignored=()):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with hu.observe(model, optimizer, interval=1) as seen:
        for step in range(5):
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if rank == spoiled and step == 1:
                model.module[0].bias.data[3] += 1e-5
    differing = {name for name, same in seen.record.replicas.items() if not same}
    return differing, seen.record


def small():
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))


# Rank 0 reads both others, and they read rank 0.
differing, record = trained(DistributedDataParallel(small()), spoiled=1)
assert record.unseen == [], record.unseen
assert differing == ({"module.0.bias"} if rank < 2 else set()), differing

# A model that two ranks alone share, and another one of the same names.
model = small()
if rank:
    model = DistributedDataParallel(model, process_group=pair)
else:
    torch.manual_seed(seed + 1)
    model = nn.Sequential()
    model.module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
differing, record = trained(model)
assert not differing, differing
said = [] if rank else [APART]
assert record.unseen == said, record.unseen
assert len(record.replicas) == (4 if rank else 0)

# What DistributedDataParallel leaves to each rank.
model = small()
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
model[1].weight.data += rank
differing, record = trained(DistributedDataParallel(model))
assert not differing, differing
assert set(record.replicas) == {"module.0.weight", "module.0.bias"}
"""
LATE = """
for begins in (0, 1):  # which rank does so three steps later
    model, optimizer = run()
    seen = hu.observe(model, optimizer, interval=1)


    def each(step):
        if step == 2 and rank == begins:
            seen.start()


    if rank != begins:
        seen.start()
    train(model, optimizer, 8, each=each)
    seen.stop()
    unseen = seen.record.unseen[:]
    assert unseen in ([APART], [f"{OTHERS}{1 - rank}"]), unseen
    assert not seen.record.replicas
    seen.start()  # from another of its own steps, and together with the other rank
    train(model, optimizer, 4)
    seen.stop()
    assert seen.record.unseen == unseen, seen.record.unseen
    agree(seen.record)
"""
STOPPED = """
_ranks.OTHER_RANKS_WAIT_SECONDS = 0.2 if rank else 30.0  # rank 1 stops first: rank 0 cannot have stopped then
model, optimizer = run()
seen = hu.observe(model, optimizer, interval=2).start()
train(model, optimizer, 9, each=lambda step: seen.stop() if rank and step == 4 else None)
seen.stop()
assert seen.record.unseen == [f"{OTHERS}{1 - rank}"], seen.record.unseen

_ranks.OTHER_RANKS_WAIT_SECONDS = 30.0
model, optimizer = run()
with hu.observe(model, optimizer, interval=2 + rank) as seen:
    train(model, optimizer, 8)
assert seen.record.unseen == []  # the last of both is 6
agree(seen.record)

model, optimizer = run()
with hu.observe(model, optimizer, interval=2) as seen:
    train(model, optimizer, 3)
    dist.barrier()
    dist.destroy_process_group()
(unseen,) = seen.record.unseen
assert "the process group was destroyed before observing stopped" in unseen, unseen
"""
ZERO = """
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own script functions
    from torch.distributed.optim import ZeroRedundancyOptimizer

for given in ("outer", "both"):
    model, _ = run()
    outer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    with hu.observe(model, outer if given == "outer" else [outer.optim, outer], interval=1) as seen:
        train(model, outer, 4)
    record = seen.record
    assert len(seen) == 4
    assert record.unseen == [], record.unseen
    for name, p in model.named_parameters():
        found = record.parameters[name]
        assert (found.gradients, found.optimizer) == (4, "ZeroRedundancyOptimizer"), found
        assert not found.update.known, found
        assert 0 < found.update.seen <= 4 * found.numel, found
    agree(record)
    assert not [finding for finding in seen.findings if finding.severity != "note"], seen.findings
dist.destroy_process_group()
"""
END = """
dist.destroy_process_group()
"""


def test_observing_on_one_rank_alone_and_then_on_both(in_two_processes):
    in_two_processes(START + ONE_RANK + JOINED + END)


def test_a_rank_that_fails_or_stops(in_two_processes):
    in_two_processes(START + FAILING + STOPPED)


def test_three_ranks_of_which_two_share_a_model(in_processes):
    in_processes(START.replace("world_size=2", "world_size=3") + THREE + END, count=3)


def test_a_rank_that_begins_later(in_two_processes):
    in_two_processes(START + LATE + END)


def test_a_zero_redundancy_optimizer_counts_once(in_two_processes):
    in_two_processes(START + ZERO)


def test_a_group_without_a_store_is_said(in_process):
    in_process(
        """
import torch, halfulp as hu
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hu.observe(model, optimizer, interval=1) as seen:
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
assert seen.record.unseen == ["could not announce observing to ranks: it raised RuntimeError"], seen.record.unseen
dist.destroy_process_group()
"""
    )


def test_hashes_differ_wherever_a_sampled_element_does(seed):
    start = {
        "narrow": torch.randn(37, dtype=torch.bfloat16),
        "wide": torch.randn(5, 7, dtype=torch.float64),
        "large": torch.randn(4096),
        "empty": torch.empty(0),
        "number": torch.zeros(()),
        "scaled": hu.ScaledTensor.encode(torch.randn(64), torch.float16),
    }

    def hashed(**other) -> dict[str, int]:
        return hash_sampled_elements({**start, **other}, 5)

    before = hashed()
    assert before == hashed(**{name: one.clone() for name, one in start.items()})
    other = {name: one.clone() for name, one in start.items() if name in ("narrow", "wide", "large")}
    for one in other.values():
        flat = one.view(-1)
        place = random.randrange(len(flat))
        flat[place] = torch.nextafter(flat[place], torch.tensor(torch.inf, dtype=one.dtype))
    other["number"], other["empty"] = torch.tensor(-0.0), torch.empty(0, 3)
    other["scaled"] = start["scaled"] * 2.0
    after = hashed(**other)
    assert {name for name in start if before[name] != after[name]} == {"narrow", "wide", "large", "number", "scaled"}
    other["large"] = torch.full((4096,), torch.nan)
    assert hashed(**other)["large"] == hashed(**other)["large"]


def test_one_process_says_nothing():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer, interval=1) as seen:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert (seen.record.replicas, seen.record.replica_of, seen.record.unseen) == ({}, (0, 1), [])
