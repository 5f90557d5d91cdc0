"""Steps of scaled models against plain ones, eager and compiled: `python -m benchmarks.bench_scaled`."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ._harness import ROOT, Contender, in_processes, measure, set_threads
from ._results import Result, Table, save

TEXT = """Forward and backward pass with the loss, one thread: the model after `hu.scalify(model, dtype)` against the \
same model with plain parameters of that dtype. GPT: two blocks with fused attention, 4 x 128 tokens. MLP: \
784-1024-1024-10 with a normalisation, batch 256. Compiled by inductor, fullgraph. Compile time: the first call \
after the compiler has warmed up, caches off."""
# Plain float16 has no fast kernels on CPUs: what it is slower by would hide everything.
DTYPES = ("float32", "bfloat16")
SHAPES = ("gpt 128", "gpt 384", "mlp 1024")
EAGER_BAR, COMPILED_BARS, COMPILE_BAR = 1.5, {"gpt 128": 1.15, "gpt 384": 1.05, "mlp 1024": 1.05}, 1.5


def model_and_batch(shape: str):
    """A fresh model of float32 and a batch of its task."""
    import torch
    from torch import nn

    from halfulp.trials.tasks._text import GPT

    torch.manual_seed(0)
    kind, width = shape.split()
    if kind == "gpt":
        ids = torch.randint(0, 96, (2, 4, 128))
        return GPT(96, width=int(width), layers=2, heads=int(width) // 32, time=128, fused=True), tuple(ids)
    layers = (nn.Linear(784, 1024), nn.LayerNorm(1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(1024, 10)), (torch.randn(256, 784), torch.randint(0, 10, (256,)))


def loss(model, x, y):
    """Cross-entropy of the model's output."""
    from torch.nn import functional

    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def step(shape: str, dtype: str, scaled: bool, compiled: bool) -> Callable[[], None]:
    """A call that makes all gradients."""
    import torch

    import halfulp as hu

    model, (x, y) = model_and_batch(shape)
    storage = getattr(torch, dtype)
    x = x.to(storage) if x.is_floating_point() else x
    if scaled:
        hu.scalify(model, storage)
    else:
        model.to(storage)
    run = torch.compile(loss, fullgraph=True) if compiled else loss

    def call() -> None:
        model.zero_grad(set_to_none=True)
        run(model, x, y).backward()

    return call


def timed(shape: str, dtype: str, mode: str) -> dict:
    """One process's ratios."""
    calls = [Contender(name, step(shape, dtype, name == "scaled", mode == "compiled")) for name in ("plain", "scaled")]
    found = measure(calls, "plain", threads=1, rounds=9, window=0.1, patience=120)
    return {name: timing.to_dict() for name, timing in found.items()}


def first_call(shape: str, dtype: str, scaled: bool) -> float:
    """CPU seconds of the first compiled call, with those of the C++ compilers that it starts."""
    import os

    import torch

    torch.compile(lambda x: (x.sin() @ x).sum())(torch.randn(8, 8, requires_grad=True)).backward()
    torch._dynamo.reset()
    call = step(shape, dtype, scaled, compiled=True)
    start = os.times()
    call()
    end = os.times()
    return sum(end[:4]) - sum(start[:4])


def compile_seconds(shape: str, dtype: str, scaled: bool) -> float:
    """The same in a process of its own, in which nothing is compiled elsewhere or remembered."""
    import os

    environment = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bench_scaled", "--first", shape, dtype, str(scaled)]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=True)
    return float(done.stdout.split()[-1])


def bar_of(shape: str, dtype: str, mode: str) -> float | None:
    """The most that a scaled step may take, in plain steps; eager at width 128 has no bar."""
    if mode == "compiled":
        return COMPILED_BARS[shape]
    return None if shape == "gpt 128" else EAGER_BAR


def steps_table(shapes: list[str], dtypes: list[str], processes: int) -> Table:
    """Times of steps."""
    made = Table(
        "Scaled against plain: forward and backward, one thread",
        {"model": "", "payload": "", "mode": "", "x plain": ".2f", "low": ".2f", "high": ".2f", "ms": ".1f"}
        | {"bar": "", "met": ""},
        note=f"Median and range of {processes} fresh processes. float16 payloads (--dtypes) wait for a GPU: a CPU has "
        "no fast kernels for a plain model to compare with.",
    )
    for shape in shapes:
        for dtype in dtypes:
            for mode in ("eager", "compiled"):
                runs = in_processes("benchmarks.bench_scaled", ["--one", shape, dtype, mode], processes)
                ratios = sorted(run["scaled"]["ratio"] for run in runs)
                ms = sorted(run["scaled"]["milliseconds"] for run in runs)[len(runs) // 2]
                limit, ratio = bar_of(shape, dtype, mode), ratios[len(ratios) // 2]
                row = {"model": shape, "payload": dtype, "mode": mode, "x plain": ratio, "ms": ms}
                row |= {"low": ratios[0], "high": ratios[-1]}
                bar, met = ("", None) if limit is None else (f"<= {limit:g}", ratio <= limit)
                made.add(**row, bar=bar, met=met)
    return made


def compile_table(shapes: list[str]) -> Table:
    """Times of the first compiled call."""
    made = Table(
        "Time to compile, float32 payloads",
        {"model": "", "plain s": ".1f", "scaled s": ".1f", "x plain": ".2f", "bar": "", "met": ""},
        note="CPU seconds, C++ compilers included. What the scales add is their own arithmetic: a graph node or more "
        "per operator, and kernels of one number each.",
    )
    for shape in shapes:
        plain, scaled = (compile_seconds(shape, "float32", given) for given in (False, True))
        row = {"model": shape, "plain s": plain, "scaled s": scaled, "x plain": scaled / plain}
        made.add(**row, bar=f"<= {COMPILE_BAR:g}", met=scaled / plain <= COMPILE_BAR)
    return made


def main() -> None:
    """Everything, or one process's part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=[*DTYPES, "float16"])
    parser.add_argument("--one", nargs=3, metavar=("SHAPE", "DTYPE", "MODE"))
    parser.add_argument("--first", nargs=3, metavar=("SHAPE", "DTYPE", "SCALED"))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.one or chosen.first:
        set_threads(1)
    if chosen.first:
        shape, dtype, scaled = chosen.first
        print(first_call(shape, dtype, scaled == "True"))
        return
    if chosen.one:
        found = timed(*chosen.one)
        print(json.dumps(found, indent=1)) if not chosen.json else chosen.json.write_text(json.dumps(found))
        return
    result = Result("scaled", "Scaled tensors: what they cost", TEXT, "python -m benchmarks.bench_scaled")
    result.tables.append(steps_table(chosen.shapes, chosen.dtypes, chosen.processes))
    result.tables.append(compile_table(chosen.shapes))
    save(result)


if __name__ == "__main__":
    main()
