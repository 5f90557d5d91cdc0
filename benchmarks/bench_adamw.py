"""An AdamW step on 20.8M parameters beside torch's and the peers': `python -m benchmarks.bench_adamw`."""

import argparse
import json
from pathlib import Path

from . import _workload, peers
from ._harness import Contender, in_processes, measure, over_processes, set_threads
from ._results import Result, Table, load, save

BARS = {
    ("halfulp stochastic", 1): 1.05,
    ("halfulp split", 1): 1.15,
    ("halfulp kahan", 1): 1.5,
    ("halfulp stochastic", 2): 1.0,
    ("halfulp split", 2): 1.05,
    ("halfulp kahan", 2): 1.4,
}
SLOW = ("torch foreach float32", "torchao stochastic", "heavyball stochastic")
TEXT = """One AdamW step on 20.8M parameters in 60 tensors (10 layers of {3d x d, d x d, 4d x d, d x 4d, d, d}, \
d = 416), gradients given, against `torch.optim.AdamW(fused=True)` on the same parameters in float32. halfulp's rows \
have bfloat16 weights and gradients; their states are bfloat16 (the second moment rounded stochastically) unless the \
row says 8-bit; the NaN guard is always in. Peers run with their own defaults for states."""


def working(optimizer) -> None:
    """Raises RuntimeError when a step leaves the largest weight as it was: nothing idle is timed."""
    weight = optimizer.param_groups[0]["params"][2]
    before = weight.detach().clone()
    for _ in range(3):
        optimizer.step()
    if weight.grad is None or (weight.detach() == before).all():
        raise RuntimeError("a step moved nothing")


def one(names: list[str], threads: int, rounds: int) -> dict:
    """One process's measurement of the named rows."""
    set_threads(threads)
    made, absent = [], {}
    for name in names:
        try:
            optimizer = _workload.make(name)
            optimizer.step()
            working(optimizer)
        except Exception as error:  # a peer that is absent or cannot run is reported, never faked
            if name.startswith(("halfulp", _workload.PEER)):
                raise
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            continue
        made.append(Contender(name, optimizer.step))
    timings = measure(made, _workload.PEER, threads=threads, rounds=rounds, window=0.03, patience=400)
    return {"timings": {name: timing.to_dict() for name, timing in timings.items()}, "absent": absent}


def gather(names: list[str], threads: int, processes: int, rounds: int) -> tuple[dict, dict]:
    """Figures over processes by row, and what was absent."""
    arguments = ["--one", *names, "--threads", str(threads), "--rounds", str(rounds)]
    runs = in_processes("benchmarks.bench_adamw", arguments, processes)
    timings = [run["timings"] for run in runs]
    return {name: over_processes(timings, name) for name in timings[0]}, runs[0]["absent"]


def title(threads: int) -> str:
    """The heading of one table."""
    return f"AdamW step, 20.8M parameters, {threads} thread{'s' * (threads > 1)}"


def table(threads: int, processes: int) -> Table:
    """All rows for one thread count; slow peers are measured apart so that they do not thin out the rounds."""
    found, absent = gather([_workload.PEER, *_workload.OURS], threads, processes, 11)
    others = [name for name in _workload.peers() if name != _workload.PEER]
    quick, gone = gather([_workload.PEER, *(name for name in others if name not in SLOW)], threads, 1, 11)
    slow, lost = gather([_workload.PEER, *SLOW], threads, 1, 7)
    absent |= gone | lost
    versions = ", ".join(f"{name} {value.split(' (')[0]}" for name, value in peers.status().items())
    made = Table(
        title(threads),
        {"optimizer": "", "x torch": ".2f", "range": "", "ms": ".1f", "bar": "", "met": "", "dropped": ""},
        note=(
            f"halfulp's rows: {processes} fresh processes, median and range of the ratio. "
            f"{versions}. Absent: {absent or 'none'}."
        ),
    )
    for name, figures in (found | {k: v for k, v in (quick | slow).items() if k != _workload.PEER}).items():
        row = {"optimizer": name, "x torch": figures["ratio"], "ms": figures["milliseconds"]}
        row["range"] = f"{figures['low']:.2f} to {figures['high']:.2f}"
        row["dropped"] = figures["dropped"]
        limit = BARS.get((name, threads))
        if limit:
            row |= {"bar": f"<= {limit}", "met": figures["low"] <= limit}
        made.add(**row)
    return made


def main() -> None:
    """Everything, or one process's part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--one", nargs="+", metavar="ROW")
    parser.add_argument("--threads", type=int, choices=[1, 2], help="only this table; the other is kept as it was")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.one:
        found = one(chosen.one, chosen.threads or 1, chosen.rounds)
        if chosen.json:
            chosen.json.write_text(json.dumps(found))
        else:
            print(json.dumps(found, indent=1))
        return
    result = Result("adamw", "AdamW: speed", TEXT, "python -m benchmarks.bench_adamw")
    old = load(result.path()).tables if chosen.threads and result.path().exists() else []
    kept = {made.title: made for made in old}
    for threads in (1, 2):
        if chosen.threads in (None, threads):
            result.tables.append(table(threads, chosen.processes))
        elif title(threads) in kept:
            result.tables.append(kept[title(threads)])
    save(result)


if __name__ == "__main__":
    main()
