"""What observing costs a training step: `python -m benchmarks.bench_observe`."""

import argparse
import copy
import time
import warnings

import torch
from torch import nn

import halfulp as hu
from halfulp.trials.tasks._digits import make_digits_network
from halfulp.trials.tasks._text import GPT, TransformerBlock, init_weights

from ._harness import Contender, Timing, measure, set_threads
from ._overhead_models import Workload
from ._results import Result, Table, save

TEXT = """A training step in float32 on one thread (forward, backward, optimizer) as a multiple of the same step, \
unobserved. At interval=1 every step is sampled. At interval=50 the figure is made of a sampled step and 49 others: \
(sampled + 49 not sampled) / 50, each timed by itself. Beside it, timed in the same run: torch's anomaly mode, and the \
DebugUnderflowOverflow of transformers, which both look at every step. Microseconds per tensor: what a sampled step \
costs more, over the tensors that it looks at."""
NOTE = """MB: the tensors whose exact extremes a sampled step finds, so that all of each is read. Reading alone: a \
step and one pass over so many bytes, as fast as torch sums a tensor of 64 MB; what lies in a cache is read faster. \
The rest is hooks (torch calls Python for each output and gradient), samples counted by powers of two, and a step of \
the optimizer's own class on float64 copies of them: of small tensors, most of it does not depend on their size."""
INTERVAL = 50
MOST_RATIO, MOST_SHARE, MOST_MICROSECONDS, SLOW = 1.25, 0.02, 20.0, 10.0


def digits() -> Workload:
    """The network of the task digits on a batch of 32 images."""
    inputs, targets = torch.rand(32, 64), torch.randint(10, (32,))
    return make_digits_network(), lambda made: nn.functional.cross_entropy(made(inputs), targets)


class RealMaskBlock(TransformerBlock):
    """A block whose mask is made of floating-point numbers, since DebugUnderflowOverflow takes none of booleans."""

    def _attend(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        return super()._attend(x, future != 0)


def gpt(width: int, layers: int, rows: int, time: int) -> Workload:
    """A decoder-only transformer over 64 tokens."""
    ids = torch.randint(0, 64, (rows, time + 1))
    heads = max(1, width // 64)
    model = GPT(64, width=width, layers=0, heads=heads, time=time)
    model.blocks = nn.ModuleList(RealMaskBlock(width, heads) for _ in range(layers)).apply(init_weights)
    model.future = model.future.float()
    return model, lambda made: nn.functional.cross_entropy(made(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


PEER = "DebugUnderflowOverflow"
WATCHES = ("plain", "sampled", "not sampled", "anomaly mode", PEER)
CASES = {
    "digits MLP": (digits, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
    "char-GPT": (lambda: gpt(96, 2, rows=16, time=64), lambda p: torch.optim.AdamW(p, lr=1e-4)),
    "GPT, 12 layers of width 256": (lambda: gpt(256, 12, rows=4, time=64), lambda p: torch.optim.AdamW(p, lr=1e-5)),
}


def contenders(case: str) -> tuple[list[Contender], hu.observation.Observation]:
    """The plain step, both kinds of observed steps, and two peers; each trains a copy of its own."""
    build, make = CASES[case]
    start, loss_of = build()

    def stepping(watch: str) -> tuple[Contender, hu.observation.Observation | None]:
        model = copy.deepcopy(start)
        optimizer = make(model.parameters())
        interval = {"sampled": 1, "not sampled": 10**9}.get(watch)
        seen = None if interval is None else hu.observe(model, optimizer, interval=interval).start()
        if watch == PEER:
            from transformers.debug_utils import DebugUnderflowOverflow

            DebugUnderflowOverflow(model)

        def step() -> None:
            with torch.autograd.set_detect_anomaly(watch == "anomaly mode"):
                loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return Contender(watch, step), seen

    found = {name: stepping(name) for name in WATCHES}
    seen = found["sampled"][1]
    assert seen is not None
    return [contender for contender, _ in found.values()], seen


def seconds_per_byte() -> float:
    """How long a byte takes in torch's sum over a tensor that fits no cache."""
    x, best = torch.ones(2**24), float("inf")
    for _ in range(9):
        begin = time.process_time()
        x.sum()
        best = min(best, time.process_time() - begin)
    return best / (4 * len(x))


def row_of(case: str, times: dict[str, Timing], record: hu.observation.Record) -> dict:
    """One model's figures and bars."""
    tensors = len(record.tensors)
    whole = [one for one in record.tensors.values() if one.role != "update"]
    read = sum(one.elements / one.steps * one.dtype.itemsize for one in whole)
    sampled, others = times["sampled"], times["not sampled"]
    share = (sampled.ratio + (INTERVAL - 1) * others.ratio) / INTERVAL - 1
    each = (sampled.ratio - 1) * sampled.milliseconds / sampled.ratio * 1e3 / tensors
    slow = times["plain"].milliseconds >= SLOW
    if slow:
        bar = f"interval=1 <= {MOST_RATIO}, interval=50 <= {MOST_SHARE:.0%}"
        met = sampled.ratio <= MOST_RATIO and share <= MOST_SHARE
    else:
        bar, met = f"<= {MOST_MICROSECONDS:g} us per tensor", each <= MOST_MICROSECONDS
    return {
        "model": case,
        "plain, ms": times["plain"].milliseconds,
        "interval=1": sampled.ratio,
        "range": f"{sampled.low:.2f} to {sampled.high:.2f}",
        "interval=50": share,
        "tensors": tensors,
        "us per tensor": each,
        "MB": read / 1e6,
        "reading alone": 1 + read * seconds_per_byte() / (times["plain"].milliseconds / 1e3),
        "anomaly mode": times["anomaly mode"].ratio,
        "DebugUnderflowOverflow": times[PEER].ratio,
        "dropped": sum(timing.dropped for timing in times.values()),
        "bar": bar,
        "met": met,
    }


def main() -> None:
    """All models, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--patience", type=float, default=120.0)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", "Anomaly Detection has been enabled", UserWarning)
    set_threads(1)
    torch.manual_seed(0)
    columns = {"model": "", "plain, ms": ".2f", "interval=1": ".2f", "range": "", "interval=50": "+.1%", "tensors": ""}
    columns |= {"us per tensor": ".0f", "MB": ".1f", "reading alone": ".2f"}
    columns |= {"anomaly mode": ".2f", "DebugUnderflowOverflow": ".2f", "dropped": ""}
    table = Table("A step observed over one unobserved", {**columns, "bar": "", "met": ""}, note=NOTE)
    for case in chosen.only:
        found, seen = contenders(case)
        times = measure(found, "plain", threads=1, rounds=9, window=0.1, patience=chosen.patience)
        table.add(**row_of(case, times, seen.stop().record))
    save(Result("observe", "What observing costs", TEXT, "python -m benchmarks.bench_observe", tables=[table]))


if __name__ == "__main__":
    main()
