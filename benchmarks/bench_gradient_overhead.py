"""What exponents per gradient cost a step: `python -m benchmarks.bench_gradient_overhead`."""

import argparse
import copy
import fnmatch
import json
import random
import statistics
import subprocess
import sys

import torch

import halfulp as hu
from halfulp.gradients.eager._replay import count_replays

from ._harness import ROOT, Contender, measure
from ._overhead_models import CASES, workload
from ._results import Result, Table, machine, save

TEXT = """Forward and backward of one batch in float32 on one thread, as a multiple of the same without a scaler, \
eager or compiled by Inductor; every site has another exponent, so that every edge multiplies. In eager mode all \
exponents follow the loss, as in a training in float16, and the graph of the forward pass is known, as it is after a \
training's first iterations; it is checked that this is so. Statistics: what a measured iteration \
costs more, over the 16 iterations that share it. Each figure is the median over processes; the range is over them."""
INTERVAL = 16
BARS = {(name, "eager"): case.bar for name, case in CASES.items()}
BARS |= {(name, "Inductor"): case.compiled for name, case in CASES.items() if case.compiled is not None}
# So many iterations are enough for a graph to be known.
KNOWN = 8


def contenders(case: str, compiled: bool, **sizes: int) -> list[Contender]:
    """The plain step, ours, and ours in a measured iteration; ``sizes`` replace the case's.

    Raises:
        RuntimeError: forward passes do not go without a region, which is the path that a training takes.
    """
    model, loss_of = workload(CASES[case], **sizes)
    other = copy.deepcopy(model)
    scaler = hu.AdaptiveGradScaler(other, interval=10**9)
    plain, ours = model, other
    if compiled:
        plain = torch.compile(model, backend="inductor")
        ours = torch.compile(other, backend=scaler.backend("inductor"))
    controller = scaler._controller

    def plain_step() -> None:
        model.zero_grad()
        loss_of(plain).backward()

    def step(measuring: bool = False) -> None:
        controller.backward.is_measuring = measuring
        other.zero_grad()
        scaler.scale(loss_of(ours)).backward()
        controller.backward.measurements.read_flags_and_measurements([])
        controller.backward.end_iteration()
        controller.losses.clear()

    step()
    keys = [row.site for row in scaler.sites().rows]
    draw = random.Random(0)
    scaler.set_exponents({key: draw.randint(-12, 24) for key in keys})
    if not compiled:
        # Gradients that are measured in a narrow format set this: from then on exponents follow the loss.
        controller.sites.set_reference_binade(0)
        for _ in range(KNOWN):
            step()
        before = count_replays(scaler)
        step()
        if count_replays(scaler) == before:
            raise RuntimeError(f"{case}: a forward pass of a known graph ran in a region, unlike a training's")
    return [
        Contender("plain", plain_step),
        Contender("exponents", step),
        Contender("exponents, measured", lambda: step(measuring=True)),
    ]


def child(case: str, compiled: bool) -> None:
    """One process's figures, as JSON on the last line."""
    torch.set_num_threads(1)
    found = measure(contenders(case, compiled), "plain", threads=1, rounds=9, window=0.2, patience=150)
    print(json.dumps({name: timing.to_dict() for name, timing in found.items()}))


def spread(case: str, engine: str, processes: int) -> dict:
    """The figures of several fresh processes."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bench_gradient_overhead", "--child", case]
    command += ["--compiled"] if engine == "Inductor" else []
    runs = []
    for _ in range(processes):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    steps = [run["exponents"]["ratio"] for run in runs]
    extra = [(run["exponents, measured"]["ratio"] - run["exponents"]["ratio"]) / INTERVAL for run in runs]
    return {
        "model": case,
        "width": CASES[case].sizes["width"],
        "engine": engine,
        "plain, ms": statistics.median(run["plain"]["milliseconds"] for run in runs),
        "step": statistics.median(steps),
        "range": f"{min(steps):.3f} to {max(steps):.3f}",
        "statistics": statistics.median(extra),
        "processes": processes,
        "dropped": sum(timing["dropped"] for run in runs for timing in run.values()),
        "commit": machine()["commit"],
    }


def judged(line: dict, bar: float, most: float | None) -> dict:
    """A line with its bars: of a step, and of what statistics add to it."""
    words, met = f"step <= {bar:.2f}", line["step"] <= bar
    if most is not None:
        words, met = f"{words}, statistics <= {most:.0%}", met and line["statistics"] <= most
    return {**line, "bar": words, "met": met}


def table_of(lines: dict[tuple[str, str], dict]) -> Table:
    """The lines in the order of the cases."""
    columns = {"model": "", "width": "", "engine": "", "plain, ms": ".1f", "step": ".3f", "range": ""}
    columns |= {"statistics": "+.2%", "processes": "", "dropped": "", "commit": "", "bar": "", "met": ""}
    rows = [lines[row] for row in BARS if row in lines]
    return Table("A step with exponents over one without", columns, rows)


def main() -> None:
    """The chosen rows; the others stay as the file has them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=CASES)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of model/engine")
    parser.add_argument("--processes", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen.child, chosen.compiled)
        return
    result = Result(
        "gradient_overhead", "The cost of gradient exponents", TEXT, "python -m benchmarks.bench_gradient_overhead"
    )
    lines = result.earlier_rows("model", "engine")
    failed = []
    for row, bar in BARS.items():
        if not any(fnmatch.fnmatch("/".join(row), pattern) for pattern in chosen.only):
            continue
        try:
            lines[row] = judged(spread(*row, chosen.processes), bar, CASES[row[0]].statistics)
        except RuntimeError as error:
            failed.append("/".join(row))
            print(error, flush=True)
            continue
        result.tables = [table_of(lines)]
        save(result)
    if failed:
        raise SystemExit(f"not measured, and as they were in the file: {', '.join(failed)}")


if __name__ == "__main__":
    main()
