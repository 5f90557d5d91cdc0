"""Time of `quantize` on the device: its share of copy bandwidth, beside torch's own casts, and what one call costs."""

from __future__ import annotations

from . import _timers
from ._engines import engine_of, has_triton, no_silent_fallback
from ._run import Run, Unavailable

ELEMENTS, FEW, TINY = 2**24, 4096, 2**12
COLUMNS = {
    "format": "", "rounding": "", "dtype": "", "ms": ".3f", "of copy bandwidth": ".0%", "x torch's casts": ".2f",
    "us a call": ".1f", "us torch's casts": ".1f", "failed": "",
}  # fmt: skip
FORMATS = ("e4m3fn", "bf16", "mxfp8_e4m3", "nvfp4")
ROUNDINGS = ("nearest", "stochastic")


def measure(run: Run) -> None:
    """Each format in nearest and stochastic rounding, from bfloat16 and float32."""
    count = TINY if run.tiny else ELEMENTS
    bandwidth = _timers.copy_bandwidth(run)
    note = f"`hu.quantize` of {count:,} elements into memory that is there; its bytes are those of x and of the result "
    note += f"(nvfp4 reads x twice), beside {bandwidth / 1e9:.0f} GB/s that the device copies, read and written. A "
    note += f"call: of {FEW:,} elements, one behind another. torch's casts: to the format's dtype and back."
    note += "" if run.on_gpu and has_triton() else " Not by compiled kernels."
    table = run.table("quantize: speed", COLUMNS, note)
    for dtype in ("bfloat16", "float32"):
        for name in FORMATS:
            for rounding in ROUNDINGS:
                if name == "bf16" and dtype == "bfloat16":
                    continue
                cells = {"format": name, "rounding": rounding, "dtype": dtype}
                run.attempt(
                    ", ".join(cells.values()),
                    lambda cells=cells: row(run, table, cells, count, bandwidth),
                    lambda reason, cells=cells: run.add(table, **cells, failed=reason),
                )


def row(run: Run, table, cells: dict[str, str], count: int, bandwidth: float) -> None:
    """One format and rounding from one dtype."""
    import torch

    import halfulp as hu

    dtype = getattr(torch, cells["dtype"])
    mode = hu.Stochastic(seed=5) if cells["rounding"] == "stochastic" else cells["rounding"]
    narrow = {"e4m3fn": getattr(torch, "float8_e4m3fn", None), "bf16": torch.bfloat16}.get(cells["format"])
    found = []
    with hu.kernels.engine(engine_of(run)), no_silent_fallback():
        for size in (count, FEW):
            x = torch.randn(size // 1024, 1024, device=run.device).to(dtype)
            out = torch.empty_like(x)
            contenders = {"ours": lambda x=x, out=out: hu.quantize(x, cells["format"], mode, out=out)}
            if narrow is not None and cells["rounding"] == "nearest":
                contenders["torch"] = lambda x=x, out=out: out.copy_(x.to(narrow))
            found.append(_timers.interleaved(run, contenders))
            if bool((out == 0).all()):
                raise Unavailable("nothing was written")
    large, small = found
    seconds = _timers.median(large["ours"])
    more = {}
    if "torch" in large:
        more = {"x torch's casts": _timers.ratio(large, "ours", "torch")}
        more |= {"us torch's casts": 1e6 * _timers.median(small["torch"])}
    share = 2 * count * dtype.itemsize / seconds / bandwidth
    more |= {"ms": 1e3 * seconds, "of copy bandwidth": share, "us a call": 1e6 * _timers.median(small["ours"])}
    run.add(table, **cells, **more)
