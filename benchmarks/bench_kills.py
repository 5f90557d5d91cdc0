"""Trainings that SIGKILL ends at random moments, and their resumes: `python -m benchmarks.bench_kills [SEED]`."""

import contextlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import halfulp as hu
from halfulp.gradients import reduce_in_bfloat16

from ._results import Result, Table, save

STEPS, PATIENCE = 8, 120.0
KILLS = {1: 18, 2: 16, 4: 16}
TEXT = """A bfloat16 training of 8 steps (AdamW, split8, 8-bit states; of several gloo processes with gradients \
reduced in bfloat16 under error feedback) saves every step as docs/checkpoints.md says: all ranks write into a \
temporary folder, which is renamed when all are done. A randomly chosen rank is killed by SIGKILL, half of the time at \
a moment of the whole run, half of the time soon after a save has begun, and the others after it. A new start resumes \
from the newest whole checkpoint, and must end on every rank with the bits of the run that nobody killed."""


def save_step(folder: Path, step: int, rank: int, size: int, state: dict) -> None:
    """Save all ranks' states of a step, wholly or not at all."""
    whole, part = folder / f"step-{step}", folder / f"step-{step}.part"
    part.mkdir(parents=True, exist_ok=True)
    with open(part / f"rank-{rank}.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if size > 1:
        dist.barrier()
    if rank == 0:
        os.rename(part, whole)
        for older in folder.glob("step-*"):
            if older.name != whole.name and not older.name.endswith(".part"):
                shutil.rmtree(older)
    if size > 1:
        dist.barrier()


def load_newest(folder: Path, rank: int) -> dict | None:
    """A rank's state of the newest whole checkpoint."""
    whole = [path for path in folder.glob("step-*") if not path.name.endswith(".part")]
    if not whole:
        return None
    newest = max(whole, key=lambda path: int(path.name.removeprefix("step-")))
    state = torch.load(newest / f"rank-{rank}.pt", weights_only=True)
    assert newest.name == f"step-{state['step']}", "a checkpoint of another step"
    return state


def train(folder: Path, store: Path, rank: int, size: int, seed: int) -> None:
    """Train to the end from the newest checkpoint, and write down the bits of all weights and states."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, 8))
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    narrow = {"weight_update": "split8", "state_dtype": "8bit", "param_dtype": "bf16"}
    optimizer = hu.AdamW(model.named_parameters(), lr=1e-2, **narrow)
    outer = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    parts = {"model": model, "optimizer": optimizer}
    if size > 1:
        parts["reduction"] = reduce_in_bfloat16(outer)
    held = load_newest(folder, rank)
    for name, part in parts.items() if held else ():
        part.load_state_dict(held[name])
    for step in range(held["step"] if held else 0, STEPS):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed + size * step + rank)).bfloat16()
        optimizer.zero_grad()
        outer(x).float().square().mean().backward()
        optimizer.step()
        states = {name: part.state_dict() for name, part in parts.items()}
        save_step(folder, step + 1, rank, size, {"step": step + 1, **states})
    held = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    bits = [tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in [*model.parameters(), *held]]
    (folder / f"end-{rank}").write_text(str(zlib.crc32(b"".join(bits))))


def start(folder: Path, size: int, seed: int) -> list[int]:
    """Fork the ranks of a training; their process ids."""
    store = Path(tempfile.mkdtemp(dir=folder.parent)) / "store"
    ranks = []
    for rank in range(size):
        child = os.fork()
        if child:
            ranks.append(child)
            continue
        code = 1
        try:
            train(folder, store, rank, size, seed)
            code = 0
        except BaseException:
            (folder / f"error-{rank}").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return ranks


def end(ranks: list[int], patience: float = PATIENCE) -> list[int]:
    """Wait for all ranks; their exit codes. Who waits for a rank that is gone is killed."""
    codes: dict[int, int] = {}
    until = time.monotonic() + patience
    while len(codes) < len(ranks):
        for rank in ranks:
            if rank not in codes and (ended := os.waitpid(rank, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        if time.monotonic() > until:
            for rank in set(ranks) - codes.keys():
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[rank] for rank in ranks]


def whole_run(folder: Path, size: int, seed: int) -> list[str]:
    """Train to the end; what each rank wrote down.

    Raises:
        RuntimeError: a rank failed, with what it said.
    """
    if any(end(start(folder, size, seed))):
        raise RuntimeError("\n".join(path.read_text() for path in sorted(folder.glob("error-*"))) or "a rank waited")
    return [(folder / f"end-{rank}").read_text() for rank in range(size)]


@dataclass
class Kill:
    """One kill: after how many whole steps, whether inside a save, and whether the resume had the same bits."""

    step: int
    in_save: bool
    same: bool


def kill_and_resume(folder: Path, size: int, seed: int, draw: random.Random, length: float, wanted: list[str]) -> Kill:
    """Start a training, kill it, resume it."""
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        ranks, victim, after_save = start(folder, size, seed), draw.randrange(size), draw.random() < 0.5
        if after_save:
            begun = folder / f"step-{draw.randint(1, STEPS)}.part"
            until = time.monotonic() + PATIENCE
            while not begun.exists() and not (folder / "end-0").exists() and time.monotonic() < until:
                pass
            time.sleep(draw.random() * 2e-3)
        else:
            time.sleep(draw.random() * length)
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[victim], signal.SIGKILL)
        codes = end(ranks, patience=0.05 if size > 1 else PATIENCE)
        if codes[victim] == -signal.SIGKILL:
            break  # else it had ended before
    steps = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    done = max((int(step) for step in steps if step.isdigit()), default=0)
    for path in folder.glob("end-*"):
        path.unlink()
    for path in folder.glob("error-*"):
        path.unlink()
    in_save = any(step.endswith(".part") for step in steps)
    return Kill(done, in_save, whole_run(folder, size, seed) == wanted)


def kills(size: int, count: int, seed: int) -> list[Kill]:
    """As many kills of trainings on so many ranks."""
    # What DistributedDataParallel imports takes longer than the training: once, before the ranks are forked.
    importlib.import_module("torch._dynamo")
    importlib.import_module("llvmlite.binding")
    draw = random.Random(seed + size)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "run")
        folder.mkdir()
        whole_run(folder, size, seed)  # compiles the kernels
        shutil.rmtree(folder)
        folder.mkdir()
        begun = time.monotonic()
        wanted = whole_run(folder, size, seed)
        length = time.monotonic() - begun
        return [kill_and_resume(folder, size, seed, draw, length, wanted) for _ in range(count)]


def main() -> None:
    """Run, print and keep."""
    torch.set_num_threads(1)
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.SystemRandom().randrange(2**31)
    print(f"seed {seed}", flush=True)
    result = Result("kills", "Trainings killed and resumed", TEXT, f"python -m benchmarks.bench_kills {seed}")
    columns = ("ranks", "kills", "inside a save", "before the first checkpoint", "resumed to the same bits")
    table = Table("SIGKILL at random moments", dict.fromkeys(columns, ""), note=f"Seed {seed}.")
    for size, count in KILLS.items():
        found = kills(size, count, seed)
        table.add(
            **{
                "ranks": size,
                "kills": count,
                "inside a save": sum(one.in_save for one in found),
                "before the first checkpoint": sum(one.step == 0 for one in found),
                "resumed to the same bits": sum(one.same for one in found),
                "met": all(one.same for one in found),
            }
        )
    result.tables.append(table)
    save(result)


if __name__ == "__main__":
    main()
