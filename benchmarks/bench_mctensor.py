"""MCTensor beside torch and its rivals, in time and memory: `python -m benchmarks.bench_mctensor`."""

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from . import peers
from ._harness import Contender, in_processes, measure, set_threads
from ._results import Result, Table, save

TEXT = """Operations on `hu.MCTensor` through its whole interface (dispatch included), one thread, against the same \
operation of torch on plain tensors of the same dtype (for two-bf16 and two-fp16 matmul: float32, whose units do the \
work). Beside it the published MCTensor (its repository, `MC op Tensor` where that is all it has) and torch-dd \
(two float64 only), where they can."""
ROUNDS, WINDOW = 9, 0.01
SLOW = 0.1  # seconds of a call from which on it is made once


def operands(dtype: str, n: int):
    """A plain tensor and two MCTensors of two components, n x n."""
    import torch

    import halfulp as hu

    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, n, dtype=torch.float64, generator=generator) for _ in range(2))
    low = 2.0**-60 * torch.randn(n, n, dtype=torch.float64, generator=generator)
    encode = hu.MCTensor.encode
    mine = tuple(encode(v, components=2, dtype=kind) + (low if dtype == "float64" else 0.0) for v in (x, y))
    return (x.to(kind), y.to(kind)), mine


def published(x):
    """The same in the published library's class."""
    import torch
    from MCTensor import MCTensor

    return MCTensor(*x.shape, nc=2, val=torch.stack((x, x * 2.0**-30), -1), dtype=x.dtype)


def doubled(x):
    """The same in torch-dd's class."""
    import torch_dd

    return torch_dd.tensor(x.tolist())


CASES: dict[str, tuple] = {}


def case(name: str, bar: float | None) -> Callable:
    """Lists a function that returns the contenders, the plain one first."""

    def add(make: Callable) -> Callable:
        CASES[name] = (make, bar)
        return make

    return add


def guarded(name: str, make: Callable[[], Callable], calls: list[Contender], absent: dict) -> None:
    """A peer's contender, or why there is none, or how long its one call took where that is far too long for rounds."""
    try:
        call = make()
        call()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
    except Exception as error:  # whatever a peer fails with is reported, never faked
        absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        return
    if seconds > SLOW:
        absent[name] = f"{seconds} s"
    else:
        calls.append(Contender(name, call))


def binary(op: str, dtype: str, n: int) -> Callable:
    """MC op MC."""

    def make(absent: dict) -> list[Contender]:
        import torch

        (x, y), (a, b) = operands(dtype, n)
        function = getattr(torch, op)
        calls = [Contender("torch", lambda: function(x, y)), Contender("halfulp", lambda: function(a, b))]

        def theirs() -> Callable:
            p, q = published(x), published(y)
            return {"add": lambda: p + q, "mul": lambda: p * q}[op]

        def rival() -> Callable:
            p, q = doubled(x), doubled(y)
            return lambda: function(p, q)

        guarded("MCTensor", theirs, calls, absent)
        if dtype == "float64":
            guarded("torch-dd", rival, calls, absent)
        return calls

    return make


def matmul(dtype: str, n: int, plain: str | None = None, with_tensor: bool = False) -> Callable:
    """MC @ MC, or MC @ Tensor."""

    def make(absent: dict) -> list[Contender]:
        import torch

        (x, y), (a, b) = operands(dtype, n)
        u, v = (t.to(getattr(torch, plain)) if plain else t for t in (x, y))
        right = y if with_tensor else b
        calls = [Contender("torch", lambda: u @ v), Contender("halfulp", lambda: a @ right)]
        if n <= 256:
            guarded("MCTensor", lambda: (lambda p: lambda: p @ y)(published(x)), calls, absent)
        if dtype == "float64":
            guarded("torch-dd", lambda: (lambda p, q: lambda: p @ q)(doubled(x), doubled(y)), calls, absent)
        return calls

    return make


def unary(op: str, dtype: str, n: int) -> Callable:
    """A function of one operand, positive."""

    def make(absent: dict) -> list[Contender]:
        import torch

        (x, _), (a, _) = operands(dtype, n)
        x, a = x.abs(), a.abs()
        function = getattr(torch, op)
        calls = [Contender("torch", lambda: function(x)), Contender("halfulp", lambda: function(a))]
        if op != "sum":
            guarded("MCTensor", lambda: (lambda p: lambda: function(p))(published(x)), calls, absent)
        if dtype == "float64":
            guarded("torch-dd", lambda: (lambda p: lambda: function(p))(doubled(x)), calls, absent)
        return calls

    return make


def update(dtype: str, elements: int) -> Callable:
    """w.add_(g, alpha=-lr), as an optimizer does."""

    def make(absent: dict) -> list[Contender]:
        import torch

        import halfulp as hu

        kind = getattr(torch, dtype)
        w, g = torch.randn(elements, dtype=kind), 1e-8 * torch.randn(elements, dtype=kind)
        a = hu.MCTensor.encode(w, components=2)
        calls = [
            Contender("torch", lambda: w.add_(g, alpha=-1e-3)),
            Contender("halfulp", lambda: a.add_(g, alpha=-1e-3)),
        ]
        guarded("MCTensor", lambda: (lambda p: lambda: p.add_(g, alpha=-1e-3))(published(w)), calls, absent)
        return calls

    return make


for _dtype, _at256 in (("float32", 6.0), ("float64", 4.0)):
    for _op in ("add", "mul"):
        CASES[f"{_op}, two {_dtype}, n = 256"] = (binary(_op, _dtype, 256), _at256)
        CASES[f"{_op}, two {_dtype}, n = 512"] = (binary(_op, _dtype, 512), 5.0)
    CASES[f"add_ in place, two {_dtype}, 2^18"] = (update(_dtype, 2**18), 3.5)
    CASES[f"sum, two {_dtype}, n = 256"] = (unary("sum", _dtype, 256), 12.0)
    CASES[f"sum, two {_dtype}, n = 1024"] = (unary("sum", _dtype, 1024), 12.0)
    for _op in ("exp", "log"):
        CASES[f"{_op}, two {_dtype}, n = 256"] = (unary(_op, _dtype, 256), 40.0)
for _n in (256, 512):
    CASES[f"matmul, two float32 @ float32, n = {_n}"] = (matmul("float32", _n, with_tensor=True), 2.6)
    CASES[f"matmul, two float32 @ two float32, n = {_n}"] = (matmul("float32", _n), 2.6)
    CASES[f"matmul, two bfloat16 @ two bfloat16, n = {_n}"] = (matmul("bfloat16", _n, "float32"), 1.3)
    CASES[f"matmul, two float16 @ two float16, n = {_n}"] = (matmul("float16", _n, "float32"), 1.3)
    CASES[f"matmul, two float64 @ two float64, n = {_n}"] = (matmul("float64", _n), 15.0 if _n == 256 else 18.0)


def one(names: list[str]) -> dict:
    """One process's measurement."""
    set_threads(1)
    found = {}
    for name in names:
        absent: dict[str, str] = {}
        calls = CASES[name][0](absent)
        timings = measure(calls, "torch", threads=1, rounds=ROUNDS, window=WINDOW, patience=40)
        found[name] = {"timings": {key: timing.to_dict() for key, timing in timings.items()}, "absent": absent}
    return found


def resident() -> int:
    """Bytes of resident memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_words(n: int = 1024) -> float:
    """Peak memory of one two-float64 matmul, above its operands, in words of n^2 float64."""
    _, (a, b) = operands("float64", n)
    small = operands("float64", 64)[1]
    small[0] @ small[1]
    seen, running = [resident()], True

    def watch() -> None:
        while running:
            seen.append(resident())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = resident()
    a @ b
    running = False
    watcher.join()
    return (max(seen) - before) / (8 * n * n)


def told(why: str, timings: dict) -> str:
    """The ratio of a single call, or why there is none."""
    if not why.endswith(" s"):
        return why
    return f"{1e3 * float(why[:-2]) / timings['torch']['milliseconds']:.0f} (one call)"


def table(chosen: list[str], processes: int) -> Table:
    """All cases."""
    runs = in_processes("benchmarks.bench_mctensor", ["--one", *chosen], processes)
    made = Table(
        "MCTensor: time against torch's own operation, one thread",
        {"operation": "", "x torch": ".2f", "us": ".0f", "bar": "", "met": "", "MCTensor": "", "torch-dd": ""},
        note=f"Median of {processes} fresh processes. {', '.join(f'{k} {v}' for k, v in peers.status().items())}.",
    )
    for name in chosen:
        rows = sorted((run[name] for run in runs), key=lambda row: row["timings"]["halfulp"]["ratio"])
        middle = rows[len(rows) // 2]
        timings, absent, limit = middle["timings"], middle["absent"], CASES[name][1]
        row = {
            "operation": name,
            "x torch": timings["halfulp"]["ratio"],
            "us": 1e3 * timings["halfulp"]["milliseconds"],
        }
        for peer in ("MCTensor", "torch-dd"):
            row[peer] = f"{timings[peer]['ratio']:.1f}" if peer in timings else told(absent.get(peer, ""), timings)
        made.add(**row, bar=f"<= {limit:g}", met=rows[0]["timings"]["halfulp"]["ratio"] <= limit)
    return made


def main() -> None:
    """Everything, or one process's part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--one", nargs="+", metavar="CASE")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.one or chosen.memory:
        found = {"words": peak_words()} if chosen.memory else one(chosen.one)
        print(json.dumps(found, indent=1)) if not chosen.json else chosen.json.write_text(json.dumps(found))
        return
    result = Result("mctensor", "MCTensor: speed and memory", TEXT, "python -m benchmarks.bench_mctensor")
    result.tables.append(table(list(CASES), chosen.processes))
    words = in_processes("benchmarks.bench_mctensor", ["--memory"], 1)[0]["words"]
    memory = Table(
        "Memory of one matmul, two float64 @ two float64, n = 1024",
        {"what": "", "words of n^2": ".1f", "bar": "", "met": ""},
        note="Peak resident memory above the operands; the published library takes 22 n words of n^2.",
    )
    memory.add(**{"what": "halfulp", "words of n^2": words, "bar": "<= 16", "met": words <= 16})
    result.tables.append(memory)
    save(result)


if __name__ == "__main__":
    main()
