"""`hu.audit` on pairs of checkpoints of 1 GB: time, anonymous memory, and whether exactly the planted faults are found.

Run: python -m benchmarks bench_audit (or this file); needs 4 GB of disk in the folder of temporary files.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import halfulp as hu

RESULT = Path(__file__).parent / "results" / "audit.json"
GB = 1_000_000_000
LAYERS = 24
MOST_SECONDS, MOST_MB = 10.0, 150.0


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


def measure(a: Path, b: Path) -> tuple[hu.observation.Audit, float, float, float]:
    """Audit, and return wall and processor seconds and the most anonymous memory above the start, in MB."""
    start, most, done = anonymous(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    wall, busy = time.perf_counter(), time.process_time()
    found = hu.audit(a, b)
    times = time.perf_counter() - wall, time.process_time() - busy
    done.set()
    watcher.join()
    return found, *times, max(0.0, most[0] - start)


def main() -> None:
    """Measure both dtypes, print, and write the result file."""
    _ = hu.audit
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        with tempfile.TemporaryDirectory() as folder:
            a, b, planted = write_pair(Path(folder), dtype)
            found, seconds, busy, memory = measure(a, b)
            size = sum(path.stat().st_size for path in (a, b)) / GB
        named = {(one.code, name) for one in found.findings if one.severity != "note" for name in one.where}
        row = {
            "dtype": str(dtype).removeprefix("torch."),
            "gigabytes": round(size, 2),
            "threads": torch.get_num_threads(),
            "seconds": round(seconds, 2),
            "processor_seconds": round(busy, 2),
            "anonymous_mb": round(memory, 1),
            "planted": len(planted),
            "found": len(planted & named),
            "others": len(named - planted),
            "met": seconds <= MOST_SECONDS and memory <= MOST_MB and named == planted,
        }
        results.append(row)
        print(row)
    RESULT.write_text(json.dumps({"rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
