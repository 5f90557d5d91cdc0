"""The code of every Triton kernel, compiled for three GPUs without one: `python -m benchmarks.bench_triton`.

It needs triton 3.5 or newer beside halfulp's requirements, and no GPU.
"""

# ruff: noqa: B023 (what is yielded is called before the loop goes on)
from __future__ import annotations

import argparse
import collections
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import torch

import halfulp as hu
from halfulp.scaled import _fused as fused

from ._results import Result, Table, save
from ._triton_code import Kernel, Launch, compiling

ARCHITECTURES = (80, 90, 100)
TEXT = """Every Triton kernel of the library, as its own launches ask for it on whole vectors at aligned addresses, \
compiled ahead of time by Triton's own ptxas, without a GPU. A row is a family of kernels, in the worst case of each \
column. Bytes per element are those of the arrays that a program reads and writes, over the least that the operation \
must move; instructions are those that load or store elements, over the fewest that a thread's elements need at 16 \
bytes each. Registers that do not suffice are spilled to memory. A fused multiply-add rounds once where the reference \
rounds twice, so that none may stand but the error of a product, which asks for it; `.ftz`, `.approx` and `.full` mark \
instructions that flush subnormal numbers or approximate. A reduction's threads have a column each, whose elements \
they add in the processor's order: a warp reads whole lines, an instruction of a thread one element; it has no least, \
nor has the rounding of exact sums, which reads a row of counters for each."""
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
STORAGES = (FP32, BF16, FP16, torch.float8_e4m3fn, torch.float8_e5m2)
SHAPE = (32, 1024)
SCALED_STEPS = [
    ("AdamW", {"weight_decay": 0.1}, "kahan", FP16, torch.float8_e5m2, "fp8"),
    ("AdamW", {"amsgrad": True}, "stochastic", BF16, FP16, FP16),
    ("AdamW", {}, "kahan-stochastic", torch.float8_e5m2, BF16, "8bit"),
    ("SGD", {"momentum": 0.9}, "nearest", torch.float8_e4m3fn, torch.float8_e5m2, FP16),
    ("SGD", {}, "master", FP16, FP16, None),
    ("Lion", {}, "stochastic", torch.float8_e5m2, FP32, torch.float8_e5m2),
    ("AdamW", {}, None, FP32, FP16, FP16),
]
FORMS = [
    *(("product", count) for count in (1, 2, 3)),
    *(("values", 1), ("brought", 2), ("factor", 2), ("levelled", 2)),
]

Launches = Iterator[tuple[str, tuple[float, float] | None, Callable[[], object]]]


def numbers(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """A tensor of whole vectors."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def roundings() -> Launches:
    """Every kernel of elements that a format and a rounding ask for."""
    from tests.rounding.triton_cases import kernels, mode_of

    for dtype, mode, name, policy, _ in kernels():
        x = numbers(dtype)
        yield (
            f"{dtype} to {name}, {mode}",
            (x.itemsize,) * 2,
            lambda: hu.quantize(x, name, mode_of(mode), overflow=policy),
        )


def block_formats() -> Launches:
    """Every block format, to nearest and in another mode."""
    from tests.rounding.triton_cases import block_kernels, mode_of

    for dtype, mode, format, _ in block_kernels():
        if format.block & (format.block - 1):
            continue  # whose blocks are no whole vectors
        x = numbers(dtype, (32, format.block * max(1, 1024 // format.block)))
        yield f"{dtype} to {format.name}, {mode}", (x.itemsize,) * 2, lambda: hu.quantize(x, format, mode_of(mode))


def steps() -> Launches:
    """Every rule, weight update, store, codec and gradient in two steps at least, some of which count lost updates."""
    from tests.laws.optim.cases import CODECS, build, covering, fit

    left = collections.Counter(dict.fromkeys(itertools.chain(*covering()), 2))
    rows = [row for row in covering() if any(left[value] > 0 for value in row) and left.subtract(row) is None]
    for number, (rule, update, store, codec, gradient) in enumerate(rows):
        parameter = torch.nn.Parameter(fit(numbers(FP32), store))
        if parameter.dtype != gradient:
            parameter.grad_dtype = None
        parameter.grad = numbers(gradient)
        more = {} if number % 8 == 0 else {"report_interval": 0}
        optimizer = build(rule, update, [parameter], store, state_dtype=CODECS[codec], **more)
        yield f"{rule}, {update}, {store}, {codec} states", moved(optimizer, parameter), optimizer.step


def scaled_steps() -> Launches:
    """Steps of scaled parameters: the largest magnitudes, the scales, the step."""
    for kind, options, update, dtype, gradient, states in SCALED_STEPS:
        parameter = torch.nn.Parameter(hu.ScaledTensor.encode(numbers(FP32), dtype))
        parameter.grad = hu.ScaledTensor.encode(numbers(FP32), gradient)
        options = {"report_interval": 0, "weight_update": update, "state_dtype": states, **options}
        optimizer = getattr(hu.optim, kind)([parameter], lr=1e-2, **options)
        yield f"{kind}, {update}, {dtype}, {states} states", moved(optimizer, parameter), optimizer.step


def moved(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> tuple[float, float]:
    """The bytes per element of a parameter's tensors, with the gradient and without."""
    with hu.kernels.engine("reference"):
        optimizer.step()  # which makes the states
    held = [parameter, *(x for x in optimizer.state[parameter].values() if isinstance(x, torch.Tensor))]
    own = sum(size_of(x) for x in held)
    prepared = 4 * parameter.numel() if optimizer.rule(optimizer.param_groups[0]).prepare else 0
    # What prepares reads float32 weights, which a kernel of its own writes.
    return (own + size_of(parameter.grad) + prepared) / parameter.numel(), max(own, prepared) / parameter.numel()


def size_of(x: torch.Tensor) -> int:
    """The bytes of a tensor's elements."""
    payload = x.payload if isinstance(x, hu.ScaledTensor) else x
    return payload.numel() * payload.itemsize


def weights_and_averages() -> Launches:
    """Float32 weights from parameters and their auxiliary tensors, and averages of them."""
    for update in ("kahan", "split", "split8", "components", "master"):
        layer = torch.nn.Linear(1024, 64).to(BF16)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = hu.optim.AdamW(layer.parameters(), lr=1e-2, weight_update=update, report_interval=0)
        with hu.kernels.engine("reference"):
            optimizer.step()
            averages = hu.optim.EMA(layer, 0.9, optimizer=optimizer, report_interval=0)
        yield f"weights, {update}", (8, 4), lambda: optimizer.float32_state_dict(layer)
        yield f"average, {update}", (12, 8), averages.update


def expansions() -> Launches:
    """Every function once, with dtypes and one to three components in turn, and those of scaled operands."""
    from halfulp.arithmetic._pointwise import (
        EXPANSION_FUNCTION_BY_NAME,
        evaluate_scaled_operands_in_float64,
        pointwise,
        round_under_scale,
    )

    kinds = itertools.cycle(itertools.product((BF16, FP16, FP32, FP64), (1, 2, 3)))
    for name, (dtype, count) in zip(EXPANSION_FUNCTION_BY_NAME, kinds):
        operands = EXPANSION_FUNCTION_BY_NAME[name].operands
        parts = tuple(numbers(dtype) * 2.0**-k for k in range(count))
        size = dtype.itemsize * count
        run = lambda: pointwise(name, *(parts,) * operands, components=count, dtype=dtype)  # noqa: E731
        yield f"{name} of {count} x {dtype}", (size * operands, size), run
    scale = torch.tensor(2.0)
    for name, dtype, count in itertools.product(("add", "mul", "div"), (BF16, FP16, FP32), (1, 2)):
        parts = tuple(numbers(dtype) for _ in range(count))
        given = [(parts, scale), (parts, None)]
        with hu.kernels.engine("reference"):
            wide, sizes = evaluate_scaled_operands_in_float64(name, given, count)
        size, between = dtype.itemsize * count, sum(part.itemsize for part in wide)
        told = f"{name} of {count} x {dtype} with a scale"
        yield (
            told,
            (2 * size, between + sizes.itemsize),
            lambda: evaluate_scaled_operands_in_float64(name, given, count),
        )
        yield told, (between, size), lambda: round_under_scale(wide, scale, count, dtype)


def reductions() -> Launches:
    """Sums, means and products of one to three components, of many columns and of few."""
    from halfulp.arithmetic import _reductions as module

    kinds = itertools.product((module.total, module.average, module.product), (BF16, FP16, FP32, FP64), (1, 2, 3))
    with mock.patch.object(module, "_is_finite", return_value=False):  # since nobody asks a GPU
        for run, dtype, count in kinds:
            for shape in ((256, 256), (4096, 8)):
                parts = tuple(numbers(dtype, shape) for _ in range(count))
                yield f"{run.__name__} of {count} x {dtype}", None, lambda: run(parts, 0, count)


def exact_sums() -> Launches:
    """Exact sums and dot products of rows, and the rounding of their accumulators."""
    from halfulp.arithmetic import _exact_sums as module

    for dtype, (rows, columns) in itertools.product((BF16, FP16, FP32, FP64), ((64, 128), (64, 1024), (4, 65_536))):
        for name, operands in ("sum", 1), ("dot", 2):
            given = [numbers(dtype, (rows, columns))] * operands
            reach = module.LimbRange.for_terms(dtype, operands > 1)
            words = torch.zeros(rows, reach.counter_count + 1, dtype=torch.int64)
            fill = lambda: module._add_to_windows_by_triton(given, reach)  # noqa: E731
            yield f"{name} of {dtype}", (operands * dtype.itemsize, 0), fill
            yield f"rounding to {dtype}", None, lambda: module._round_windows("triton", words, reach, dtype)


def scaled_results() -> Launches:
    """The operations on payloads under their scales."""
    scales = [torch.tensor(2.0**k) for k in (-1, 2, 1, -2)]
    x = numbers(FP16)
    forms = itertools.cycle(FORMS)
    for of, to in itertools.product(STORAGES, STORAGES):
        y, (mode, count) = numbers(of), next(forms)
        yield f"finish {mode}", (of.itemsize, to.itemsize), lambda: fused.multiply_payload(y, scales[:count], to, mode)
        keep, size = to in (FP16, torch.float8_e5m2), x.itemsize + y.itemsize
        yield "add", (size, to.itemsize), lambda: fused.add_payloads(x, y, *scales[:2], to, 1.0, keep)
        if to is FP16:
            yield "level", (of.itemsize, 0), lambda: fused.measure_rms_scale(y, to, 1.0)
    yield "factors", None, lambda: fused.compute_addmm_scale_and_factors(*scales[:3], 1.0, 2.0)


FAMILIES: dict[str, Callable[[], Launches]] = {
    "quantize": roundings,
    "block formats": block_formats,
    "optimizer steps": steps,
    "optimizer steps, scaled": scaled_steps,
    "float32 weights, averages": weights_and_averages,
    "expansions, element by element": expansions,
    "expansions, reductions": reductions,
    "exact sums": exact_sums,
    "scaled results": scaled_results,
}


def compiled(family: str, architectures: tuple[int, ...]) -> list[Kernel]:
    """All kernels of a family; one of rows, parameters or scales has no bytes per element to move."""
    found: list[Kernel] = []
    launch = Launch(family)
    with compiling(architectures, found, launch):
        for launch.name, launch.least, run in FAMILIES[family]():
            launch.arrays = int(launch.name.split(" of ")[1].split(" ")[0]) if family.endswith("reductions") else 0
            run()
            launch.least = None  # of what is launched while the next one is made
    for kernel in found:
        if kernel.function == "level":  # reads few numbers, whatever the elements are
            kernel.launch.least = None
    return found


def judge(table: Table, family: str, architecture: int, kernels: list[Kernel]) -> None:
    """Add the row of a family."""
    judged = [kernel for kernel in kernels if kernel.launch.least is not None]
    excess = {
        way: max((moves / least for moves, least in pairs if least or moves), default=None)
        for way, pairs in (
            ("read", [(k.read, k.launch.least[0]) for k in judged]),
            ("written", [(k.written, k.launch.least[1]) for k in judged if k.launch.least[1]]),
        )
    }
    worst = {
        "spills": max(k.spills for k in kernels),
        "fused": max(k.fused for k in kernels),
        "inexact": max(k.inexact for k in kernels),
    }
    surplus = max((k.surplus for k in judged), default=None)
    table.add(
        kernels=family,
        sm=architecture,
        count=len(kernels),
        **{f"{way} / least": value for way, value in excess.items()},
        **{
            "instructions / fewest": surplus,
            "narrowest": min((k.narrowest for k in judged or kernels if k.narrowest), default=0),
        },
        registers=max(k.registers for k in kernels),
        **worst,
        met=all(value is None or value <= 1 for value in (*excess.values(), surplus)) and not any(worst.values()),
    )


def main() -> None:
    """Compile, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="these alone, beside the others' kept rows")
    parser.add_argument("--sm", type=int, choices=ARCHITECTURES, action="append", help="these alone: nothing is kept")
    parser.add_argument("--worst", action="store_true", help="also print the kernels that miss a bar")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    columns = {"kernels": "", "sm": "", "count": "", "read / least": ".2f", "written / least": ".2f"}
    columns |= {"instructions / fewest": ".2f", "narrowest": "", "registers": ""}
    columns |= {"spills": "", "fused": "", "inexact": ""}
    table = Table("The code of Triton kernels, compiled ahead of time", columns)
    architectures = tuple(given.sm or ARCHITECTURES)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        for family in given.family or FAMILIES:
            began, kernels = time.process_time(), compiled(family, architectures)
            for architecture in architectures:
                judge(table, family, architecture, [k for k in kernels if k.architecture == architecture])
                print(table.rows[-1], f"{time.process_time() - began:.0f} s", flush=True)
            for kernel in kernels if given.worst else ():
                if kernel.spills or kernel.fused or kernel.inexact or kernel.surplus > 1:
                    print("   ", kernel.function, vars(kernel), flush=True)
    if given.sm is None:
        result = Result("triton", "Triton kernels, compiled ahead of time", TEXT, "python -m benchmarks.bench_triton")
        if given.family:
            kept = result.earlier_rows("kernels", "sm").values()
            table.rows += [row for row in kept if row["kernels"] in FAMILIES.keys() - given.family]
            table.rows.sort(key=lambda row: list(FAMILIES).index(row["kernels"]))
        result.tables = [table]
        save(result)


if __name__ == "__main__":
    main()
