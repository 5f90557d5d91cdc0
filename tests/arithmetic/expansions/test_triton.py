"""Expansions' functions and reductions by Triton: bit for bit plain torch's, on CUDA or in Triton's interpreter."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.arithmetic import names, pointwise
from halfulp.arithmetic._pointwise import (
    ANGLE_FUNCTION_NAMES,
    EXPANSION_FUNCTION_BY_NAME,
    _make_rounding_kernels,
    _make_scaled_kernels,
    evaluate_scaled_operands_in_float64,
    make_pointwise_kernels,
    round_under_scale,
)
from halfulp.arithmetic._reductions import _Reduction, average, product, total
from halfulp.kernels import same_bits
from halfulp.kernels._trace import _product_error
from halfulp.kernels.triton._expansions import PointwiseKernel, ReductionKernel
from halfulp.kernels.triton._writer import COMPILE_OPTIONS, load_triton_module

from ...kernels.triton.interpreted import interpreted
from ...kernels.triton.source import check_functions

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SHAPES = [((70,), 0), ((3, 70), 1), ((70, 3), 0), ((5, 33, 4), 1), ((40, 50), 0), ((3, 4, 5), (0, 2)), ((0, 3), 0)]
LONG = [((2000, 70), 0), ((140_000,), 0)]
SCALED = [(name, dtype) for name in ("add", "mul", "div") for dtype in DTYPES]
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
REDUCTIONS = [
    _Reduction("sum", torch.float32, 2, 2, True, 2, torch.float32),
    _Reduction("mean", torch.bfloat16, 2, 2, True, 2, torch.bfloat16),
    _Reduction("prod", torch.float32, 3, 3, True, 3, torch.float32),
    _Reduction("sum", torch.float64, 2, 2, False, 2, torch.float64),
]


def _expansion(shape, dtype, components, generator):
    """Components of numbers of many magnitudes, as they come out of an operator, and some special ones."""
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    x = x.sign() * (4 * x.abs()).exp().clamp(max=2.0**20)  # the largest angle
    if x.numel() > 30:
        x.view(-1)[::13] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0])[
            torch.randint(0, 6, (x.view(-1)[::13].numel(),), generator=generator)
        ].double()
    parts = []
    for _ in range(components):
        parts.append(x.to(dtype))
        rest = torch.randn(shape, dtype=torch.float64, generator=generator) * parts[-1].double() * 2.0**-54
        x = rest if dtype == torch.float64 else x - parts[-1].double()
        x = x.nan_to_num(0.0, 0.0, 0.0)
    return tuple(parts)


def _sample(kept):
    """Every function, dtype and number of components, or a share of them that the seed picks."""
    cases = [(name, dtype, n) for name in names() for dtype in DTYPES for n in (1, 2, 3)]
    return cases[kept[0] :: kept[1]]


def compare(seed, device, share=0, shares=1):
    """Which of a share of the cases differ between Triton on a device and plain torch on the CPU."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    generator, found = torch.Generator().manual_seed(seed), []

    def differ(run, parts):
        with hu.kernels.engine("reference"):
            wanted = run(*parts)
        with hu.kernels.engine("triton"):
            made = run(*([part.to(device) for part in operand] for operand in parts))
        return not all(same_bits(one.cpu(), other) for one, other in zip(made, wanted, strict=True))

    with np.errstate(all="ignore"):
        for name, dtype, components in _sample((share, shares)):
            count = EXPANSION_FUNCTION_BY_NAME[name].operands
            shapes = ((7, 33), (33,), (7, 1)) if count > 1 else ((7, 33),)
            parts = [_expansion(shape, dtype, components, generator) for shape in shapes[:count]]
            if name in ANGLE_FUNCTION_NAMES:  # which take angles up to 2^20
                parts = [tuple(part * 2.0**-8 for part in operand) for operand in parts]
            if differ(functools.partial(pointwise, name, components=components, dtype=dtype), parts):
                found.append(f"{name} of {components} x {dtype}")
        for name, dtype, components in [(*case, n) for case in SCALED for n in (1, 2)][share::shares]:
            parts = [_expansion(shape, dtype, components, generator) for shape in ((7, 33), (33,))]
            scales = [torch.tensor(2.0**k) for k in (-30, 5)]

            def scaled(*operands, name=name, dtype=dtype, n=components):
                *operands, (here, *_) = operands
                made, size = evaluate_scaled_operands_in_float64(name, list(zip(operands, (here, None))), n)
                return (
                    *made,
                    size,
                    *(x for keeps in (False, True) for x in round_under_scale(made, here, n, dtype, keeps)),
                )

            if differ(scaled, [*parts, (scales[0],)]) or differ(scaled, [*parts, (scales[1],)]):
                found.append(f"{name} of {components} x {dtype} with a scale")
        cases = [(run, dtype, n) for run in (total, average, product) for dtype in DTYPES for n in (1, 2, 3)]
        for run, dtype, components in cases[share::shares]:
            for shape, dim in SHAPES + LONG * (components == 2 and device == "cuda"):
                parts = [_expansion(shape, dtype, components, generator)]
                if run is product:  # which would overflow
                    parts = [
                        tuple(part.sign() * part.abs() ** 0.1 if k == 0 else part for k, part in enumerate(*parts))
                    ]
                if differ(lambda parts, run=run, dim=dim, n=components: run(tuple(parts), dim, n), parts):
                    found.append(f"{run.__name__} of {components} x {dtype}, {shape} along {dim}")
    return found


def _interpreted(seed):
    """`compare` in Triton's interpreter, whose fused product rounds twice: here it does not."""
    from triton.runtime import interpreter

    def fused(_, x, y, z):
        x, y, p = (torch.from_numpy(np.ascontiguousarray(data)) for data in (x.data, y.data, -z.data))
        return interpreter.TensorHandle(_product_error(x, y, p).numpy(), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fused
    return compare(seed, "cpu", seed % 9, 9)


def _sources(kept):
    for name, dtype, components in _sample(kept):
        count = EXPANSION_FUNCTION_BY_NAME[name].operands
        elements = (
            make_pointwise_kernels(name, ((dtype, components),) * count, components, dtype)
            if name in EXPANSION_FUNCTION_BY_NAME
            else None
        )
        if elements is not None:
            trace, numbers = elements.recorded_trace
            yield name, PointwiseKernel(trace, numbers).source
    for one in REDUCTIONS:
        yield one.kind, ReductionKernel(one.device_functions, one.inputs, one.components).source


def test_every_function_is_written_in_what_triton_can_compile(seed):
    for _, text in _sources((seed % 7, 7)):
        assert "run" in check_functions(text)


def test_interpreted_functions_equal_plain_torch_bit_for_bit(seed):
    pytest.importorskip("triton", "3.3", reason="Triton is not installed, or older than 3.3, which has no gather")
    assert interpreted("tests.arithmetic.expansions.test_triton", f"test._interpreted({seed})") == "[]"


@pytest.mark.parametrize("capability", [80, 90])
def test_the_compiler_fuses_products_errors_alone(capability, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", "3.5", reason="Triton is not installed, or older than 3.5")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def instructions(text, dtypes, numbers, constants, warps):
        kernel = load_triton_module(text)["run"]
        types = {f"input{k}": POINTERS[dtype] for k, dtype in enumerate(dtypes[0])}
        types |= {f"output{k}": POINTERS[dtype] for k, dtype in enumerate(dtypes[1])}
        whole = {(position,): [["tt.divisibility", 16]] for position in range(len(types))}
        types |= numbers | dict.fromkeys(constants, "constexpr")
        given = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = triton.compiler.ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, given, whole)
        options = {**COMPILE_OPTIONS, "num_warps": warps}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]

    def check(ptx, errors):
        words = {word for line in ptx.splitlines() for word in line.split() if word[:1].isalpha()}
        assert not [word for word in words if ".ftz" in word or ".approx" in word or ".full" in word]
        assert (errors == 0) == ("fma.rn" not in ptx)

    cases = [("add", torch.float32), ("mul", torch.float32), ("exp", torch.float64), ("div", torch.bfloat16)]
    kinds = {
        name: make_pointwise_kernels(name, ((dtype, 2),) * EXPANSION_FUNCTION_BY_NAME[name].operands, 2, dtype)
        for name, dtype in cases
    }
    half = ((torch.float16, 2, True),) * 2
    kinds |= {"mul of scaled": _make_scaled_kernels("mul", half, 1)}
    kinds |= {"add under scale": _make_rounding_kernels(1, 2, torch.float16, True)}
    for name, elements in kinds.items():
        trace, numbers = elements.recorded_trace
        constants = {f"mode{k}": 0 for k in range(len(elements.stored))} | {"WHOLE": True, "TILE": 1024}
        text = PointwiseKernel(trace, numbers).source
        given = {"tables": "*fp64", "count": "i64", "columns": "i64"}
        ptx = instructions(text, (elements.stored, elements.written), given, constants, 4)
        check(ptx, name in ("mul", "exp", "div"))
        assert ptx.count("ld.global.v"), "16 bytes at a time"
    for one in REDUCTIONS:
        stored, written = (one.stored,) * one.inputs, (one.dtype,) * one.components
        text = ReductionKernel(one.device_functions, one.inputs, one.components).source
        given = dict.fromkeys(("rows", "columns", "length", "segments", "divisor", "several", "tiles"), "i64")
        for lanes in (32, 128):
            constants = {"LANES": lanes}
            ptx = instructions(text, (stored, written), given, constants, 1 if lanes == 32 else 4)
            check(ptx, one.kind in ("prod", "mean"))


@pytest.mark.cuda
@pytest.mark.parametrize("share", range(4))
def test_functions_on_a_gpu_equal_plain_torch_bit_for_bit(seed, share):
    """A quarter of the cases in all, which the seed picks: most of the time goes into compiling."""
    pytest.importorskip("triton", reason="Triton is not installed")
    assert compare(seed, "cuda", 4 * share + seed % 4, 16) == []
