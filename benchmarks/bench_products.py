"""Digits and speed of 16-bit products in float32, beside torch's own: `python -m benchmarks.bench_products`."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._harness import ROOT, Contender, measure, set_threads
from ._results import Result, Table, load, save

TEXT = """`hu.float32_products` computes products of bfloat16 and float16 tensors in float32 and rounds once. Digits: \
random shapes (1 to 300 terms, up to 2,400 in convolutions), normal operands; the largest distance in units of the \
last place of the narrow dtype: an element's own unit, or that of 2^-6 of the sum of its terms' magnitudes where that \
is larger, as float32 sums in another order differ below it. Speed: CPU time on one thread as a multiple of the same \
product of float32 tensors, forward and with its backward pass."""
SHAPES = 200
# Forward, and with the backward pass: large ones, as the small ones are bound by the cost of a call.
MOST = 1.5
LIMITS = {"": {}, "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}


def _digit_cases(generator: Any) -> list[tuple[str, Callable[..., Any], tuple, dict]]:
    """One function of each kind with random shapes."""
    import torch
    from torch.nn import functional

    def size(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    b, m, k, n = size(4), size(40), size(300), size(40)
    c, o, w = size(16), size(16), 2 + size(10)
    return [
        ("mm", torch.mm, ((m, k), (k, n)), {}),
        ("bmm", torch.bmm, ((b, m, k), (b, k, n)), {}),
        ("mv", torch.mv, ((m, k), (k,)), {}),
        ("addmm", torch.addmm, ((n,), (m, k), (k, n)), {}),
        ("baddbmm", torch.baddbmm, ((b, m, n), (b, m, k), (b, k, n)), {}),
        ("linear", functional.linear, ((b, m, k), (n, k), (n,)), {}),
        ("conv1d", torch.conv1d, ((b, c, 3 * w), (o, c, 3), (o,)), {"padding": 1}),
        ("conv2d", torch.conv2d, ((b, c, w, w), (o, c, 3, 3), (o,)), {"padding": 1}),
        ("conv_transpose2d", torch.conv_transpose2d, ((b, c, w, w), (c, o, 3, 3)), {"stride": 2}),
        ("conv3d", torch.conv3d, ((b, c, w, w, w), (o, c, 2, 2, 2)), {}),
    ]


def _distance(a: Any, b: Any, magnitude: Any, dtype: Any) -> float:
    """The largest distance in units of the last place."""
    import torch

    info = torch.finfo(dtype)
    size = torch.maximum(b.abs(), magnitude * 2.0**-6).clamp_min(info.smallest_normal)
    _, exponent = torch.frexp(size)
    unit = torch.ldexp(torch.full_like(size, info.eps / 2), exponent)
    return float(((a.double() - b).abs() / unit).max())


def digits(seed: int) -> Table:
    """The distances over all shapes, forward and backward."""
    import torch

    from halfulp.arithmetic._float32_products import call_product_in_float32
    from halfulp.environment._narrow_products import (
        SIXTEEN_BIT_DTYPES,
        find_natively_multiplied_dtypes,
        force_float32_products,
    )

    columns = {"operator": "", "dtype": "", "shapes": "", "from float64": ".3f", "gradients from float64": ".3f"}
    table = Table(f"Units of the last place, {SHAPES} shapes, seed {seed}", columns | {"from torch's own": ".3f"})
    found: dict[tuple[str, str], list[float]] = {}
    counts: dict[tuple[str, str], int] = {}
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    cases = [case for _ in range(SHAPES // 10) for case in _digit_cases(generator)]

    def run(function: Callable, operands: list, options: dict, cotangent: Any) -> list:
        leaves = [x.detach().requires_grad_() for x in operands]
        out = function(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]

    for name, function, shapes, options in cases:
        for dtype in SIXTEEN_BIT_DTYPES:
            x = [torch.randn(shape).to(dtype) for shape in shapes]
            cotangent = torch.randn_like(function(*(y.float() for y in x), **options)).to(dtype)
            exact = run(function, [y.double() for y in x], options, cotangent)
            sums = run(function, [y.double().abs() for y in x], options, cotangent.abs())
            with force_float32_products(dtype):
                mine = run(lambda *y, f=function, **o: call_product_in_float32(f, y, o), x, options, cotangent)
            row = [_distance(mine[0], exact[0], sums[0], dtype)]
            row.append(max(_distance(a, b, s, dtype) for a, b, s in zip(mine[1:], exact[1:], sums[1:])))
            if dtype in find_natively_multiplied_dtypes():
                row.append(_distance(mine[0], function(*x, **options).double(), sums[0], dtype))
            key = name, str(dtype).removeprefix("torch.")
            before = found.setdefault(key, [0.0] * len(row))
            found[key] = [max(a, b) for a, b in zip(before, row)]
            counts[key] = counts.get(key, 0) + 1
    for (name, dtype), row in found.items():
        cells = dict(zip(("from float64", "gradients from float64", "from torch's own"), row))
        met = cells["from float64"] <= 0.55 and cells.get("from torch's own", 0.0) <= 1.01
        table.add(operator=name, dtype=dtype, shapes=counts[name, dtype], met=met, **cells)
    table.note = (
        "torch's own: only where the processor has instructions for the dtype; elsewhere its loops are no measure"
    )
    return table


def _speed_cases() -> dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], dict]]:
    import torch
    from torch.nn import functional

    heads = [(8, 4, 128, 32)] * 3
    return {
        "mm 64": (torch.mm, [(64, 64)] * 2, {}),
        "mm 512": (torch.mm, [(512, 512)] * 2, {}),
        "bmm 16 x 128": (torch.bmm, [(16, 128, 128)] * 2, {}),
        "mv 1024": (torch.mv, [(1024, 1024), (1024,)], {}),
        "addmm 256": (torch.addmm, [(256,), (256, 256), (256, 256)], {}),
        "baddbmm 16 x 128": (torch.baddbmm, [(16, 128, 128)] * 3, {}),
        "linear 1024 x 256": (functional.linear, [(1024, 256), (256, 256), (256,)], {}),
        "conv1d": (torch.conv1d, [(8, 32, 256), (32, 32, 5), (32,)], {"padding": 2}),
        "conv2d": (torch.conv2d, [(8, 32, 32, 32), (32, 32, 3, 3), (32,)], {"padding": 1}),
        "conv_transpose2d": (torch.conv_transpose2d, [(8, 32, 16, 16), (32, 32, 3, 3)], {"padding": 1}),
        "attention": (functional.scaled_dot_product_attention, heads, {"is_causal": True}),
    }


def _recurrent(kind: str, dtype: Any) -> Callable[[], Any]:
    import torch

    import halfulp as hu

    torch.manual_seed(0)
    layer = hu.float32_products(getattr(torch.nn, kind)(64, 128).to(dtype))
    x = torch.randn(32, 16, 64).to(dtype)

    def run() -> None:
        layer(x)[0].float().sum().backward()

    return run


def speed() -> Table:
    """Multiples of the time of float32."""
    import torch

    from halfulp.arithmetic._float32_products import call_product_in_float32
    from halfulp.environment._narrow_products import (
        SIXTEEN_BIT_DTYPES,
        find_natively_multiplied_dtypes,
        force_float32_products,
    )

    set_threads(1)
    natives = {str(dtype).removeprefix("torch.") for dtype in find_natively_multiplied_dtypes()}
    figures = ("forward", "forward, torch's own", "with backward", "with backward, torch's own")
    columns = {"operator": "", "dtype": "", **dict.fromkeys(figures, ".2f"), "float32 ms": ".3f"}
    table = Table("Multiples of float32's CPU time, one thread", columns)
    table.note = f"oneDNN has instructions for: {', '.join(sorted(natives)) or 'neither'}"

    def call(function: Callable, dtype: Any, shapes: list, options: dict, mine: bool, backward: bool) -> Callable:
        torch.manual_seed(0)
        x = [torch.randn(shape).to(dtype).requires_grad_(backward) for shape in shapes]
        ones = torch.ones_like(function(*x, **options))

        def run() -> None:
            out = call_product_in_float32(function, tuple(x), options) if mine else function(*x, **options)
            if backward:
                torch.autograd.grad(out, x, ones)

        return run

    for name, (function, shapes, options) in _speed_cases().items():
        for dtype in SIXTEEN_BIT_DTYPES:
            cells: dict[str, Any] = {"operator": name, "dtype": str(dtype).removeprefix("torch.")}
            with force_float32_products(dtype):
                for backward, at in ((False, 0), (True, 2)):
                    calls = {
                        "float32": call(function, torch.float32, shapes, options, False, backward),
                        "mine": call(function, dtype, shapes, options, True, backward),
                        "own": call(function, dtype, shapes, options, False, backward),
                    }
                    timed = measure([Contender(key, run) for key, run in calls.items()], "float32", threads=1, rounds=7)
                    cells[figures[at]], cells[figures[at + 1]] = timed["mine"].ratio, timed["own"].ratio
                    cells["float32 ms"] = timed["float32"].milliseconds
            cells["met"] = cells["with backward"] <= MOST if " 64" not in name and "mv" not in name else None
            table.add(**cells)
    for kind in ("LSTM", "GRU", "RNN"):
        for dtype in SIXTEEN_BIT_DTYPES:
            plain, mine = _recurrent(kind, torch.float32), _recurrent(kind, dtype)
            with force_float32_products(dtype):
                timed = measure([Contender("float32", plain), Contender("mine", mine)], "float32", threads=1, rounds=7)
            with force_float32_products():
                own = measure([Contender("float32", plain), Contender("own", mine)], "float32", threads=1, rounds=7)
            cells = {"operator": kind, "dtype": str(dtype).removeprefix("torch."), "with backward": timed["mine"].ratio}
            cells |= {"with backward, torch's own": own["own"].ratio, "float32 ms": timed["float32"].milliseconds}
            table.add(**cells, met=cells["with backward"] <= MOST)
    return table


def main() -> None:
    """Digits once; speed as the processor is, and with its newer instructions switched off, each in its process."""
    if sys.argv[1:2] == ["speed"]:
        save_to = Path(sys.argv[2])
        from dataclasses import asdict
        from json import dumps

        save_to.write_text(dumps({"name": "", "title": "", "text": "", "command": "", "tables": [asdict(speed())]}))
        return
    result = Result("products", "Products of 16-bit tensors", TEXT, "python -m benchmarks.bench_products")
    result.tables.append(digits(int(os.environ.get("HALFULP_SEED", "20261127"))))
    with tempfile.TemporaryDirectory() as folder:
        for limit, variables in LIMITS.items():
            path = Path(folder, f"{limit or 'whole'}.json")
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bench_products", "speed", str(path)]
            subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True)
            (table,) = load(path).tables
            table.title += (
                f", instructions up to {limit} (by {', '.join(f'{k}={v}' for k, v in variables.items())})"
                * (limit != "")
            )
            result.tables.append(table)
            save(result)


if __name__ == "__main__":
    main()
