"""`hu.audit` on pairs of checkpoints of 1 GB: time, anonymous memory, and whether exactly the planted faults are found.

`python -m benchmarks.bench_audit`; needs 2 GB of disk in the folder of temporary files.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

import halfulp as hu

from ._results import Result, Table, save

GB = 1_000_000_000
LAYERS = 24
ROUNDS = 5
MOST_SECONDS, MOST_MB = 10.0, 150.0
TEXT = """`hu.audit` on two safetensors files of 1 GB each with planted faults: a frozen matrix and a frozen norm, a \
tensor of another dtype, a NaN. Medians over five fresh processes; anonymous memory is the most above that after \
`import halfulp`, and pages of the mapped files are not in it. The bar: at most 10 s and 150 MB, exactly the planted \
faults found, and nothing else."""


def anonymous() -> float:
    """Anonymous memory of this process in MB; pages of mapped files are not counted."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def write_pair(folder: Path, dtype: torch.dtype) -> tuple[Path, Path, set[tuple[str, str]]]:
    """Write two checkpoints of 1 GB with planted faults; which (code, name) these are."""
    columns = 1024
    rows = GB // dtype.itemsize // columns // (LAYERS * 2)
    weights = {
        f"layers.{layer}.{part}.weight": torch.randn(rows, columns).to(dtype)
        for layer in range(LAYERS)
        for part in ("attention", "mlp")
    }
    weights |= {f"layers.{layer}.norm.weight": 1 + torch.rand(columns).to(dtype) for layer in range(LAYERS)}
    paths = folder / "a.safetensors", folder / "b.safetensors"
    save_file(weights, paths[0])
    frozen = ["layers.3.mlp.weight", "layers.20.norm.weight"]
    for name, value in weights.items():
        if name not in frozen:
            noise = torch.rand(value.shape).sub_(0.5).mul_(0.02)
            weights[name] = value.float().add_(noise).to(dtype)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    changed, broken = "layers.5.attention.weight", "layers.11.mlp.weight"
    weights[changed] = weights[changed].to(other)
    weights[broken][17, 5] = math.nan
    save_file(weights, paths[1])
    planted = {("weight-frozen", name) for name in frozen}
    return *paths, planted | {("dtype-changed-on-resume", changed), ("first-nonfinite", broken)}


def measure(a: Path, b: Path, threads: int) -> tuple[set[tuple[str, str]], float, float, float]:
    """Audit, and return what was found, wall and processor seconds, and the most anonymous memory above the start."""
    audit = hu.audit
    torch.set_num_threads(threads)
    start, most, done = anonymous(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    wall, busy = time.perf_counter(), time.process_time()
    found = audit(a, b)
    times = time.perf_counter() - wall, time.process_time() - busy
    done.set()
    watcher.join()
    named = {(one.code, name) for one in found.findings if one.severity != "note" for name in one.where}
    return named, *times, max(0.0, most[0] - start)


def main() -> None:
    """Measure both dtypes, each in fresh files, and keep the table."""
    torch.manual_seed(0)
    fresh = multiprocessing.get_context("spawn")
    columns = {
        "dtype": "",
        "GB of both": ".2f",
        "threads": "",
        "seconds": ".1f",
        "processor seconds": ".1f",
        "anonymous MB": ".0f",
        "planted": "",
        "found": "",
        "others": "",
        "met": "",
    }
    table = Table("Pairs of checkpoints of 1 GB", columns)
    for dtype in (torch.bfloat16, torch.float32):
        with tempfile.TemporaryDirectory() as folder:
            a, b, planted = write_pair(Path(folder), dtype)
            # What the disk still has to write is the benchmark's, and not the audit's.
            os.sync()
            threads, runs = torch.get_num_threads(), []
            for _ in range(ROUNDS):
                with ProcessPoolExecutor(1, mp_context=fresh) as pool:
                    runs.append(pool.submit(measure, a, b, threads).result())
            named = runs[0][0]
            assert all(run[0] == named for run in runs)
            seconds, busy, memory = (statistics.median(run[k] for run in runs) for k in (1, 2, 3))
            size = sum(path.stat().st_size for path in (a, b)) / GB
        row = {
            "dtype": str(dtype).removeprefix("torch."),
            "GB of both": size,
            "threads": threads,
            "seconds": seconds,
            "processor seconds": busy,
            "anonymous MB": memory,
            "planted": len(planted),
            "found": len(planted & named),
            "others": len(named - planted),
            "met": seconds <= MOST_SECONDS and memory <= MOST_MB and named == planted,
        }
        table.add(**row)
        print(row, flush=True)
    title = f"Audit of two checkpoints ({time.strftime('%Y-%m-%d')})"
    save(Result("audit", title, TEXT, "python -m benchmarks.bench_audit", tables=[table]))


if __name__ == "__main__":
    main()
