"""A step beside its arithmetic, in time and memory: `python -m benchmarks.bench_overhead`."""

import argparse
import ctypes
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import _workload
from ._harness import BUSY, ROOT, Contender, in_processes, measure, set_threads
from ._results import Result, Table, save

SMALL = 64
FEW, MANY = 60, 560
PER_TENSOR, PER_DTENSOR, FIRST_STEP = 5.0, 8.0, 2.0
ROWS = ("halfulp stochastic", "halfulp split", "halfulp kahan", "halfulp split8, 8-bit states", "halfulp float32")
PEERS = (_workload.PEER, "optimi kahan, foreach", "optimi kahan, loop", "torchao stochastic")
BAR_BYTES = {"halfulp stochastic": 8, "halfulp split": 10, "halfulp kahan": 10, "halfulp split8, 8-bit states": 7.2}
TEXT = """Beside the arithmetic of a step: what one more small tensor costs (the slope between 60 and 560 tensors of \
64 elements, and the same for DTensor parameters on a mesh of one), how long the very first step takes in a fresh \
process (llvmlite's import and, with an empty cache, every compilation included; making the optimizer is timed apart, \
as torch.optim's base class then imports torch's compiler), and the memory that training state takes: counted by \
`opt.bytes_per_parameter()` (weights, companions, states, gradients) and measured as the peak of the process's \
resident memory over three steps, above what it was before the parameters were made."""


def slope(names: list[str], threads: int, distributed: bool) -> dict:
    """Microseconds per additional small tensor, row by row."""
    import torch

    set_threads(threads)
    if distributed:
        start_mesh()
    made, absent = [], {}
    for name in names:
        try:
            for count in (FEW, MANY):
                params = _workload.parameters(_workload.dtype(name), [(SMALL,)] * count)
                optimizer = _workload.make(name, params=shard(params) if distributed else params)
                optimizer.step()
                made.append(Contender(f"{name}/{count}", optimizer.step, threads=1))
        except Exception as error:  # a peer that cannot run is reported, never faked
            if name.startswith("halfulp"):
                raise
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            made = [one for one in made if not one.name.startswith(f"{name}/")]
    timings = measure(made, made[0].name, threads=1, rounds=9, window=0.01, patience=200)
    torch.set_num_threads(1)
    found = {}
    for name in names:
        if f"{name}/{MANY}" in timings:
            few, many = timings[f"{name}/{FEW}"].milliseconds, timings[f"{name}/{MANY}"].milliseconds
            found[name] = 1e3 * (many - few) / (MANY - FEW)
    return {"slope": found, "absent": absent}


def start_mesh() -> None:
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def shard(params: list) -> list:
    """The same parameters and gradients as DTensors, split along dimension 0."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, made = init_device_mesh("cpu", (1,)), []
    for weight in params:
        made.append(torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
        made[-1].grad = distribute_tensor(weight.grad, mesh, [Shard(0)])
    return made


def first(name: str) -> dict:
    """Seconds that `import halfulp` takes (torch is there), and that making an optimizer and its first step take."""
    set_threads(1)
    start = time.perf_counter()
    if name.startswith("halfulp"):
        importlib.import_module("halfulp")
    imported = time.perf_counter() - start
    params = _workload.parameters(_workload.dtype(name), [(256, 256), (256,)])
    start = time.perf_counter()
    optimizer = _workload.make(name, params=params)
    made = time.perf_counter() - start
    start, cpu = time.perf_counter(), time.process_time()
    optimizer.step()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    calm = cpu >= BUSY * wall or not name.startswith("halfulp")  # torch compiles in processes of its own
    return {"import": imported, "make": made, "step": wall, "calm": calm}


def resident(line: str) -> int:
    """Bytes of VmRSS or VmHWM."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(line):
            return int(text.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {line}")


def memory(name: str) -> dict:
    """Peak resident bytes per parameter over three steps, code and compilers loaded beforehand."""
    import gc

    trim = ctypes.CDLL("libc.so.6").malloc_trim
    set_threads(1)
    small = _workload.make(name, [(512, 512), (512,)])
    for _ in range(2):
        small.step()
    del small
    gc.collect()
    trim(0)
    base = resident("VmRSS")
    optimizer = _workload.make(name)
    trim(0)  # the float32 draws that the parameters were made from are not training state
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    for _ in range(3):
        optimizer.step()
    elements = sum(weight.numel() for weight in optimizer.param_groups[0]["params"])
    counted = optimizer.bytes_per_parameter() if hasattr(optimizer, "bytes_per_parameter") else None
    peak = (resident("VmHWM") - base) / elements
    return {"peak": peak, "counted": counted}


def fresh(arguments: list[str], environment: dict[str, str] | None = None) -> dict:
    """One fresh process of this script."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        command = [sys.executable, "-m", "benchmarks.bench_overhead", *arguments, "--json", str(path)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            text=True,
            capture_output=True,
            check=False,
        )
        if not path.exists():
            return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:160]}
        return json.loads(path.read_text())


def small_table() -> Table:
    """Slopes for plain parameters and DTensors."""
    table = Table(
        "One more small tensor of 64 elements, 1 thread",
        {"optimizer": "", "parameters": "", "us": ".2f", "range": "", "bar": "", "met": ""},
        note="Median and range over 3 fresh processes for halfulp; one process for the peers.",
    )
    for kind, limit, flags in (("plain", PER_TENSOR, []), ("DTensor", PER_DTENSOR, ["--dtensor"])):
        runs = in_processes("benchmarks.bench_overhead", ["--slope", *ROWS, *flags], 3)
        for name in ROWS:
            values = sorted(run["slope"][name] for run in runs)
            span = f"{values[0]:.2f} to {values[-1]:.2f}"
            met = values[0] <= limit
            table.add(optimizer=name, parameters=kind, us=values[1], range=span, bar=f"<= {limit}", met=met)
        others = in_processes("benchmarks.bench_overhead", ["--slope", *PEERS, *flags], 1)[0]
        for name, value in others["slope"].items():
            table.add(optimizer=name, parameters=kind, us=value)
        for name, why in others["absent"].items():
            table.add(optimizer=name, parameters=kind, range=f"cannot: {why}")
    return table


def first_table() -> Table:
    """The first step in a fresh process, with an empty and a filled cache."""
    table = Table(
        "First step in a fresh process, 1 thread, seconds",
        {
            "optimizer": "",
            "cold cache": ".2f",
            "range, cold": "",
            "warm cache": ".2f",
            "making it": ".2f",
            "dropped": "",
            "bar": "",
            "met": "",
        },
        note="Median of 5 fresh processes each. Cold: HALFULP_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR are new and empty.",
    )
    for name in (*ROWS, *PEERS):
        try:
            cold, warm, make, dropped = first_steps(name)
        except RuntimeError as error:
            table.add(optimizer=name, bar=f"cannot: {error}")
            continue
        row = {"optimizer": name, "cold cache": statistics.median(cold), "warm cache": statistics.median(warm)}
        row |= {"range, cold": f"{min(cold):.2f} to {max(cold):.2f}", "making it": make, "dropped": dropped}
        if name.startswith("halfulp"):
            row |= {"bar": f"< {FIRST_STEP:.0f}", "met": min(cold) < FIRST_STEP}
        table.add(**row)
    return table


def first_steps(name: str, wanted: int = 5, tries: int = 20) -> tuple[list[float], list[float], float, int]:
    """Seconds of undisturbed first steps, with an empty and with a filled cache, and how many runs were dropped.

    Raises:
        RuntimeError: the row cannot run here, or the machine is too busy.
    """
    cold, warm, make, dropped = [], [], float("inf"), 0
    for _ in range(tries):
        if len(cold) >= wanted and len(warm) >= wanted:
            return cold, warm, make, dropped
        with tempfile.TemporaryDirectory() as folder:
            places = {"HALFULP_CACHE_DIR": f"{folder}/a", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/b"}
            for kept in (cold, warm):
                found = fresh(["--first", name], places)
                if "error" in found:
                    raise RuntimeError(found["error"])
                make = min(make, found["make"])
                if found["calm"]:
                    kept.append(found["step"])
                else:
                    dropped += 1
    if min(len(cold), len(warm)) < 3:
        raise RuntimeError(f"{dropped} of {2 * tries} runs were disturbed")
    return cold, warm, make, dropped


def memory_table() -> Table:
    """Bytes per parameter, counted and measured."""
    table = Table(
        "Bytes per parameter, gradient included",
        {"optimizer": "", "counted": ".2f", "peak measured": ".2f", "bar": "", "met": ""},
        note="20.8M parameters; peak resident memory of a fresh process over three steps, above its start.",
    )
    for name in (*_workload.OURS, *_workload.peers()):
        found = fresh(["--memory", name], {"MALLOC_MMAP_THRESHOLD_": "1048576"})
        if "error" in found:
            table.add(optimizer=name, bar=f"cannot: {found['error']}")
            continue
        row = {"optimizer": name, "counted": found["counted"], "peak measured": found["peak"]}
        if name in BAR_BYTES:
            row |= {"bar": f"<= {BAR_BYTES[name]} (+0.1)", "met": found["peak"] <= BAR_BYTES[name] + 0.1}
        table.add(**row)
    return table


def main() -> None:
    """Everything, or one process's part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slope", nargs="+", metavar="ROW")
    parser.add_argument("--dtensor", action="store_true")
    parser.add_argument("--first", metavar="ROW")
    parser.add_argument("--memory", metavar="ROW")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found = None
    if chosen.slope:
        found = slope(chosen.slope, 1, chosen.dtensor)
    elif chosen.first:
        found = first(chosen.first)
    elif chosen.memory:
        found = memory(chosen.memory)
    if found is None:
        tables = [small_table(), first_table(), memory_table()]
        command = "python -m benchmarks.bench_overhead"
        save(Result("overhead", "AdamW: overhead and memory", TEXT, command, tables=tables))
    elif chosen.json:
        chosen.json.write_text(json.dumps(found))
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
