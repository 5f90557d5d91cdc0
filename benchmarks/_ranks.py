"""Two processes that share their gradients: what AdaptiveGradScaler does there, and torch.amp.GradScaler."""

import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import zlib

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import halfulp as hu
from halfulp.kernels import same_bits

from ._harness import ROOT

SEEDS = (51803, 240917, 863442)
MODELS = {"perceptron": "multilayer-perceptron", "residual convolutions": "resnet", "GPT": "gpt"}
CASES = (("DDP", "in its backward pass"), ("FSDP2", "in its backward pass"), ("FSDP2", "in its shard only"))
HALF = "FSDP2, float16 copies"
SMALL = 1e-5  # a loss times this has gradients that float16 stores as zeros and subnormals, unless they are scaled


def scalers(**options) -> dict:
    """Name -> from a model to its scaler; options are AdaptiveGradScaler's."""
    return {
        "halfulp": lambda model: hu.AdaptiveGradScaler(model, **options),
        "GradScaler": lambda model: torch.amp.GradScaler("cpu"),
    }


def unscaled(model):
    """A scaler that does nothing."""
    return torch.amp.GradScaler("cpu", enabled=False)


def wrapped(kind: str, model):
    """A copy of a model that shares its gradients with the other process; each part of a sharded one is a group."""
    model = copy.deepcopy(model)
    if kind == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    mesh, options = init_device_mesh("cpu", (2,)), {"mp_policy": half} if kind == HALF else {}
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):  # torch runs it in float32 only
            fully_shard(part, mesh=mesh)
    for child in model.children():
        for part in child if isinstance(child, nn.ModuleList) else [child]:
            if next(part.parameters(), None) is not None:
                fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def boosted(module) -> list[float]:
    """The factor by which the gradient of a module's result is multiplied from now on; set what it holds."""
    factors = [1.0]

    def boost(module, args, out) -> None:
        out.register_hook(lambda gradient: gradient * factors[0])

    module.register_forward_hook(boost)
    return factors


def full(tensor):
    """All of a tensor that may be sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def checksum(tensors) -> int:
    """Of all bits."""
    return zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in tensors))


class Rank:
    """One of two processes: the weights of a seed, and a batch and exponents of its own."""

    def __init__(self, architecture: str, rank: int, seed: int):
        from tests.gradients.models.architectures import build

        self.case, self.rank = build(architecture, seed + rank), rank
        self.case.model.load_state_dict(build(architecture, seed).model.state_dict())
        self.draw = random.Random(seed + rank)

    def loss(self, model):
        """The loss of this rank's batch."""
        return self.case.loss(model(*self.case.batch).float())

    def exact(self, kind: str) -> tuple[int, int]:
        """How many gradients are bit-equal under random exponents, of how many."""
        plain, ours = wrapped(kind, self.case.model), wrapped(kind, self.case.model)
        scaler = hu.AdaptiveGradScaler(ours)
        self.loss(plain).backward()
        scaler.scale(self.loss(ours)).backward()
        ours.zero_grad()
        keys = [row.site for row in scaler.sites().rows[1:]]
        scaler.set_exponents({"global": 8, **{key: self.draw.randint(-12, 24) for key in keys}})
        scaler.scale(self.loss(ours)).backward()
        scaler.unscale_(torch.optim.SGD(ours.parameters(), lr=0.1))
        pairs = list(zip(ours.parameters(), plain.parameters(), strict=True))
        return sum(same_bits(full(mine.grad), full(theirs.grad)) for mine, theirs in pairs), len(pairs)

    def errors(self) -> list[float]:
        """The largest relative error of a gradient of float16 copies: ours, GradScaler's, not scaled."""
        true, found = wrapped("FSDP2", self.case.model), []
        (SMALL * self.loss(true)).backward()
        wanted = [full(p.grad) for p in true.parameters()]
        for make in (*scalers().values(), unscaled):
            model = wrapped(HALF, self.case.model)
            scaler, optimizer = make(model), torch.optim.SGD(model.parameters(), lr=0.0)
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(SMALL * self.loss(model)).backward()
                scaler.step(optimizer)
                scaler.update()
            pairs = [(full(p.grad), exact) for p, exact in zip(model.parameters(), wanted, strict=True)]
            found.append(max(((mine - exact).norm() / exact.norm()).item() for mine, exact in pairs))
        return found

    def overflow(self, kind: str, where: str, make) -> dict:
        """Rank 0 overflows in the fourth step: is it skipped here, is the next one taken, and what are weights then.

        In its backward pass it does so inside the model, as what the loss sends in is followed.
        """
        model, sums = wrapped(kind, self.case.model), []
        boosts = boosted([module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)][-1])
        scaler, optimizer = make(model), torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(5):
            bad = step == 3 and self.rank == 0
            optimizer.zero_grad()
            boosts[:] = [2.0**30 if bad and "backward" in where else 1.0]
            with torch.autocast("cpu", torch.float16):
                loss = self.loss(model)
            scaler.scale(loss).backward()
            if bad and "shard" in where:
                next(model.parameters()).grad.to_local().fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            sums.append(checksum(getattr(p, "_local_tensor", p).detach() for p in model.parameters()))
        return {
            "skipped": sums[3] == sums[2],
            "next": sums[4] != sums[3],
            "end": checksum(map(full, model.parameters())),
        }

    def all(self) -> dict:
        """Everything that the tables want of this model."""
        found = {
            f"{kind} {where} {name}": self.overflow(kind, where, make)
            for kind, where in CASES
            for name, make in scalers().items()
        }
        return {"overflow": found, "errors": self.errors(), **{kind: self.exact(kind) for kind in ("DDP", "FSDP2")}}


def child(rank: int, store: str) -> None:
    """One process's findings, by seed and model, as JSON on the last line."""
    torch.distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    print(json.dumps([{name: Rank(model, rank, seed).all() for name, model in MODELS.items()} for seed in SEEDS]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Threads of the group may outlive it, and then the interpreter's end is an abort.
    sys.stdout.flush()
    os._exit(0)


def in_two_processes() -> list[tuple[dict, dict]]:
    """What both ranks found, by seed."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks._ranks"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([*command, str(rank), f"{folder}/store"], **options) for rank in range(2)]
        said = [process.communicate(timeout=600)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError("a process failed; its message is above")
    return list(zip(*(json.loads(text.strip().splitlines()[-1]) for text in said)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    child(int(sys.argv[1]), sys.argv[2])
