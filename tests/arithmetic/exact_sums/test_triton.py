"""Exact sums by Triton: bit for bit those of torch's integers, on CUDA or in Triton's interpreter."""

import importlib
import subprocess
import warnings

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.arithmetic import _exact_sums as kernels
from halfulp.arithmetic._exact_sum_kernels import (
    FORMAT_BY_ELEMENT_DTYPE,
    LIMB_COUNT,
    WORD_COUNT,
    LimbRange,
    make_carry_and_rounding_kernel,
    make_term_adding_kernel,
)
from halfulp.kernels import same_bits

from ...kernels.triton.interpreted import interpreted

DTYPES = tuple(FORMAT_BY_ELEMENT_DTYPE)
KINDS = ("near", "wide", "special", "cancelled", "minus zero")


def _rows(kind, shape, dtype, generator):
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    if kind == "minus zero":
        return torch.full(shape, -0.0, dtype=dtype)
    if kind == "wide":
        reach = {torch.float16: 24, torch.float64: 1060}.get(dtype, 140)
        x = torch.ldexp(x, torch.randint(-reach, reach // 2, shape, generator=generator))
    if kind == "cancelled":
        x[:, 1::2] = -x[:, : x.shape[1] - 1 : 2].flip(1)
    if kind == "special":
        x[torch.rand(shape, generator=generator) < 0.1] = 0.0
        x[:, ::61] = torch.inf
        x[-1, 1::97] = -torch.inf
    return x.to(dtype)


def compare(seed, device, share=0, shares=1):
    """Which of a share of the cases differ between Triton on a device and torch's integers on the CPU."""
    warnings.simplefilter("error")
    generator, found = torch.Generator().manual_seed(seed), []
    shapes = [(2, 33), (1, 700), (2, 4999), (1, 0), (3, 1), (2, 128)]
    cases = [(dtype, product, kind) for dtype in DTYPES for product in (False, True) for kind in KINDS]
    for number, (dtype, product, kind) in enumerate(cases[share::shares]):
        shape = shapes[(seed + number) % len(shapes)] if shares > 1 else (3, 70_000)
        x, y = (_rows(kind, shape, dtype, generator) for _ in range(2))
        y = y if product else None
        here = x.to(device), y.to(device) if product else None
        to = DTYPES[(seed + number) % 4]
        with hu.kernels.engine("reference"):
            words, total = kernels.sum_rows(x, y, None), kernels.sum_rows(x, y, to)
            wanted = words, total, kernels.round_accumulators(words, dtype)
        with hu.kernels.engine("triton"), np.errstate(all="ignore"):
            made = (
                kernels.sum_rows(*here, None),
                kernels.sum_rows(*here, to),
                kernels.round_accumulators(words.to(device), dtype),
            )
        if not all(same_bits(one.cpu(), other) for one, other in zip(made, wanted)):
            found.append(f"{kind} of {dtype}, {shape}, product {product}")
    return found


def unsettled(device):
    """Whether any words, as sums of partials are, give torch's roundings."""
    generator = torch.Generator().manual_seed(3)
    choices = torch.tensor([0, 1, -1, 2**32 - 1, 2**32, -(2**32), 2**62, -(2**62), -(2**63)])
    words = choices[torch.randint(0, len(choices), (4, WORD_COUNT), generator=generator)]
    words[0, :LIMB_COUNT], words[0, 0] = 2**32 - 1, 2**32  # a carry through all
    words[1, :LIMB_COUNT], words[1, 0] = 0, -1  # a borrow
    words[:, LIMB_COUNT - 2 : LIMB_COUNT] >>= 32
    words[:, LIMB_COUNT:] = torch.tensor([[0, 0, 5, 5], [0, 0, 0, 1], [1, 0, 0, 1], [2, 1, 0, 3]])
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        made = [
            kernels._round_windows(by, words.to(on), LimbRange(), dtype)
            for by, on in (("triton", device), ("reference", "cpu"))
        ]
        found.append(same_bits(made[0].cpu(), made[1]))
    return found


@pytest.mark.parametrize("part", range(2))
def test_interpreted_sums_equal_torchs_bit_for_bit(seed, part):
    """A share of the cases, which the seed picks."""
    share = 2 * (seed % 4) + part
    assert interpreted("tests.arithmetic.exact_sums.test_triton", f"test.compare({seed}, 'cpu', {share}, 8)") == "[]"


def test_interpreted_carries():
    assert interpreted("tests.arithmetic.exact_sums.test_triton", "test.unsettled('cpu')") == str([True] * 2)


@pytest.mark.cuda
def test_sums_on_a_gpu_equal_torchs_bit_for_bit(seed):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert compare(seed, "cuda") == []
    assert compare(seed, "cuda", 0, 2) == []
    assert unsettled("cuda") == [True] * 2


@pytest.mark.cuda
def test_a_sum_waits_for_nothing():
    x = torch.randn(300, 300, device="cuda")
    hu.exact_sum(x, 0)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hu.exact_sum(x, 0)
        hu.exact_sum(x)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("product", [False, True])
def test_the_compiler_loads_whole_vectors_and_spills_nothing(product, capability, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", "3.5", reason="Triton is not installed, or older than 3.5")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptxas = importlib.import_module("triton.backends.nvidia.compiler").get_ptxas(capability).path

    def compiled(table):
        kernel = kernels._compile_table_kernel("triton", table)
        names = kernel.triton_function.arg_names
        types = {"chunks": "*i64", "rows": "*i64", "width": "i64", "aligned": "constexpr"}
        source = triton.compiler.ASTSource(
            kernel.triton_function, {name: types[name] for name in names}, {(names.index("aligned"),): True}
        )
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.options).asm["ptx"]
        (tmp_path / "kernel.ptx").write_text(ptx)
        name = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [ptxas, "-v", f"--gpu-name={name}", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "0 bytes spill stores" in said
        return ptx

    for dtype in (torch.bfloat16, torch.float64):
        ptx = compiled(make_term_adding_kernel(dtype, product, LimbRange.for_terms(dtype, product)))
        assert any(f"ld.global.v{count}.b{bits}" in ptx for count, bits in ((2, 32), (4, 32), (2, 64)))
    compiled(make_carry_and_rounding_kernel(LimbRange.for_terms(torch.float32, product), torch.float32))
