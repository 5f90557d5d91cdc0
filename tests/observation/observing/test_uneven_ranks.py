"""Two gloo processes that do not observe the same: nothing hangs, no collective of the run is met, words say what
is missing."""

START = """
import sys, types, torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)


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
    assert seen.record.unseen == ["rank 1 did not observe this run: not compared"], seen.record.unseen
    assert not seen.record.replicas
else:
    train(model, optimizer, 5)
for _ in range(2):  # the first run of rank 1 is the second one of rank 0
    model, optimizer = run()
    with hu.observe(model, optimizer, interval=2) as seen:
        train(model, optimizer, 5)
        assert seen.record.unseen == [], seen.record.unseen
        agree(seen.record)
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
said = ["rank 0 ended after step 2: compared until then"] if rank else []
assert seen.record.unseen == said, seen.record.unseen
assert len(seen) == 3 + 2 * rank
agree(seen.record)
"""
FAILING = """
model, optimizer = run()
seen = hu.observe(model, optimizer, interval=1).start()


def fail(*arguments):
    raise RuntimeError("planted")


def each(step):
    if rank and step == 0:
        finish, seen._modules.finish_step = seen._modules.finish_step, fail  # a hook of ours in step 1
        each.finish = finish
    if rank and step == 1:
        seen._modules.finish_step = each.finish
        each.handle = optimizer.register_step_pre_hook(fail)  # the optimizer in step 2
    if rank and step == 2:
        each.handle.remove()


train(model, optimizer, 5, each=each)
seen.stop()
assert len(seen) == 5 - rank
assert set(seen.record.replicas) == {"module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"}
assert not all(seen.record.replicas.values())  # a step was not taken
wanted = ["end step: it raised RuntimeError"] if rank else ["rank 1 ended after step 3: compared until then"]
assert seen.record.unseen == wanted, seen.record.unseen
"""
THREE = """
import halfulp.observation.observing.processes._processes as processes

processes.AT_ONCE = 1
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


# Rank 0 reads one other rank a step, and tells each of what it knows of the other.
differing, record = trained(DistributedDataParallel(small()), spoiled=1)
assert record.unseen == [], record.unseen
assert differing == ({"module.0.bias"} if rank < 2 else differing), differing
assert differing <= {"module.0.bias"}
extremes = [None] * 3
key = ("activation", "module.1")
dist.all_gather_object(extremes, record.tensors[key].amax)
assert extremes[0] == max(extremes), extremes

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
said = [] if rank else ["ranks 1, 2 did not observe this run: not compared"]
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
    said = [f"rank {1 - rank} did not begin to observe at the same step: not compared"]
    assert seen.record.unseen == said, seen.record.unseen
    assert not seen.record.replicas
    seen.start()  # from another of its own steps, and together with the other rank
    train(model, optimizer, 4)
    seen.stop()
    assert seen.record.unseen == [], seen.record.unseen
    agree(seen.record)
"""
STOPPED = """
model, optimizer = run()
seen = hu.observe(model, optimizer, interval=2).start()
train(model, optimizer, 9, each=lambda step: seen.stop() if rank and step == 4 else None)
seen.stop()
wanted = [] if rank else ["rank 1 ended after step 4: compared until then"]
assert seen.record.unseen == wanted, seen.record.unseen
agree(seen.record)

model, optimizer = run()
try:
    with hu.observe(model, optimizer, interval=2) as seen:
        train(model, optimizer, 4)
        if rank:
            raise KeyError("planted")
        train(model.module, optimizer, 3, own=False)
except KeyError:
    assert rank
assert seen.record.unseen == ([] if rank else ["rank 1 ended after step 2: compared until then"]), seen.record.unseen
agree(seen.record)

model, optimizer = run()
with hu.observe(model, optimizer, interval=2 + rank) as seen:
    train(model, optimizer, 8)
assert seen.record.unseen == []  # the last of both is 6
agree(seen.record)

model, optimizer = run()
with hu.observe(model, optimizer, interval=50) as seen:
    train(model, optimizer, 1)
    train(model.module, optimizer, 3)
    dist.barrier()
    dist.destroy_process_group()
assert seen.record.unseen == [], seen.record.unseen
agree(seen.record)

dist.init_process_group("gloo", init_method="file://" + path + "again", rank=rank, world_size=2)
model, optimizer = run()
with hu.observe(model, optimizer, interval=2) as seen:
    train(model, optimizer, 3)
    dist.barrier()
    dist.destroy_process_group()
gone = "the process group was destroyed before the observation ended"
assert seen.record.unseen == [f"rank {1 - rank} last compared at step 0 ({gone})"], seen.record.unseen
agree(seen.record)
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
    own = {id(p) for group in outer.optim.param_groups for p in group["params"]}
    assert 0 < len(own) < 4
    for name, p in model.named_parameters():
        found = record.parameters[name]
        assert (found.gradients, found.optimizer) == (4, "AdamW"), found
        assert found.optimizer_module.startswith("torch.optim."), found
        assert found.update.known == (id(p) in own), found
        assert 0 < found.update.seen <= 4 * found.numel, found
    agree(record)
    assert not [finding for finding in seen.findings if finding.severity != "note"], seen.findings
dist.destroy_process_group()
"""
END = """
dist.destroy_process_group()
"""


def test_observing_on_one_rank_alone_and_then_on_both(in_two_processes, needs_torch):
    needs_torch("observations that compare ranks")
    in_two_processes(START + ONE_RANK + JOINED + END)


def test_a_rank_that_fails_or_stops(in_two_processes, needs_torch):
    needs_torch("observations that compare ranks")
    in_two_processes(START + FAILING + STOPPED)


def test_three_ranks_of_which_two_share_a_model(in_processes, needs_torch):
    needs_torch("observations that compare ranks")
    in_processes(START.replace("world_size=2", "world_size=3") + THREE + END, count=3)


def test_a_rank_that_begins_later(in_two_processes, needs_torch):
    needs_torch("observations that compare ranks")
    in_two_processes(START + LATE + END)


def test_a_zero_redundancy_optimizer_counts_once(in_two_processes, needs_torch):
    needs_torch("observations that compare ranks")
    in_two_processes(START + ZERO)


def test_a_group_without_a_store_is_said(in_process, needs_torch):
    needs_torch("observations that compare ranks")
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
assert seen.record.unseen == [
    "rank 1 not compared (the process group's store cannot be reached: RuntimeError)"
], seen.record.unseen
dist.destroy_process_group()
"""
    )
