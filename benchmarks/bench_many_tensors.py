"""What a step costs when a model is many small tensors: `python -m benchmarks.bench_many_tensors`."""

import argparse
import gc
import json
import time
from pathlib import Path

from ._harness import in_processes, set_threads
from ._results import Result, Table, save

COUNTS = (10, 100, 1_000, 10_000, 100_000)
ELEMENTS = 64
BAR_FIRST, BAR_COUNT = 10.0, 100_000
COLUMNS = {
    "optimizer": "", "tensors": ",d", "make s": ".2f", "first s": ".2f", "later s": ".4f", "new memory s": ".2f",
    "first us each": ".1f", "later us each": ".2f", "bar": "",
}  # fmt: skip
TEXT = f"""AdamW over 10 to 100,000 bfloat16 parameters of {ELEMENTS} elements, each count in a process of its own, \
one thread, wall time: making the optimizer, the first step (in halfulp with loading or compiling its kernel), a later \
one (the fastest of five), and the first step after every parameter has been given new memory through `.data`. \
torch.optim.AdamW on the same parameters, with foreach and without, is the control: Python's garbage collector looks \
at its states too."""
MAKERS = {
    "halfulp stochastic": {},
    "halfulp split8": {},
    "torch foreach": {"foreach": True},
    "torch loop": {"foreach": False},
}


def make(name: str, parameters: list) -> object:
    """One of the optimizers."""
    import torch

    import halfulp as hu

    if name.startswith("torch"):
        return torch.optim.AdamW(parameters, lr=1e-3, **MAKERS[name])
    return hu.optim.AdamW(parameters, lr=1e-3, weight_update=name.split()[1], report_interval=0)


def run(name: str, count: int) -> dict:
    """The times of one optimizer over so many tensors."""
    import torch

    set_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.bfloat16)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    gc.collect()

    def seconds(action) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    made: list = []
    found = {"make s": seconds(lambda: made.append(make(name, parameters)))}
    found["first s"] = seconds(made[0].step)
    found["later s"] = min(seconds(made[0].step) for _ in range(5))
    for parameter in parameters:
        parameter.data = parameter.data.clone()
    found["new memory s"] = seconds(made[0].step)
    return found


def main() -> None:
    """Every optimizer and count in a fresh process, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=2, metavar=("NAME", "COUNT"), help="one optimizer and count, in this process")
    parser.add_argument("--json", type=Path, help="where --run writes")
    parser.add_argument("--counts", nargs="*", type=int, default=list(COUNTS))
    chosen = parser.parse_args()
    if chosen.run:
        found = run(chosen.run[0], int(chosen.run[1]))
        (chosen.json.write_text if chosen.json else print)(json.dumps(found))
        return
    table = Table("Seconds of a step, by the number of tensors", COLUMNS)
    for name in MAKERS:
        for count in chosen.counts:
            found = in_processes("benchmarks.bench_many_tensors", ["--run", name, str(count)], 1)[0]
            barred = name.startswith("halfulp") and count == BAR_COUNT
            table.add(
                optimizer=name,
                tensors=count,
                **found,
                **{f"{key} us each": 1e6 * found[f"{key} s"] / count for key in ("first", "later")},
                bar=f"first step under {BAR_FIRST:.0f} s" if barred else "",
                met=found["first s"] < BAR_FIRST if barred else None,
            )
    save(Result("many_tensors", "Many small tensors", TEXT, "python -m benchmarks.bench_many_tensors", tables=[table]))


if __name__ == "__main__":
    main()
