"""What exponents per gradient cost a step: `python -m benchmarks.bench_gradient_overhead`."""

import argparse
import json
import statistics
import subprocess
import sys

from ._harness import ROOT, Contender, measure
from ._results import Result, Table, save

TEXT = """Forward and backward of one batch in float32 on one thread, as a multiple of the same without a scaler, \
eager or compiled by Inductor; every site has another exponent, so that every edge multiplies. Statistics: what a \
measured iteration costs more, over the 16 iterations that share it. Each figure is the median over processes; the \
range is over them."""
# Width, layers, rows of a batch.
CASES = {"GPT": (256, 4, 8), "perceptron": (256, 12, 1024), "perceptron, wide": (1024, 6, 1024)}
INTERVAL = 16


def workload(case: str):
    """A model and a function from it to its loss."""
    import torch
    from torch import nn

    from halfulp.trials.tasks._gpt import GPT

    torch.manual_seed(0)
    width, layers, rows = CASES[case]
    if case.startswith("GPT"):
        ids = torch.randint(0, 64, (rows, 129))
        model = GPT(64, width=width, layers=layers, heads=width // 64, time=128)
        return model, lambda made: nn.functional.cross_entropy(made(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    inputs = torch.randn(rows, width)
    return nn.Sequential(*parts), lambda made: made(inputs).square().mean()


def contenders(case: str, compiled: bool) -> list[Contender]:
    """The plain step, ours, and ours in a measured iteration."""
    import copy
    import random

    import torch

    import halfulp as hu

    model, loss_of = workload(case)
    other = copy.deepcopy(model)
    scaler = hu.AdaptiveGradScaler(other, interval=10**9)
    plain, ours = model, other
    if compiled:
        plain = torch.compile(model, backend="inductor")
        ours = torch.compile(other, backend=scaler.backend("inductor"))
    backward = scaler._controller.backward

    def step(made, scale, measuring=False):
        backward.measuring = measuring
        model.zero_grad()
        other.zero_grad()
        scale(loss_of(made)).backward()
        backward.measurements.read([])
        backward.renew()
        scaler._controller.losses.clear()

    step(ours, scaler.scale)
    keys = [row.site for row in scaler.sites().rows]
    draw = random.Random(0)
    scaler.set_exponents({key: draw.randint(-12, 24) for key in keys})
    return [
        Contender("plain", lambda: step(plain, lambda loss: loss)),
        Contender("exponents", lambda: step(ours, scaler.scale)),
        Contender("exponents, measured", lambda: step(ours, scaler.scale, True)),
    ]


def child(case: str, compiled: bool) -> None:
    """One process's figures, as JSON on the last line."""
    import torch

    torch.set_num_threads(1)
    found = measure(contenders(case, compiled), "plain", threads=1, rounds=9, window=0.2, patience=150)
    print(json.dumps({name: timing.to_dict() for name, timing in found.items()}))


def spread(case: str, compiled: bool, processes: int) -> dict:
    """The figures of several fresh processes."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bench_gradient_overhead", "--child", case]
    command += ["--compiled"] if compiled else []
    runs = []
    for _ in range(processes):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    steps = [run["exponents"]["ratio"] for run in runs]
    extra = [(run["exponents, measured"]["ratio"] - run["exponents"]["ratio"]) / INTERVAL for run in runs]
    return {
        "model": case,
        "width": CASES[case][0],
        "engine": "Inductor" if compiled else "eager",
        "plain, ms": statistics.median(run["plain"]["milliseconds"] for run in runs),
        "step": statistics.median(steps),
        "range": f"{min(steps):.3f} to {max(steps):.3f}",
        "statistics": statistics.median(extra),
        "dropped": sum(timing["dropped"] for run in runs for timing in run.values()),
    }


def main() -> None:
    """Every case, eager and compiled, with its bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=CASES)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--processes", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen.child, chosen.compiled)
        return
    columns = {"model": "", "width": "", "engine": "", "plain, ms": ".1f", "step": ".3f", "range": ""}
    table = Table(
        "A step with exponents over one without", columns | {"statistics": "+.2%", "dropped": "", "bar": "", "met": ""}
    )
    for compiled in (False, True):
        for case in CASES:
            line = spread(case, compiled, chosen.processes)
            bar = 1.03 if compiled else 1.05 if line["width"] >= 1024 else 1.10
            met = line["step"] <= bar and line["statistics"] <= 0.01
            table.add(**line, bar=f"step <= {bar:.2f}, statistics <= 1%", met=met)
            print(line, flush=True)
    result = Result(
        "gradient_overhead", "The cost of gradient exponents", TEXT, "python -m benchmarks.bench_gradient_overhead"
    )
    result.tables.append(table)
    save(result)


if __name__ == "__main__":
    main()
