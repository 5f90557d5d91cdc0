"""Scalers of several processes: no hang and no drift, whatever one of them meets, under every wrapper."""

import pytest

START = """
import contextlib, copy, os, sys, time, torch, warnings
torch.set_num_threads(1)
import torch.distributed as dist
from datetime import timedelta
from torch import nn
import halfulp as hu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
world = 2
limit = timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world, timeout=limit)
Parallel = nn.parallel.DistributedDataParallel
torch.manual_seed(seed)


class Spiked(nn.Module):
    # Passes its input on, and so many times the gradient back: what the loss sends into the model is as ever.
    spike = 1.0

    def forward(self, x):
        return x.detach() + (x - x.detach()) * Spiked.spike


layers = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))
start = nn.Sequential(*layers, Spiked())
inputs = torch.randn(80, world, 5, 6, generator=torch.Generator().manual_seed(seed))
NAN, SPIKE = float("nan"), 2.0**70
# What each rank's loss is multiplied by in a step.
LOSSES = {
    "equal": lambda step, rank: 1.0,
    "differ by 1e-12": lambda step, rank: 1.0 + 1e-12 * rank,
    "tiny on one rank": lambda step, rank: 1e-35 if rank else 1.0,
    "0 on one rank": lambda step, rank: 0.0 if rank and step % 3 else 1.0,
    "NaN on one rank": lambda step, rank: NAN if rank and step % 7 == 5 else 1.0,
    "spikes on one rank": lambda step, rank: SPIKE if rank == 0 and step % 9 == 4 else 1.0,
    "far apart": lambda step, rank: 2.0 ** (-30 * rank),
}


def sharded(model):
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model, factor, make, steps=14, lr=0.05):
    scaler, applied = make(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        before = value(next(model.parameters()))
        spikes = factor is LOSSES["spikes on one rank"]
        Spiked.spike = factor(step, rank) if spikes else 1.0
        loss = model(inputs[step, rank]).square().mean() * (1.0 if spikes else factor(step, rank))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        applied.append(not torch.equal(before, value(next(model.parameters()))))
    return [value(p) for p in model.parameters()], applied, scaler


def value(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def same_everywhere(tensors):
    for x in tensors:
        every = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(every, x)
        assert all(torch.equal(x, one) for one in every), every


def plain(model):
    return torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)


"""
SAMPLE = """
SAMPLE = {Parallel: ["differ by 1e-12", "0 on one rank", "NaN on one rank", "spikes on one rank"]}
SAMPLE[sharded] = ["NaN on one rank"]
"""
UNEQUAL = """
for wrap, names in SAMPLE.items():
    for name in names:
        factor = LOSSES[name]
        # In float32 nothing is rounded, so that the training is that without a scaler, bit for bit.
        ours, applied, scaler = trained(wrap(copy.deepcopy(start)), factor, hu.AdaptiveGradScaler)
        if "spikes" not in name:
            theirs, wanted, _ = trained(wrap(copy.deepcopy(start)), factor, plain)
            assert applied == wanted, (name, wrap, applied)
            assert all(map(torch.equal, ours, theirs)), (name, wrap)
        same_everywhere([*ours, torch.tensor(scaler.get_scale())])
        ours, applied, scaler = trained(
            wrap(copy.deepcopy(start)), factor, lambda model: hu.AdaptiveGradScaler(model, format="fp16")
        )
        # Half of the rank-0 steps are spikes' or NaN's at most, and what follows one.
        assert sum(applied) >= 6 and all(x.isfinite().all() for x in ours), (name, wrap, applied)
        same_everywhere([*ours, torch.tensor(scaler.get_scale())])
"""
WRAPPED = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
from torch.distributed.optim import ZeroRedundancyOptimizer
sys.path.insert(0, os.getcwd())
from benchmarks._process_cases import Branches


def zero(parameters, lr):
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr)


def of(make, options=None, hook=None, accumulate=1, inner=None, optimizer=torch.optim.SGD, steps=4):
    torch.manual_seed(seed)
    model = Parallel(copy.deepcopy(start) if inner is None else inner(), **(options or {}))
    if hook is not None:
        model.register_comm_hook(*hook)
    scaler, stepping = make(model), optimizer(model.parameters(), lr=0.05)
    for step in range(steps):
        stepping.zero_grad()
        for part in range(accumulate):
            with model.no_sync() if part < accumulate - 1 else contextlib.nullcontext():
                scaler.scale(model(inputs[step * accumulate + part, rank]).square().mean()).backward()
        scaler.step(stepping)
        scaler.update()
    return [value(p) for p in model.parameters()]


CASES = {
    "plain": {},
    "no_sync": {"accumulate": 3},
    "static graph": {"options": {"static_graph": True}},
    "unused branches": {"options": {"find_unused_parameters": True}, "inner": Branches, "steps": 8},
    "buckets as views": {"options": {"gradient_as_bucket_view": True}},
    "payloads of 16 bits": {"hook": (torch.float16, hu.scaled.payload_hook)},
    "payloads of a group": {"hook": ((torch.float16, dist.group.WORLD), hu.scaled.payload_hook)},
    "float16 hook": {"hook": (None, fp16_compress_hook)},
    "ZeroRedundancyOptimizer": {"optimizer": zero},
}
for name, case in CASES.items():
    ours = of(hu.AdaptiveGradScaler, **case)
    wanted = of(plain, **case)
    if name == "float16 hook":  # which rounds large numbers better than small ones
        assert all(torch.allclose(a, b, rtol=0, atol=1e-3) for a, b in zip(ours, wanted)), name
    else:
        assert all(map(torch.equal, ours, wanted)), name
    same_everywhere(ours)
"""
JOINED = """
model = Parallel(copy.deepcopy(start))
scaler, optimizer = hu.AdaptiveGradScaler(model.module), torch.optim.SGD(model.parameters(), lr=0.05)
try:
    with model.join():
        scaler.scale(model(inputs[0, rank]).square().mean()).backward()
        scaler.step(optimizer)
except NotImplementedError as error:
    assert "drop_last=True" in str(error)
else:
    raise AssertionError("a step in join() was let through")
sys.stdout.flush()
os._exit(0)
"""
ALONE = """
alone = dist.new_group([0])
if rank == 0:
    world, factor = 1, LOSSES["NaN on one rank"]
    ours, applied, scaler = trained(Parallel(copy.deepcopy(start), process_group=alone), factor, hu.AdaptiveGradScaler)
    theirs, wanted, _ = trained(Parallel(copy.deepcopy(start), process_group=alone), factor, plain)
    assert applied == wanted and all(map(torch.equal, ours, theirs))
    world = 2
"""
MIXED = """
mesh = init_device_mesh("cpu", (world,))
for bad in (False, True):
    model = copy.deepcopy(start)
    fully_shard(model, mesh=mesh, ignored_params=set(model[4].parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = hu.AdaptiveGradScaler(model)
    before = [value(p) for p in model.parameters()]
    scaler.scale(model(inputs[0, rank]).square().mean()).backward()
    scaled = [value(p.grad) for p in model.parameters()]
    if bad and rank == 0:  # a plain gradient of this rank alone
        model[4].bias.grad.fill_(float("inf"))
    scaler.unscale_(optimizer)
    for p, x in zip(model.parameters(), scaled):
        assert bad or torch.equal(value(p.grad) * 2.0**16, x)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied != bad, scaler.last_step
    assert bad == all(torch.equal(value(p), x) for p, x in zip(model.parameters(), before))
"""
OUT_OF_STEP = """
what = "WHAT"
model = Parallel(copy.deepcopy(start))
scaler, optimizer = hu.AdaptiveGradScaler(model), torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(3):
    optimizer.zero_grad()
    if step == 2 and rank == 1 and what == "is early":
        scaler.load_state_dict(early)  # of another iteration
    scaler.scale(model(inputs[step, rank]).square().mean()).backward()
    if step == 2 and rank == 1:
        if what == "dies":
            os._exit(0)
        while what == "stays away":  # until the other one has given it up
            time.sleep(0.1)
            if os.path.exists(path + "-told"):
                os._exit(0)
    if step == 2 and what == "stays away":  # all that this one still waits for never comes
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        assert ("are out of step" if what == "is early" else "one of them died, or does not call") in str(error), error
        open(path + "-told", "w").close()
        os._exit(0)
    scaler.update()
    early = scaler.state_dict() if step == 0 else early
raise AssertionError("nobody noticed")
"""


def test_two_processes_train_as_without_a_scaler(in_two_processes):
    in_two_processes(START + SAMPLE + UNEQUAL + WRAPPED + ALONE + MIXED + JOINED)


@pytest.mark.parametrize("what", ["dies", "stays away", "is early"])
def test_a_process_that_is_not_there_ends_the_other_with_its_reason(what, in_two_processes):
    in_two_processes(START + OUT_OF_STEP.replace("WHAT", what))


START_EXACT = """
import copy, os, sys, random, torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
torch.manual_seed(seed)
layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
model = nn.Sequential(*layers)
inputs, targets = torch.randn(2, 6, 8), torch.randn(2, 6, 4)


def sharded(model, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model):
    return (model(inputs[rank]).float() - targets[rank]).square().mean()


def gradients(model):
    found = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]


def under_exponents(model, scaler):
    scaler.scale(loss_of(model)).backward()
    model.zero_grad()
    keys = [row.site for row in scaler.sites().rows[1:]]
    draw = random.Random(seed + rank)  # another draw on each rank
    scaler.set_exponents({"global": 8, **{key: draw.randint(-12, 24) for key in keys}})
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    return gradients(model)


def end():
    dist.barrier()
    dist.destroy_process_group()
    # Threads of the group may outlive it, and then the interpreter's end is an abort.
    sys.stdout.flush()
    os._exit(0)


"""
EXACT = """
for wrap in (nn.parallel.DistributedDataParallel, sharded):
    plain, ours = wrap(copy.deepcopy(model)), wrap(copy.deepcopy(model))
    loss_of(plain).backward()
    for mine, theirs in zip(under_exponents(ours, hu.AdaptiveGradScaler(ours)), gradients(plain), strict=True):
        assert torch.equal(mine, theirs), wrap
end()
"""
HALF = """
from torch.distributed.fsdp import MixedPrecisionPolicy

half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
model[2] = nn.SiLU()  # rounding takes a number to the other side of ReLU's kink now and then
true, plain, ours = (sharded(copy.deepcopy(model), **kind) for kind in ({}, {"mp_policy": half}, {"mp_policy": half}))
scaler = hu.AdaptiveGradScaler(ours)
optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
# So small a loss underflows in float16 unless something scales it.
for _ in range(3):
    ours.zero_grad()
    scaler.scale(1e-5 * loss_of(ours)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied, scaler.last_step
for one in (true, plain):
    (1e-5 * loss_of(one)).backward()


def error(found):
    pairs = zip(found, gradients(true), strict=True)
    return max(((mine - exact).norm() / exact.norm()).item() for mine, exact in pairs)


assert error(gradients(ours)) < 0.01 < error(gradients(plain)), (error(gradients(ours)), error(gradients(plain)))
end()
"""
COMPILED = """
import logging, warnings
warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)  # Dynamo of 2.11
logging.getLogger("torch").setLevel(logging.ERROR)


def compiled(model):
    scaler = hu.AdaptiveGradScaler(model)
    run = torch.compile(model, backend=scaler.backend("aot_eager"))
    run.zero_grad, run.parameters = model.zero_grad, model.parameters
    return run, scaler


plain, ours = (nn.parallel.DistributedDataParallel(copy.deepcopy(model)) for _ in range(2))
loss_of(plain).backward()
run, scaler = compiled(ours)
for mine, theirs in zip(under_exponents(run, scaler), gradients(plain), strict=True):
    assert torch.equal(mine, theirs)
assert len(scaler.sites()) == 4

run, scaler = compiled(sharded(copy.deepcopy(model)))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    loss_of(run)
# torch 2.11 captures them all.
warned = any("modules that fully_shard wraps uncompiled" in str(one.message) for one in said)
assert warned is (len(scaler.sites()) < 4), ([str(one.message) for one in said], scaler.sites())
end()
"""
OVERFLOW = """
ours = sharded(copy.deepcopy(model))
scaler = hu.AdaptiveGradScaler(ours)
optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
before = [parameter.full_tensor().detach().clone() for parameter in ours.parameters()]
scaler.scale(loss_of(ours)).backward()
if rank == 0:  # only this rank's shard
    next(iter(ours.parameters())).grad.to_local().fill_(float("inf"))
scaler.step(optimizer)
scaler.update()
assert not scaler.last_step.applied
for parameter, value in zip(ours.parameters(), before):
    assert torch.equal(parameter.full_tensor(), value)
end()
"""


@pytest.mark.parametrize(
    "body",
    [EXACT, HALF, COMPILED, OVERFLOW],
    ids=["exact", "float16 copies", "compiled", "one shard overflows"],
)
def test_two_processes(body, in_two_processes, needs_torch):
    if body is HALF:
        needs_torch("gradients of another dtype than the parameter's (Tensor.grad_dtype)")
    in_two_processes(START_EXACT + body)


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
