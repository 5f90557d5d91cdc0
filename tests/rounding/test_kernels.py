"""Rounding by Triton, elements and blocks: bit for bit the reference, on CUDA or in Triton's interpreter."""

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.formats import BlockFormat, e4m3fn, e8m0
from halfulp.kernels import IndexMap, address, cut_into_chunks, run_chunks, same_bits
from halfulp.kernels._device_function import ElementTraceBuilder, PointerTableFunction
from halfulp.kernels._operations import load32
from halfulp.kernels.triton import _launch, _writer
from halfulp.kernels.vector import _processor
from halfulp.kernels.vector._machine_function import get_array_address
from halfulp.kernels.vector._table_loop import compile_pointer_table_kernel, compile_single_row_kernel
from halfulp.rounding import _blocks as blocks
from halfulp.rounding import _kernels, get_rounding
from halfulp.rounding._blocks import make_block_target
from halfulp.rounding._kernels import choose_container_functions, make_triton_plan
from halfulp.rounding._quantize import find_target
from halfulp.rounding._random_bits import mix64
from halfulp.rounding._target import get_word_layout, make_target_constants

from ..kernels.triton.compiled import inexact, instructions
from ..kernels.triton.interpreted import interpreted
from ..kernels.triton.source import check_source
from . import triton_cases

MODULE = "tests.rounding.triton_cases"
SHARES, TRIED = 12, 4  # of the cases, each compiled on the way, and how many of them the seed picks for a GPU


def test_every_kernel_is_written_in_what_triton_can_compile():
    plans = [case[-1] for case in (*triton_cases.kernels(), *triton_cases.block_kernels())]
    assert len(plans) > 150
    paths = set()
    for dtype, mode, name, policy, _ in triton_cases.kernels():
        target = find_target(name, get_rounding(triton_cases.mode_of(mode)), policy, dtype)
        paths.add(make_target_constants(target, get_word_layout(dtype)).rounding_path)
    assert paths == {"fixed", "adder", "scaled", "packed"}
    for plan in plans:
        assert {"element", "run"} <= check_source(plan.kernel.source)
        if plan.largest_kernel is not None:
            assert {"element", "run"} <= check_source(plan.largest_kernel.source)


@pytest.mark.skipif(not _processor.has_vector_fma(_processor.find_vector_bits()), reason="another processor")
@pytest.mark.parametrize("policy", ["saturate", "nan"])
def test_what_saturates_is_limited_by_one_instruction(policy, assembly_of, monkeypatch, tmp_path):
    """Ahead of the adder: a comparison and a choice behind it take 5 % longer on AVX2."""
    written = assembly_of("haswell")
    monkeypatch.setenv("HALFULP_CACHE_DIR", str(tmp_path))
    target = find_target("e4m3fn", get_rounding("nearest"), policy, torch.float32)
    compile_single_row_kernel("limits", _kernels.record_rounding_kernel(torch.float32, target))
    assert ("vminps" in "".join(written)) == (policy == "saturate")


CASES = {
    ("e4m3fn", "nearest"): (torch.bfloat16, torch.float32, torch.float64),
    ("e4m3fn", "stochastic"): (torch.float16, torch.float32, torch.float64),
    ("bf16", "stochastic"): (torch.float32, torch.float64),
    ("e8m0", "up"): (torch.bfloat16,),
    ("mxfp8_e4m3", "nearest"): (torch.bfloat16, torch.float64),
    ("mxfp4_nearest", "stochastic"): (torch.float16,),
    ("nvfp4", "nearest"): (torch.bfloat16, torch.float32),
    ("odd", "down"): (torch.float32,),
}
VECTORS = {2: "global.v4.b32", 4: "global.v4.b32", 8: "global.v2.b64"}


def _plan(dtype, name, mode):
    rounding = get_rounding(triton_cases.mode_of(mode))
    block = next((block for block in triton_cases.BLOCKS if block.name == name), None)
    if block is None:
        return make_triton_plan(dtype, find_target(name, rounding, None, dtype))
    target = make_block_target(block, rounding, None, dtype)
    return blocks.make_block_triton_plan(dtype, target)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "rounding", "dtype"), [(*key, dtype) for key, dtypes in CASES.items() for dtype in dtypes], ids=str
)
def test_the_compiler_fuses_and_flushes_nothing(name, rounding, dtype, capability, monkeypatch, tmp_path):
    """Down to machine code, which needs no device; whole vectors are 16 bytes at a time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plan = _plan(dtype, name, rounding)
    for kernel in (plan.kernel, plan.largest_kernel):
        if kernel is None:
            continue
        assert inexact(instructions(kernel, capability, aligned=False, ragged=bool(kernel.table.block_size))) == []
        if not kernel.has_ragged_blocks(1024):
            found = instructions(kernel, capability, aligned=True)
            assert inexact(found) == []
            assert f"ld.{VECTORS[dtype.itemsize]}" in found
            assert kernel is not plan.kernel or f"st.{VECTORS[dtype.itemsize]}" in found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_words_between_two_16_bit_numbers_go_to_the_nearest(dtype, seed):
    """The device functions that Triton's kernels store by, compiled for the processor, beside torch's casts."""
    element = ElementTraceBuilder(2)
    source, target = element.arrays
    choose_container_functions(dtype, inexact=True)["store"](target, element.index, load32(source, element.index))
    kernel = compile_pointer_table_kernel(f"narrowed_{dtype}".replace(".", "_"), PointerTableFunction(element.trace, 2))
    wide = triton_cases.elements(torch.float32, 2**18, seed)
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    between = (
        halves.view(torch.int32)[:, None] + torch.tensor([0, 0x800, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000])
    ).int()
    x = torch.cat([wide, between.view(torch.float32).flatten(), wide * 2.0**-20])
    out = torch.empty(x.numel(), dtype=dtype)
    whole = cut_into_chunks(IndexMap.whole(tuple(x.shape)), 0)
    pointers, rows = np.array([address(x), address(out)], np.int64), np.zeros(1, np.int64)
    run_chunks(kernel, whole[:, 2], *map(get_array_address, (whole, pointers, rows)), 0, 0, 0)
    assert same_bits(out, x.to(dtype))


def test_a_kernel_that_cannot_be_built_is_told_and_leaves_the_result_right(monkeypatch):
    def refuse(source):
        raise RuntimeError("no compiler here")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(hu.kernels._engine, "_explain_missing_package", lambda name: "")
    monkeypatch.setattr(hu.kernels._engine, "_fallback_counts", type(hu.kernels._engine._fallback_counts)())
    monkeypatch.setattr(_writer, "load_triton_module", refuse)
    monkeypatch.setattr(_launch, "_checked_kernel_by_key", {})
    for made in (_kernels.make_tensor_kernel, make_triton_plan, blocks.make_block_triton_plan):
        made.cache_clear()  # whose modules may be loaded
    x = torch.randn(4, 64)
    for name, what in (("e4m3", "quantize of"), ("mxfp4", "quantize in blocks of")):
        with hu.kernels.engine("reference"):
            wanted = hu.quantize(x, name)
        told = rf"no Triton kernel for {what} torch.float32 on cpu \(RuntimeError: no compiler here\)"
        with hu.kernels.engine("triton"), pytest.warns(RuntimeWarning, match=told):
            assert same_bits(hu.quantize(x, name), wanted)


def test_a_block_too_long_for_a_tile_is_counted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(hu.kernels._engine, "_explain_missing_package", lambda name: "")
    x, format = torch.randn(2, 8192), BlockFormat("too_long", e4m3fn, e8m0, 8192)
    with hu.kernels.engine("reference"):
        wanted = hu.quantize(x, format)
    text = "blocks: blocks of more than 4096 elements are rounded by the reference"
    before = hu.kernels.count_fallbacks().get(text, 0)
    with hu.kernels.engine("triton"):
        assert same_bits(hu.quantize(x, format), wanted)
    assert hu.kernels.count_fallbacks()[text] == before + 1


# on a device, or interpreted ---------------------------------------------------------------------------------


def test_interpreted_rounding_equals_the_reference_bit_for_bit(seed):
    """A quarter of the cases, which the seed picks."""
    assert interpreted(MODULE, f"test.compare({seed}, 'cpu', {seed % TRIED}, {TRIED})") == "[]"


def test_interpreted_elements_beyond_2_to_the_32_have_their_own_bits(seed):
    assert interpreted(MODULE, f"test.beyond({seed})") == "[]"


@pytest.mark.cuda
@pytest.mark.parametrize("share", range(TRIED))
def test_rounding_on_a_gpu_equals_the_reference_bit_for_bit(seed, share):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert triton_cases.compare(seed, "cuda", (seed + share) % SHARES, SHARES) == []


@pytest.mark.cuda
def test_rounding_waits_for_nothing(nothing_waits):
    """Neither elements nor blocks under a scale of the tensor's own are waited for, once their kernel was compared."""
    pytest.importorskip("triton", reason="Triton is not installed")
    x = torch.randn(64, 256, device="cuda").bfloat16()
    for name in ("e4m3fn", "mxfp4", "nvfp4"):
        first = hu.quantize(x, name)
        with nothing_waits():
            second = hu.quantize(x, name)
        assert same_bits(first, second)
    assert not any("no Triton kernel for quantize" in text for text in hu.kernels.count_fallbacks())


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["e4m3fn", "mxfp8_e4m3"])
def test_more_than_2_to_the_31_elements_are_rounded(name, seed):
    pytest.importorskip("triton", reason="Triton is not installed")
    first, count = 2**31 - 1024, 4096
    if torch.cuda.mem_get_info()[0] < 3 * 2 * (first + count):
        pytest.skip("too little memory")
    tail = triton_cases.rows(torch.bfloat16, seed, count)[8]
    x = torch.zeros(first + count, dtype=torch.bfloat16, device="cuda")
    x[first:] = tail.cuda()
    hu.quantize(x, name, hu.Stochastic(seed=7), out=x)
    assert same_bits(x[first:].cpu(), triton_cases.wanted_from(tail, name, mix64(7, 0), first))
    assert not x[:first].any()
