"""One of the processes of `bench_processes`: the cases it trains, and what it finds, as JSON on its last line."""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import halfulp as hu

Parallel = nn.parallel.DistributedDataParallel
ROWS, STEPS, RATE = 8, 4, 0.05
# A case that takes longer has met nobody.
LIMIT = timedelta(seconds=60)
NAN, SPIKE = float("nan"), 2.0**120


@dataclass(frozen=True)
class Kind:
    """What is done to a model, and what its numbers are rounded to.

    Attributes:
        change: of a model, before it is wrapped.
        scaler: of a wrapped model; none by default.
        weight, gradient: the relative distance of neighbours (eps) in weights and in gradients.
    """

    weight: float
    gradient: float
    change: Callable[[nn.Module], nn.Module] = lambda model: model
    scaler: Callable[[nn.Module], Any] | None = None

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over rows."""
        dtype = next(model.parameters()).dtype
        return (model(inputs.to(dtype)).float() - targets).square().mean()


F32, F16, BF16 = 2.0**-23, 2.0**-10, 2.0**-7
KINDS = {
    "float32": Kind(F32, F32),
    "torch.amp.GradScaler": Kind(F32, F32, scaler=lambda model: torch.amp.GradScaler("cpu")),
    "scaler": Kind(F32, F32, scaler=hu.AdaptiveGradScaler),
    'scaler, format="fp16"': Kind(F32, F16, scaler=lambda model: hu.AdaptiveGradScaler(model, format="fp16")),
    "scaled, float32": Kind(F32, F32, lambda model: hu.scalify(model, torch.float32)),
    "scaled, float16": Kind(F16, F16, hu.scalify),
    "2 x float32": Kind(F32**2, F32, lambda model: hu.multicomponent(model, 2, torch.float32)),
    "2 x bfloat16": Kind(BF16**2, BF16, lambda model: hu.multicomponent(model, 2, torch.bfloat16)),
    '2 x float32, gradients="components"': Kind(
        F32**2, F32, lambda model: hu.multicomponent(model, 2, torch.float32, gradients="components")
    ),
}


class Branches(nn.Module):
    """One of two branches by the sign of an input, so that processes differ in the parameters that they use."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        """Of a batch whose first number decides."""
        h = self.first(x).tanh()
        return self.left(h) if x[0, 0] > 0 else self.right(h)


def layers() -> nn.Module:
    """Three layers and two activations."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))


def sgd(parameters) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def zero(parameters) -> torch.optim.Optimizer:
    """The same, its states divided among processes."""
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=RATE, momentum=0.9)


def parallel(model: nn.Module, group: Any, **options) -> nn.Module:
    """DistributedDataParallel of a group."""
    return Parallel(model, process_group=group, **options)


def hooked(*hook) -> Callable:
    """DistributedDataParallel with a communication hook."""

    def wrap(model, group):
        model = parallel(model, group)
        model.register_comm_hook(*hook)
        return model

    return wrap


def sharded(model: nn.Module, group: Any, **options) -> nn.Module:
    """FSDP2, each layer a group."""
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    for layer in (layer for layer in model if isinstance(layer, nn.Linear)):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded_with_policy(model: nn.Module, group: Any) -> nn.Module:
    """FSDP2 with bfloat16 copies, reduced in float32."""
    return sharded(model, group, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@dataclass(frozen=True)
class Case:
    """How processes train.

    Attributes:
        wrap: of a model and a process group.
        batches: how many each process has.
        accumulate: how many make a step.
        gradient, weight: what travels, and what is multiplied, is rounded to (eps); nothing by default.
        policy: whether one process is wrapped too, as its arithmetic changes.
    """

    wrap: Callable[[nn.Module, Any], nn.Module] = parallel
    batches: tuple[int, int] = (STEPS, STEPS)
    accumulate: int = 1
    gradient: float = 0.0
    weight: float = 0.0
    architecture: Callable[[], nn.Module] = layers
    optimizer: Callable = sgd
    policy: bool = False

    @property
    def is_uneven(self) -> bool:
        """Whether processes run out of batches at different steps."""
        return len(set(self.batches)) > 1


CASES = {
    "DDP": Case(),
    "no_sync": Case(batches=(3 * STEPS, 3 * STEPS), accumulate=3),
    "join, uneven inputs": Case(batches=(STEPS - 2, STEPS)),
    "static graph": Case(lambda model, group: parallel(model, group, static_graph=True)),
    "unused branches": Case(
        lambda model, group: parallel(model, group, find_unused_parameters=True, gradient_as_bucket_view=True),
        architecture=Branches,
    ),
    "gradients as views of buckets": Case(lambda model, group: parallel(model, group, gradient_as_bucket_view=True)),
    "float16 payloads (payload_hook)": Case(hooked(torch.float16, hu.scaled.payload_hook), gradient=F16),
    "fp16_compress_hook": Case(hooked(None, fp16_compress_hook), gradient=F16),
    "ZeroRedundancyOptimizer": Case(optimizer=zero),
    "FSDP2": Case(sharded),
    "FSDP2, MixedPrecisionPolicy": Case(sharded_with_policy, gradient=BF16, policy=True),
}
SUBGROUP = "DDP on two of three processes"
# What each rank's loss is multiplied by in a step.
LOSSES = {
    "equal": lambda step, rank: 1.0,
    "differ by 1e-12": lambda step, rank: 1.0 + 1e-12 * rank,
    "tiny on one rank": lambda step, rank: 1e-35 if rank else 1.0,
    "0 on one rank": lambda step, rank: 0.0 if rank and step % 3 else 1.0,
    "NaN on one rank": lambda step, rank: NAN if rank and step % 7 == 5 else 1.0,
    "spikes on one rank": lambda step, rank: SPIKE if rank == 0 and step % 9 == 4 else 1.0,
    "2^30 apart": lambda step, rank: 2.0 ** (-30 * rank),
}


class Process:
    """One process: its rank, and batches that all processes know."""

    def __init__(self, kind: str, seed: int):
        self.kind, self.seed, self.rank = KINDS[kind], seed, dist.get_rank()
        self.single = [dist.new_group([rank]) for rank in range(dist.get_world_size())][self.rank]
        draw = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(3 * STEPS + 4, 2, ROWS, 6, generator=draw)
        self.targets = torch.randn(3 * STEPS + 4, 2, ROWS, 3, generator=draw)

    def model(self, case: Case) -> nn.Module:
        """The same start everywhere."""
        torch.manual_seed(self.seed)
        return self.kind.change(case.architecture())

    def own_loss(self, model: nn.Module, batch: int) -> Tensor:
        """Of this process's half."""
        return self.kind.loss(model, self.inputs[batch, self.rank], self.targets[batch, self.rank])

    def whole_loss(self, model: nn.Module, batch: int, case: Case) -> Tensor:
        """Of all halves: what DistributedDataParallel's average of gradients belongs to."""
        present = [r for r in range(2) if batch < case.batches[r]]
        x, t = self.inputs[batch, present], self.targets[batch, present]
        if case.architecture is Branches:
            return sum(self.kind.loss(model, *pair) for pair in zip(x, t, strict=True)) / 2
        return self.kind.loss(model, x.flatten(0, 1), t.flatten(0, 1)) * (len(present) / 2)

    def alone(self, case: Case) -> tuple[list[Tensor], list[Tensor]]:
        """One process on whole batches: parameters before and after."""
        model = self.model(case)
        before = values(model)
        model = case.wrap(model, self.single) if case.policy else model
        optimizer = sgd(model.parameters())
        scaler = None if self.kind.scaler is None else self.kind.scaler(model)
        for batch in range(max(case.batches)):
            self.advance(self.whole_loss(model, batch, case), scaler, optimizer, (batch + 1) % case.accumulate == 0)
        return before, values(model)

    def advance(self, loss: Tensor, scaler: Any, optimizer: torch.optim.Optimizer, steps: bool) -> None:
        """A backward pass, and a step where one is due."""
        (loss if scaler is None else scaler.scale(loss)).backward()
        if not steps:
            return
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    def together(self, model: nn.Module, scaler: Any, optimizer: torch.optim.Optimizer, case: Case) -> None:
        """All processes, each on its half."""
        with model.join() if case.is_uneven else contextlib.nullcontext():
            for batch in range(case.batches[self.rank]):
                steps = (batch + 1) % case.accumulate == 0
                with contextlib.nullcontext() if steps else model.no_sync():
                    self.advance(self.own_loss(model, batch), scaler, optimizer, steps)

    def examine(self, case: Case, group: Any = None) -> dict:
        """What a case gives: an error in units of rounding, or a refusal; and whether processes drifted apart."""
        when = "wrapping"
        try:
            model = case.wrap(self.model(case), group)
            scaler = None if self.kind.scaler is None else self.kind.scaler(model)
            if case.is_uneven and isinstance(scaler, hu.AdaptiveGradScaler):
                # At its first step, after which a process without inputs would wait for the others.
                raise NotImplementedError("a scaler refuses join()")
            optimizer = case.optimizer(model.parameters())
            when = "running"
            self.together(model, scaler, optimizer, case)
            found, drift = values(model), drifted(model, group)
        except (NotImplementedError, ValueError, TypeError, RuntimeError) as error:
            return {"refused": when, "words": f"{type(error).__name__}: {error}"}
        before, wanted = self.alone(case)
        same = all(map(torch.equal, found, wanted))
        return {"same": same, "error": self.error(found, wanted, before, case), "drift": drift}

    def error(self, found: list[Tensor], wanted: list[Tensor], before: list[Tensor], case: Case) -> float:
        """The largest difference, in units of eps x the largest weight + eps of gradients x the largest change."""
        moved = max(float((a - b).abs().max()) for a, b in zip(wanted, before, strict=True))
        size = max(float(x.abs().max()) for x in wanted)
        unit = size * max(self.kind.weight, case.weight) + moved * max(self.kind.gradient, case.gradient)
        return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / unit

    def under(self, losses: Callable[[int, int], float], case: Case, steps: int = 14) -> dict:
        """Losses that differ between processes: whether these end with the same numbers, and finite ones."""
        try:
            model = case.wrap(self.model(case), None)
        except NotImplementedError as error:
            return {"refused": "wrapping", "words": str(error)}
        scaler = None if self.kind.scaler is None else self.kind.scaler(model)
        optimizer, applied = torch.optim.SGD(model.parameters(), lr=RATE), 0
        for step in range(steps):
            before = values(model)
            loss = self.own_loss(model, step % len(self.inputs)) * losses(step, self.rank)
            self.advance(loss, scaler, optimizer, True)
            applied += not all(map(torch.equal, before, values(model)))
        finite = all(bool(x.isfinite().all()) for x in values(model))
        return {"drift": drifted(model, None), "applied": applied, "finite": finite, "steps": steps}


def values(model: nn.Module) -> list[Tensor]:
    """All parameters in float64."""
    return [number(parameter) for parameter in model.parameters()]


def number(x: Any) -> Tensor:
    """A parameter or a state in float64, whole where it is sharded."""
    x = x.full_tensor() if hasattr(x, "full_tensor") else torch.as_tensor(x)
    return (x.detach().decode(torch.float64) if hasattr(x, "decode") else x.detach().double()) + 0


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All states of an optimizer in float64."""
    return [number(x) for state in optimizer.state.values() for x in state.values() if x is not None]


def drifted(model: nn.Module, group: Any) -> bool:
    """Whether processes hold different parameters."""
    mine = torch.cat([x.flatten() for x in values(model)])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return not all(torch.equal(mine.view(torch.int64), x.view(torch.int64)) for x in every)


def matrix(process: Process) -> dict:
    """Every case and every pair of losses."""
    is_scaler = process.kind.scaler is not None
    return {
        "cases": {name: process.examine(case) for name, case in CASES.items()},
        "losses": {
            f"{wrap}: {name}": process.under(loss, CASES[wrap])
            for wrap in (("DDP", "FSDP2") if is_scaler else ("DDP",))
            for name, loss in LOSSES.items()
        },
    }


def subgroup(process: Process) -> dict:
    """Two of three processes in a group, and the third in one of its own."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    if dist.get_rank() < 2:
        return {"cases": {SUBGROUP: process.examine(CASES["DDP"], pair)}}
    process.rank = 0
    process.examine(CASES["DDP"], single)
    return {}


WRAPS = {"DDP": parallel, "FSDP2": sharded}


def prepared(process: Process, wrap: str) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """A wrapped model, its scaler and its optimizer."""
    model = WRAPS[wrap](process.model(CASES[wrap]), None)
    scaler = None if process.kind.scaler is None else process.kind.scaler(model)
    return model, scaler, sgd(model.parameters())


def state_of(model: nn.Module, scaler: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scaler": {} if scaler is None else scaler.state_dict()}


def taken(process: Process) -> list[str]:
    """The wrappers that take this kind of model."""
    return list(WRAPS) if process.model(CASES["DDP"])[0].weight.__class__ is nn.Parameter else ["DDP"]


def saved(process: Process, folder: str) -> dict:
    """A checkpoint after two steps, and the numbers after these and after one more."""
    for wrap in taken(process):
        model, scaler, optimizer = prepared(process, wrap)
        for batch in range(2):
            process.advance(process.own_loss(model, batch), scaler, optimizer, True)
        state = state_of(model, scaler, optimizer)
        checkpoint.save(state, checkpoint_id=f"{folder}/{wrap}")
        found = values(model) + states(optimizer)
        process.advance(process.own_loss(model, 2), scaler, optimizer, True)
        # Each process has exponents of its own, and any may write them.
        torch.save(state["scaler"], f"{folder}/{wrap}-{process.rank}.pt")
        truth = {"numbers": found, "next": values(model)}
        if process.rank == 0:
            torch.save(truth, f"{folder}/{wrap}.pt")
    return {}


def loaded(process: Process, folder: str) -> dict:
    """Whether another number of processes reads the same numbers, and goes on with them."""
    found = {}
    process.seed += 1  # another start
    for wrap in taken(process):
        model, scaler, optimizer = prepared(process, wrap)
        state = state_of(model, scaler, optimizer)
        checkpoint.load(state, checkpoint_id=f"{folder}/{wrap}")
        inner = model.module if isinstance(model, Parallel) else model
        set_state_dict(inner, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if scaler is not None:
            scaler.load_state_dict(state["scaler"])
        truth = torch.load(f"{folder}/{wrap}.pt")
        same = all(map(torch.equal, values(model) + states(optimizer), truth["numbers"]))
        scalers = [torch.load(f"{folder}/{wrap}-{rank}.pt") for rank in range(2)]
        same &= scaler is None or scaler.state_dict() in scalers
        before = values(model)
        process.advance(process.whole_loss(model, 2, CASES["DDP"]), scaler, optimizer, True)
        error = process.error(values(model), truth["next"], before, CASES["DDP"])
        found[f"{wrap}, on {dist.get_world_size()}"] = {"same": same, "next": error, "drift": drifted(model, None)}
    return {"checkpoints": found}


def main() -> None:
    """A process of the benchmark: what it does, rank, number of processes, a folder that all share, seeds and kinds."""
    what, rank, world, folder, seeds, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options = {"init_method": f"file://{folder}/{what}{world}", "timeout": LIMIT}
    dist.init_process_group("gloo", rank=int(rank), world_size=int(world), **options)
    found = {}
    for kind in kinds:
        found[kind] = []
        for seed in map(int, seeds.split(",")):
            own = f"{folder}/{list(KINDS).index(kind)}-{seed}"
            os.makedirs(own, exist_ok=True)
            given = (own,) if what in ("saved", "loaded") else ()
            found[kind].append(globals()[what](Process(kind, seed), *given))
    print(json.dumps(found))
    dist.barrier()
    # Threads of the group may outlive it, and then the interpreter's end is an abort.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
