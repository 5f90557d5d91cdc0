"""The device: what it is, what it lacks, and how fast it copies."""

from __future__ import annotations

from . import _timers
from ._run import PACKAGES, Run

# What halfulp cannot be imported without; the others cost a part or a test.
NEEDED = ("torch", "numpy", "safetensors", "lazy_loader", "filelock")


def measure(run: Run) -> None:
    """Facts, missing packages, bandwidth."""
    table = run.table("Device", {"what": "", "value": "", "met": ""})
    for name in ("device", *PACKAGES):
        missing = run.facts[name] == "missing" and name in NEEDED
        run.add(table, what=name, value=run.facts[name], met=False if missing else None)
        if missing:
            run.fail(name, "halfulp cannot be imported without it: put its wheel on PYTHONPATH")
    run.attempt("copy bandwidth", lambda: _bandwidth(run, table))
    run.attempt("kernels", lambda: _engine(run, table))
    if run.on_gpu:
        run.attempt("formats", lambda: _units(run, table))


def _bandwidth(run: Run, table) -> None:
    size = "64 KiB" if run.tiny else "1 GiB"
    value = f"{_timers.copy_bandwidth(run) / 1e9:.0f} GB/s, read and written"
    run.add(table, what=f"copy of {size}", value=value)


def _engine(run: Run, table) -> None:
    import halfulp as hu

    run.add(table, what="halfulp", value=hu.__version__)
    run.add(table, what="engine of steps", value=hu.kernels.select_engine(run.device))


def _units(run: Run, table) -> None:
    import torch

    from halfulp.scaled import eight_bit_engine

    run.add(table, what="bfloat16 in hardware", value="yes" if torch.cuda.is_bf16_supported(False) else "no: emulated")
    run.add(table, what="eight-bit products", value=eight_bit_engine("cuda"))
    free, total = torch.cuda.mem_get_info()
    run.add(table, what="free memory", value=f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB")
