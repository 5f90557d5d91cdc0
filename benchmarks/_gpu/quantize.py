"""Bits of `quantize` on the device against the CPU's reference, for every format and rounding."""

from __future__ import annotations

from ._engines import engine_of, no_silent_fallback
from ._run import Run
from .steps import numbers

ELEMENTS, TINY = 1_000_000, 1024
WIDE = ("fp64", "fp32")  # formats that only float64 values need rounding to


def measure(run: Run) -> None:
    """Every format, block formats too, in every rounding."""
    import halfulp as hu

    count = (TINY if run.tiny else ELEMENTS) // 64 * 64
    columns = {"format": "", "roundings": ",d", "elements": ",d", "equal": ",d", "differ": ",d", "failed": ",d"}
    note = f"`hu.quantize` of {count:,} elements, special values and random words among them, against the reference "
    note += "on the CPU, bit for bit, from float32 and bfloat16 (from float64 where the format is as wide)."
    table = run.table("quantize: bits", columns | {"met": ""}, note, keys=["format"])
    names = [*hu.formats.names(), *hu.formats.block_names()]
    roundings = hu.rounding.rounding_names()
    if run.tiny:
        names, roundings = ["bf16", "mxfp4"], ["nearest", "stochastic"]
    for name in names:
        for rounding in roundings:
            run.attempt(
                f"{name}, {rounding}", lambda name=name, rounding=rounding: compare(run, table, name, rounding, count)
            )


def compare(run: Run, table, name: str, rounding: str, count: int) -> None:
    """One format and rounding, from each dtype that it takes."""
    import torch

    import halfulp as hu
    from halfulp.kernels import same_bits

    mode = hu.Stochastic(seed=5) if rounding == "stochastic" else rounding
    taken = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = numbers(count, 0).to(dtype)
        if dtype == torch.float64:
            if name not in WIDE:
                continue
            x = x * (1 + 2.0**-30)
        try:
            with hu.kernels.engine("reference"):
                there = hu.quantize(x, name, mode, counter=2)
        except ValueError:
            continue  # this dtype cannot hold the format's values, or the format has no such rounding
        taken += 1
        cells = {"format": name}
        try:
            with hu.kernels.engine(engine_of(run)), no_silent_fallback():
                here = hu.quantize(x.to(run.device), name, mode, counter=2).cpu()
        except Exception as error:
            run.count(table, cells, roundings=1, failed=1)
            run.fail(f"quantize to {name}, {rounding}, from {dtype}", error)
            continue
        same = same_bits(here, there)
        run.count(table, cells, roundings=1, elements=count, equal=same, differ=not same, failed=0)
        if not same:
            many = int(((here != there) & ~(here.isnan() & there.isnan())).sum())
            run.fail(f"quantize to {name}, {rounding}, from {dtype}", f"other bits in {many} elements")
    if not taken:
        run.count(table, {"format": name}, roundings=0)
