"""What a call costs whatever its size, and a kernel in cache: `python -m benchmarks.bench_fixed_costs`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ._harness import ROOT, Contender, in_processes, measure, set_threads
from ._results import Result, Table, save

KERNELS = {
    "nearest": ("nearest", None), "stochastic": ("stochastic", None), "split": ("split", None),
    "split8": ("split8", None), "kahan": ("kahan", None), "split8, 8-bit states": ("split8", "8bit"),
}  # fmt: skip
IN_CACHE = 4096 * 32
TRIES = 400
STEPS = 1_030  # before a step is timed
TEXT = """What does not grow with the size, one thread. *Small calls*: ratios of CPU time in turns, the median over \
processes of the median of undisturbed rounds; optimizers have made 1,030 steps before, so that none of the timed ones \
looks for averages in the process, which takes 0.8 ms each time that the steps have doubled. *Kernels in cache*: the \
AdamW kernel alone over 131,072 bfloat16 weights, which stay in the second-level cache, the fastest of 400 calls, per \
element: an absolute time, since it is what the processor's arithmetic allows; it holds for the processor named below. \
*First step*: wall time of the first step of a fresh process (Kahan, one tensor of 262,144), after imports and \
construction, with an empty and with a full kernel cache, the fastest of the processes."""
FIRST = """
import time, torch, halfulp as hu
torch.set_num_threads(1)
p = torch.nn.Parameter(torch.randn(64, 4096).bfloat16()); p.grad = torch.randn(64, 4096).bfloat16()
o = hu.optim.AdamW([p], lr=1e-3, weight_update="kahan")
start = time.perf_counter(); o.step(); print(time.perf_counter() - start)
"""


def steps(count: int) -> list[Contender]:
    """A split8 step over so many tensors of 8 elements, and torch's fused float32 step over as many."""
    import torch

    import halfulp as hu

    def make(optimizer: type, dtype, **options) -> Callable:
        parameters = [torch.nn.Parameter(torch.randn(8).to(dtype)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn(8).to(dtype)
        step = optimizer(parameters, lr=1e-3, **options).step
        for _ in range(STEPS):
            step()
        return step

    return [
        Contender("peer", make(torch.optim.AdamW, torch.float32, fused=True)),
        Contender("halfulp", make(hu.optim.AdamW, torch.bfloat16, weight_update="split8")),
    ]


def bare(value):
    """A tensor in the least wrapper subclass that dispatches: unwrap, call, wrap."""
    import torch

    class Bare(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return Bare(function(*[x.inner if isinstance(x, Bare) else x for x in args], **(kwargs or {})))

    return Bare(value)


def small(family: str, operation: str) -> list[Contender]:
    """An operation on 4 x 4 tensors of one of the two classes, beside the same on a bare wrapper subclass."""
    import torch

    import halfulp as hu

    def encode(x):
        if family == "ScaledTensor":
            return hu.ScaledTensor.encode(x, torch.float16)
        return hu.MCTensor.encode(x, components=2, dtype=torch.float32)

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    call = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b, "view": lambda a, b: a.view(16)}[operation]
    p, q, a, b = bare(x), bare(y), encode(x), encode(y)
    return [Contender("peer", lambda: call(p, q)), Contender("halfulp", lambda: call(a, b))]


def quantizing(elements: int) -> list[Contender]:
    """`hu.quantize` to e4m3fn beside a copy."""
    import torch

    import halfulp as hu

    x, y = torch.randn(elements), torch.empty(elements)
    return [
        Contender("peer", lambda: y.copy_(x)),
        Contender("halfulp", lambda: hu.quantize(x, hu.formats.e4m3fn, out=y)),
    ]


def of_256(dtype: str, components: int, operation: str) -> list[Contender]:
    """An operation on 256 x 256 MCTensors beside the same on plain tensors of their dtype, and of float32."""
    import torch

    import halfulp as hu

    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(0)
    x, y = (torch.randn(256, 256, dtype=torch.float64, generator=generator) for _ in range(2))
    (a, b), (p, q), (s, t) = (
        [make(value) for value in (x, y)]
        for make in (lambda v: hu.MCTensor.encode(v, components, kind), lambda v: v.to(kind), lambda v: v.float())
    )
    call = getattr(torch, operation)
    return [
        Contender("peer", lambda: call(p, q)),
        Contender("halfulp", lambda: call(a, b)),
        Contender("float32", lambda: call(s, t)),
    ]


WHOLE = [
    (dtype, components, operation)
    for dtype, components in (("float32", 2), ("bfloat16", 2), ("bfloat16", 3), ("float16", 2), ("float64", 2))
    for operation in ("add", "mul")
]
CASES: dict[str, tuple[Callable[[], list[Contender]], str]] = {
    "AdamW split8 step, 1 tensor of 8": (lambda: steps(1), "torch fused float32"),
    "AdamW split8 step, 101 tensors of 8": (lambda: steps(101), "torch fused float32"),
    **{
        f"{family} 4 x 4 {operation}": ((lambda f=family, o=operation: small(f, o)), "bare wrapper subclass")
        for family in ("ScaledTensor", "MCTensor")
        for operation in ("add", "mul", "view")
    },
    "hu.quantize to e4m3fn, 1,000": (lambda: quantizing(1_000), "y.copy_(x)"),
    "hu.quantize to e4m3fn, 100,000": (lambda: quantizing(100_000), "y.copy_(x)"),
}


def nanoseconds(update: str, states: str | None) -> float:
    """The kernel of one AdamW step alone, per element."""
    import torch

    import halfulp as hu
    from halfulp.optim.step import _run

    run_chunks, best = _run.run_chunks, float("inf")

    def timed(kernel, lengths, *rest) -> None:
        """Run and time a kernel as long as what it is given the addresses of lives."""
        nonlocal best
        for _ in range(TRIES):
            start = time.perf_counter()
            kernel(0, len(lengths), *rest)
            best = min(best, time.perf_counter() - start)

    _run.run_chunks = timed
    try:
        parameter = torch.nn.Parameter(torch.randn(IN_CACHE // 4096, 4096).bfloat16())
        parameter.grad = (torch.randn(IN_CACHE // 4096, 4096) * 1e-2).bfloat16()
        options = {} if states is None else {"state_dtype": states}
        optimizer = hu.optim.AdamW([parameter], lr=1e-3, weight_update=update, report_interval=0, **options)
        optimizer.step(), optimizer.step()
    finally:
        _run.run_chunks = run_chunks
    return 1e9 * best / IN_CACHE


def first_steps(processes: int) -> dict[str, float]:
    """Seconds of the first step with an empty and with a full kernel cache, the fastest of the processes."""

    def seconds(folder: str) -> float:
        given = {**os.environ, "HALFULP_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", FIRST]
        done = subprocess.run(command, cwd=ROOT, env=given, text=True, capture_output=True, check=True)
        return float(done.stdout.split()[-1])

    cold, warm = [], []
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(seconds(folder))
            warm.append(seconds(folder))
    return {"empty": min(cold), "full": min(warm)}


def one() -> dict:
    """One process's measurements."""
    set_threads(1)
    found: dict = {"calls": {}, "whole": {}, "kernels": {}}
    for name, (make, _) in CASES.items():
        timings = measure(make(), "peer", threads=1, rounds=9, window=0.01, patience=60)
        found["calls"][name] = {key: timing.to_dict() for key, timing in timings.items()}
    for chosen in WHOLE:
        timings = measure(of_256(*chosen), "peer", threads=1, rounds=9, window=0.01, patience=60)
        found["whole"][" ".join(map(str, chosen))] = {key: timing.to_dict() for key, timing in timings.items()}
    for name, chosen in KERNELS.items():
        found["kernels"][name] = nanoseconds(*chosen)
    return found


def main() -> None:
    """Everything, or one process's part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="measure calls and kernels in this process")
    parser.add_argument("--json", type=Path, help="where --one writes")
    chosen = parser.parse_args()
    if chosen.one:
        found = one()
        (chosen.json.write_text if chosen.json else print)(json.dumps(found, indent=1))
        return
    runs = in_processes("benchmarks.bench_fixed_costs", ["--one"], chosen.processes)
    columns = {"call": "", "against": "", "ratio": ".1f", "range": "", "us": ".1f", "peer us": ".1f", "dropped": ""}
    calls = Table("Small calls", columns, note=f"{chosen.processes} fresh processes; CPU time of one thread.")
    for name, (_, against) in CASES.items():
        rows = sorted((run["calls"][name] for run in runs), key=lambda row: row["halfulp"]["ratio"])
        ratios = [row["halfulp"]["ratio"] for row in rows]
        middle = rows[len(rows) // 2]
        calls.add(
            call=name,
            against=against,
            ratio=middle["halfulp"]["ratio"],
            range=f"{ratios[0]:.1f} to {ratios[-1]:.1f}",
            us=1e3 * middle["halfulp"]["milliseconds"],
            **{"peer us": 1e3 * middle["peer"]["milliseconds"]},
            dropped=sum(row["halfulp"]["dropped"] for row in rows),
        )
    columns = {"components": "", "operation": "", "x plain": ".1f", "range": "", "x float32": ".1f", "us": ".1f"}
    bound = (
        "Against torch on plain tensors of the components' dtype, through the whole interface; n is the bytes' bound."
    )
    sizes = Table("MCTensor 256 x 256 of n components", columns, note=bound)
    for dtype, components, operation in WHOLE:
        rows = [run["whole"][f"{dtype} {components} {operation}"] for run in runs]
        rows.sort(key=lambda row: row["halfulp"]["ratio"])
        ratios, middle = [row["halfulp"]["ratio"] for row in rows], rows[len(rows) // 2]
        sizes.add(
            components=f"{components} {dtype}",
            operation=operation,
            range=f"{ratios[0]:.1f} to {ratios[-1]:.1f}",
            us=1e3 * middle["halfulp"]["milliseconds"],
            **{"x plain": ratios[len(rows) // 2]},
            **{"x float32": middle["halfulp"]["milliseconds"] / middle["float32"]["milliseconds"]},
        )
    kernels = Table("Kernels of an AdamW step in cache", {"weight update": "", "ns per element": ".2f", "range": ""})
    for name in KERNELS:
        times = sorted(run["kernels"][name] for run in runs)
        spread = f"{times[0]:.2f} to {times[-1]:.2f}"
        kernels.add(**{"weight update": name, "ns per element": times[0], "range": spread})
    first = Table("First step of a fresh process", {"kernel cache": "", "seconds": ".2f"})
    for name, seconds in first_steps(chosen.processes).items():
        first.add(**{"kernel cache": name, "seconds": seconds})
    command = "python -m benchmarks.bench_fixed_costs"
    save(
        Result(
            "fixed_costs", "What a call costs whatever its size", TEXT, command, tables=[calls, sizes, kernels, first]
        )
    )


if __name__ == "__main__":
    main()
