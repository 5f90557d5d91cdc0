"""An AdamW step on 20.8M parameters beside torch's and the peers': `python -m benchmarks.bench_adamw`."""

import argparse
import json
import os
from pathlib import Path

from . import _workload, peers
from ._harness import Contender, in_processes, measure, over_processes, set_threads
from ._results import Result, Table, save
from .bench_processors import SETTINGS

# Times torch's fused float32 step, on processors with vectors of 512 bits and on others; the same on two threads.
BARS = {
    "halfulp nearest": (0.60, 0.80), "halfulp stochastic": (0.60, 0.80), "halfulp split": (0.65, 0.85),
    "halfulp split8": (0.68, 0.90), "halfulp kahan": (0.75, 1.0), "halfulp split8, 8-bit states": (1.3, 2.0),
}  # fmt: skip
BOUND = "the bytes of nearest alone"
SLOW = ("torch foreach float32", "torchao stochastic", "heavyball stochastic")
TEXT = f"""One AdamW step on 20.8M parameters in 60 tensors (10 layers of {{3d x d, d x d, 4d x d, d x 4d, d, d}}, \
d = 416), gradients given, against `torch.optim.AdamW(fused=True)` on the same parameters in float32. halfulp's rows \
have bfloat16 weights and gradients; their states are bfloat16 (the second moment rounded stochastically) unless the \
row says 8-bit; the NaN guard is always in. Peers run with their own defaults for states. *{BOUND}*: a loop that reads \
and writes what the step with rounding to nearest does, in the same order, and adds two integers."""


def working(optimizer) -> None:
    """Raises RuntimeError when a step leaves the largest weight as it was: nothing idle is timed."""
    weight = optimizer.param_groups[0]["params"][2]
    before = weight.detach().clone()
    for _ in range(3):
        optimizer.step()
    if weight.grad is None or (weight.detach() == before).all():
        raise RuntimeError("a step moved nothing")


def bytes_alone():
    """A call that reads and writes the memory of a step of bfloat16 parameters and states, without its arithmetic."""
    import numpy as np
    import torch

    from halfulp.kernels import IndexMap, make_chunk_table, run_chunks
    from halfulp.kernels._device_function import ElementTraceBuilder
    from halfulp.kernels._device_function import PointerTableFunction as Loop
    from halfulp.kernels._operations import add, load16, store16
    from halfulp.kernels.vector._machine_function import get_array_address
    from halfulp.kernels.vector._table_loop import compile_pointer_table_kernel

    element = ElementTraceBuilder(4)
    weight, gradient, *states = element.arrays
    for array in (weight, *states):
        store16(array, element.index, add(load16(array, element.index), load16(gradient, element.index)))
    kernel = compile_pointer_table_kernel("bytes_alone", Loop(element.trace, 4))
    held = [(p, p.grad, torch.zeros_like(p), torch.zeros_like(p)) for p in _workload.parameters(torch.bfloat16)]
    chunks = make_chunk_table([IndexMap.whole(tuple(row[0].shape)) for row in held])
    pointers = np.array([[tensor.data_ptr() for tensor in row] for row in held], np.int64)
    lengths, given = chunks[:, 2], (get_array_address(chunks), get_array_address(pointers))

    def call(kept=(held, chunks, pointers)) -> None:
        run_chunks(kernel, lengths, *given, *[0] * 4)

    return call


def one(names: list[str], threads: int, rounds: int) -> dict:
    """One process's measurement of the named rows."""
    set_threads(threads)
    made, absent = [], {}
    for name in names:
        if name == BOUND:
            made.append(Contender(name, bytes_alone()))
            continue
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


def table(threads: int, processes: int, old: Table | None = None) -> Table:
    """All rows for one thread count; slow peers are measured apart so that they do not thin out the rounds.

    Where there is an old table, only the rows with a bar and the bound are measured, and its peers' rows stay.
    """
    from halfulp.kernels.vector._processor import has_cpu_features

    rows = _workload.OURS if old is None else BARS
    found, absent = gather([_workload.PEER, BOUND, *rows], threads, processes, 11)
    quick, slow = {}, {}
    if old is None:
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
        if name in BARS:
            limit = BARS[name][not has_cpu_features("avx512f")]
            row |= {"bar": f"<= {limit}", "met": figures["ratio"] <= limit}
        made.add(**row)
    made.rows += [row for row in old.rows if row["optimizer"] not in found] if old else []
    return made


def main() -> None:
    """Everything, or one process's part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--one", nargs="+", metavar="ROW")
    parser.add_argument("--threads", type=int, choices=[1, 2], help="only this table; the other is kept as it was")
    parser.add_argument(
        "--bars", action="store_true", help="only the rows with a bar; the others are kept as they were"
    )
    parser.add_argument("--avx2", action="store_true", help="halfulp and torch on vectors of 256 bits alone")
    parser.add_argument(
        "--beside", metavar="PROCESSOR", help="save as a result of its own, beside those of other processors"
    )
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.avx2:
        os.environ |= SETTINGS["no AVX-512"]
    if chosen.one:
        found = one(chosen.one, chosen.threads or 1, chosen.rounds)
        if chosen.json:
            chosen.json.write_text(json.dumps(found))
        else:
            print(json.dumps(found, indent=1))
        return
    name, words, option = ("adamw_avx2", " on AVX2", " --avx2") if chosen.avx2 else ("adamw", "", "")
    if chosen.beside:
        slug = chosen.beside.lower().replace(" ", "")
        name, words, option = f"{name}_{slug}", f"{words} on {chosen.beside}", f"{option} --beside '{chosen.beside}'"
    result = Result(name, f"AdamW: speed{words}", TEXT, f"python -m benchmarks.bench_adamw{option}")
    kept = {made.title: made for made in result.earlier_tables() if chosen.threads or chosen.bars}
    for threads in (1, 2):
        if chosen.threads in (None, threads):
            old = kept.get(title(threads), Table(title(threads), {})) if chosen.bars else None
            result.tables.append(table(threads, chosen.processes, old))
        elif title(threads) in kept:
            result.tables.append(kept[title(threads)])
    save(result)


if __name__ == "__main__":
    main()
