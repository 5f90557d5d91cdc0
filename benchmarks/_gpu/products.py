"""Matrix products that scaled tensors take: how exactly the device sums them, and their speed beside bfloat16's."""

from __future__ import annotations

from . import _timers
from ._run import Run, Unavailable

TERMS, TINY_TERMS = (768, 8192, 50304), (64,)
ROWS, TINY_ROWS = 1024, 32
COLUMNS = {
    "product": "", "terms": "", "rms error of the sums": ".1e", "towards zero": ".1e", "x bfloat16": ".2f",
    "failed": "",
}  # fmt: skip
PRODUCTS = ("bfloat16", "float16 into float32", "e4m3fn", "e5m2 by e4m3fn", "e4m3fn emulated")


def measure(run: Run) -> None:
    """Every kind of product over several numbers of terms."""
    rows = TINY_ROWS if run.tiny else ROWS
    note = (
        f"{rows} x terms by terms x {rows}, normal values rounded to the operands' dtypes; errors of the sums beside "
    )
    note += "float64's, relative to the root mean square of the sums, and their mean part towards zero, relative to "
    note += "the mean magnitude. bfloat16's result is rounded to bfloat16. e4m3fn emulated: widened to float32."
    table = run.table("Products", COLUMNS, note)
    for terms in TINY_TERMS if run.tiny else TERMS:
        for name in PRODUCTS:
            cells = {"product": name, "terms": terms}
            run.attempt(
                f"{name}, {terms}",
                lambda cells=cells: _row(run, table, cells, rows),
                lambda why, cells=cells: run.add(table, **cells, failed=why),
            )


def _row(run: Run, table, cells: dict, rows: int) -> None:
    import torch

    from halfulp.scaled import eight_bit_engine
    from halfulp.scaled.rules._products import multiply_eight_bit_matrices, multiply_into_float32

    name, terms = cells["product"], cells["terms"]
    if name in ("e4m3fn", "e5m2 by e4m3fn") and eight_bit_engine(run.device) == "emulated":
        raise Unavailable("the device has no eight-bit products")
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, terms, generator=generator).to(run.device) for _ in range(2))
    kinds = {"e5m2 by e4m3fn": ("float8_e5m2", "float8_e4m3fn")}
    kind = "float8_e4m3fn" if name.startswith("e4m3fn") else name.split()[0]
    left, right = (z.to(getattr(torch, k)) for z, k in zip((x, y), kinds.get(name, (kind, kind))))
    multiply = {
        "bfloat16": lambda: left @ right.t(),
        "float16 into float32": lambda: multiply_into_float32(left, right.t()),
        "e4m3fn emulated": lambda: left.to(torch.float32) @ right.to(torch.float32).t(),
    }.get(name, lambda: multiply_eight_bit_matrices(left, right.t(), 1.0))
    exact = left.double() @ right.double().t()
    error = multiply().double() - exact
    cells["rms error of the sums"] = float(error.norm() / exact.norm())
    cells["towards zero"] = float(-(error * exact.sign()).mean() / exact.abs().mean())
    plain = x.bfloat16(), y.bfloat16().t()
    timings = _timers.interleaved(run, {"ours": multiply, "bfloat16": lambda: plain[0] @ plain[1]}, 5, 0.02)
    run.add(table, **cells, **{"x bfloat16": _timers.ratio(timings, "ours", "bfloat16")})
