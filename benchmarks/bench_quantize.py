"""hu.quantize beside a plain copy and beside the peers: `python -m benchmarks.bench_quantize`."""

import argparse
import json
from pathlib import Path

from . import peers
from ._harness import Contender, in_processes, measure, over_processes, set_threads
from ._results import Result, Table, save

ELEMENTS = 4_194_304
EIGHT = ("bf16", "e8m5", "e8m3", "e8m1")
OTHER = ("fp16", "e5m2", "e4m3fn", "e3m4", "e3m2fn", "e2m3fn", "e2m1fn")
BLOCKS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4")
BITS = {
    "bf16": (8, 7),
    "e8m3": (8, 3),
    "fp16": (5, 10),
    "e5m2": (5, 2),
    "e4m3fn": (4, 3),
    "e3m4": (3, 4),
    "e2m1fn": (2, 1),
}
DATA = {
    "normal": "standard normal",
    "wide": "standard normal x 2^k, k uniform in [-30, 30]: subnormals and overflow in most formats",
}
TEXT = """`hu.quantize(x, format, rounding, out=y)` on 4,194,304 float32 elements, subnormals on, one thread, against \
`y.copy_(x)`: the time that merely moving the data takes. Peers are timed on the same data in the same way; \
where a peer has no `out=`, it allocates its result, as its users must."""


def bar(name: str, rounding: str) -> float:
    """The largest ratio to the copy that is promised."""
    if name == "nvfp4":
        return 6.0
    if name.startswith("mx"):
        return 4.0
    if name in EIGHT:
        return 1.2 if rounding == "nearest" else 1.5
    return 1.5 if rounding == "nearest" else 2.0


def data(kind: str):
    """The elements to round."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ELEMENTS, generator=generator)
    if kind == "wide":
        x = torch.ldexp(x, torch.randint(-30, 31, (ELEMENTS,), generator=generator))
    return x


def ours(x, y) -> list[Contender]:
    """halfulp, every format and both roundings."""
    import halfulp as hu

    roundings = {"nearest": hu.Nearest(), "stochastic": hu.Stochastic(seed=0)}

    def contender(name: str, rounding: str) -> Contender:
        form, mode = getattr(hu.formats, name), roundings[rounding]
        return Contender(f"{name}/{rounding}", lambda: hu.quantize(x, form, mode, out=y))

    return [contender(name, rounding) for name in (*EIGHT, *OTHER, *BLOCKS) for rounding in roundings]


def copy(x, y) -> Contender:
    """The peer of every ratio."""
    return Contender("copy", lambda: y.copy_(x))


def torch_casts(x, y) -> list[Contender]:
    """A cast there and back, eager, with buffers given."""
    import torch

    def contender(name: str, dtype) -> Contender:
        z = torch.empty_like(x, dtype=dtype)
        return Contender(f"torch cast/{name}/nearest", lambda: y.copy_(z.copy_(x)))

    named = {"bf16": torch.bfloat16, "fp16": torch.float16, "e5m2": torch.float8_e5m2, "e4m3fn": torch.float8_e4m3fn}
    return [contender(name, dtype) for name, dtype in named.items()]


def ml_dtypes_casts(x) -> list[Contender]:
    """numpy with ml_dtypes: astype there and back."""
    import ml_dtypes
    import numpy

    a = x.numpy()

    def contender(name: str, dtype) -> Contender:
        return Contender(f"ml_dtypes/{name}/nearest", lambda: a.astype(dtype).astype(numpy.float32), threads=1)

    named = {
        "bf16": ml_dtypes.bfloat16,
        "e5m2": ml_dtypes.float8_e5m2,
        "e4m3fn": ml_dtypes.float8_e4m3fn,
        "e3m4": ml_dtypes.float8_e3m4,
        "e2m1fn": ml_dtypes.float4_e2m1fn,
    }
    return [contender(name, dtype) for name, dtype in named.items()]


def qtorch_casts(x) -> list[Contender]:
    """QPyTorch's float_quantize."""
    from qtorch.quant import float_quantize

    def contender(name: str, rounding: str) -> Contender:
        exponent, mantissa = BITS[name]
        call = lambda: float_quantize(x, exp=exponent, man=mantissa, rounding=rounding)  # noqa: E731
        return Contender(f"QPyTorch/{name}/{rounding}", call, threads=1)

    return [contender(name, rounding) for name in BITS for rounding in ("nearest", "stochastic")]


def gfloat_casts(x) -> list[Contender]:
    """gfloat's array rounding on numpy, for the formats that it names."""
    import gfloat
    import numpy
    from gfloat import formats as known

    a = x.numpy()
    noise = numpy.random.default_rng(0).integers(0, 2**16, a.shape)

    def near(name: str, info) -> Contender:
        mode = gfloat.RoundMode.TiesToEven
        return Contender(f"gfloat/{name}/nearest", lambda: gfloat.round_ndarray(info, a, mode, sat=True), threads=1)

    def stochastic(name: str, info) -> Contender:
        mode = gfloat.RoundMode.Stochastic
        call = lambda: gfloat.round_ndarray(info, a, mode, sat=True, srbits=noise, srnumbits=16)  # noqa: E731
        return Contender(f"gfloat/{name}/stochastic", call, threads=1)

    named = {
        "bf16": known.format_info_bfloat16,
        "e5m2": known.format_info_ocp_e5m2,
        "e4m3fn": known.format_info_ocp_e4m3,
        "e2m1fn": known.format_info_ocp_e2m1,
    }
    return [make(name, info) for name, info in named.items() for make in (near, stochastic)]


def torchao_casts(x) -> list[Contender]:
    """torchao's MX and NVFP4: to the blocks and back, eager."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    m = x.view(-1, 1024)

    def mx(name: str, element) -> Contender:
        return Contender(f"torchao/{name}/nearest", lambda: MXTensor.to_mx(m, element, 32).dequantize(torch.float32))

    return [
        mx("mxfp8_e4m3", torch.float8_e4m3fn),
        mx("mxfp8_e5m2", torch.float8_e5m2),
        mx("mxfp4", torch.float4_e2m1fn_x2),
        Contender("torchao/nvfp4/nearest", lambda: NVFP4Tensor.to_nvfp4(m).dequantize(torch.float32)),
    ]


def pychop_casts(x) -> list[Contender]:
    """pychop's torch back end, nearest even and stochastic."""
    import pychop
    from pychop import Chop

    pychop.backend("torch")

    def contender(name: str, rounding: str, mode: int) -> Contender:
        exponent, mantissa = BITS[name]
        chop = Chop(exp_bits=exponent, sig_bits=mantissa, rmode=mode)
        return Contender(f"pychop/{name}/{rounding}", lambda: chop(x))

    return [contender("e5m2", "nearest", 1), contender("e5m2", "stochastic", 5)]


def rivals(x, y) -> tuple[list[Contender], dict[str, str]]:
    """Every peer that works here, tried once, and why the others do not."""
    makers = {
        "torch": lambda: torch_casts(x, y),
        "ml_dtypes": lambda: ml_dtypes_casts(x),
        "qtorch": lambda: qtorch_casts(x),
        "gfloat": lambda: gfloat_casts(x),
        "torchao": lambda: torchao_casts(x),
        "pychop": lambda: pychop_casts(x),
    }
    found, absent = [], {}
    for module, make in makers.items():
        why = peers.missing(module)
        try:
            made = [] if why else make()
        except Exception as error:  # a peer whose interface has moved counts as absent, with the reason
            why, made = f"{type(error).__name__}: {error}"[:160], []
        for contender in made:
            try:
                contender.call()
                found.append(contender)
            except Exception as error:
                absent[contender.name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        if why:
            absent[module] = why
    return found, absent


def one(kind: str, whose: str, threads: int) -> dict:
    """One process's measurement: {name: timing}, and the peers that are absent."""
    import torch

    set_threads(threads)
    x = data(kind)
    y = torch.empty_like(x)
    if whose == "ours":
        made, absent = ours(x, y), {}
    else:
        made, absent = rivals(x, y)
    timings = measure([copy(x, y), *made], "copy", threads=threads, window=0.006, patience=90)
    return {"timings": {name: timing.to_dict() for name, timing in timings.items()}, "absent": absent}


def our_table(kind: str, threads: int, processes: int) -> Table:
    """halfulp against the copy, over fresh processes."""
    arguments = ["--one", "ours", "--data", kind, "--threads", str(threads)]
    runs = [run["timings"] for run in in_processes("benchmarks.bench_quantize", arguments, processes)]
    base = over_processes(runs, "copy")
    table = Table(
        f"hu.quantize, {threads} thread{'s' * (threads > 1)}, {DATA[kind].split(':')[0]} data",
        {"format": "", "rounding": "", "x copy": ".2f", "range": "", "bar": "", "met": "", "dropped": ""},
        note=f"y.copy_(x) took {base['milliseconds']:.2f} ms. {processes} processes. Data: {DATA[kind]}.",
    )
    for name in runs[0]:
        if name == "copy":
            continue
        form, rounding = name.split("/")
        figures = over_processes(runs, name)
        row = {"format": form, "rounding": rounding, "x copy": figures["ratio"], "dropped": figures["dropped"]}
        row["range"] = f"{figures['low']:.2f} to {figures['high']:.2f}"
        if kind == "normal" and threads == 1:
            row |= {"bar": f"<= {bar(form, rounding)}", "met": figures["low"] <= bar(form, rounding)}
        table.add(**row)
    return table


def peer_table(ours_table: Table) -> Table:
    """The peers against the copy, and against halfulp."""
    run = in_processes("benchmarks.bench_quantize", ["--one", "peers", "--data", "normal", "--threads", "1"], 1)[0]
    mine = {f"{row['format']}/{row['rounding']}": row["x copy"] for row in ours_table.rows}
    absent = "; ".join(f"{name}: {why}" for name, why in run["absent"].items())
    versions = ", ".join(f"{name} {value.split(' (')[0]}" for name, value in peers.status().items())
    table = Table(
        "Peers on the same work, 1 thread",
        {"peer": "", "format": "", "rounding": "", "x copy": ".1f", "ms": ".2f", "x halfulp": ".1f"},
        note=f"{versions}. Absent: {absent or 'none'}. y.copy_(x): {run['timings']['copy']['milliseconds']:.2f} ms.",
    )
    for name, timing in run["timings"].items():
        if name == "copy":
            continue
        peer, form, rounding = name.split("/")
        against = mine.get(f"{form}/{rounding}")
        table.add(
            peer=peer,
            format=form,
            rounding=rounding,
            **{
                "x copy": timing["ratio"],
                "ms": timing["milliseconds"],
                "x halfulp": timing["ratio"] / against if against else None,
            },
        )
    return table


def main() -> None:
    """Everything, or one process's part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--one", choices=["ours", "peers"])
    parser.add_argument("--data", choices=list(DATA), default="normal")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.one:
        found = one(chosen.data, chosen.one, chosen.threads)
        if chosen.json:
            chosen.json.write_text(json.dumps(found))
        else:
            print(json.dumps(found, indent=1))
        return
    first = our_table("normal", 1, chosen.processes)
    tables = [first, our_table("wide", 1, 1), peer_table(first)]
    command = "python -m benchmarks.bench_quantize"
    save(Result("quantize", "quantize: speed", TEXT, command, tables=tables))


if __name__ == "__main__":
    main()
