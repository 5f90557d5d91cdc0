"""quantize against an oracle of neighbours, torch, ml_dtypes, gfloat and the exact reference."""

import dataclasses
import warnings

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import halfulp as hu
from halfulp.formats import BlockFormat, Format, block_names, get, get_block, names
from halfulp.kernels import engine, same_bits
from halfulp.rounding import Nearest, Stochastic, _kernels, quantize

from ..samples import drawn
from .oracle import inputs, rounded

inductor = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.mark.parametrize("name", ["bf16", "fp16", "e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_torch_casts(name, dtype, all_of, random_patterns, seed, needs_torch):
    if name == "e4m3fn":
        needs_torch("a cast to float8_e4m3fn that saturates")
    x = inputs(dtype, all_of, random_patterns)
    q = rounded(x, get(name), "nearest")
    if q is not None:
        assert same_bits(q, x.to(get(name).torch_dtype).to(dtype))


@pytest.mark.parametrize("name", ["bf16", "e5m2", "e4m3", "e4m3fn", "e3m4", "e5m2fnuz", "e4m3fnuz", "e3m2fn", "e2m1fn"])
def test_ml_dtypes(name, all_of, seed):
    format = get(name)
    x = all_of(torch.bfloat16).float()
    x = torch.cat([x[~x.isnan()], torch.randn(100_000) * format.smallest_normal * 4])
    theirs = x.numpy().astype(getattr(ml_dtypes, format.ml_dtypes_name)).astype(np.float32)
    policy = "inf" if format.infinities else "nan" if format.nan else "saturate"
    assert same_bits(quantize(x, format, overflow=policy), torch.from_numpy(theirs))


GFLOAT_MODES = {
    "nearest": gfloat.RoundMode.TiesToEven,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}
GFLOAT_FORMATS = ["e5m2", "e4m3fn", "e3m4", "e2m3fn", "e2m1fn"]


@pytest.mark.parametrize("name", GFLOAT_FORMATS)
@pytest.mark.parametrize("rounding", GFLOAT_MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gfloat(name, rounding, dtype, all_of):
    from gfloat import formats as theirs

    names = {"e5m2": "ocp_e5m2", "e4m3fn": "ocp_e4m3", "e3m4": "ieee_e3m4", "e2m3fn": "ocp_e2m3", "e2m1fn": "ocp_e2m1"}
    if name == "e3m4":
        return
    format = get(name)
    x = all_of(dtype)
    x = x[x.isfinite() & (x.abs().double() <= format.max)]
    info = getattr(theirs, f"format_info_{names[name]}")
    wanted = gfloat.round_ndarray(info, x.double().numpy(), GFLOAT_MODES[rounding], sat=True)
    assert same_bits(quantize(x, format, rounding, overflow="saturate").double(), torch.from_numpy(wanted))


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3fn", "e5m2"])
def test_sampled_blocks_of_all_float32(name, oracle, seed, needs_torch):
    """64 stretches of 4,096 consecutive words; benchmarks/ has all 2^32."""
    starts = torch.randint(-(2**31), 2**31 - 4096, (64, 1), dtype=torch.int64)
    x = (starts + torch.arange(4096)).to(torch.int32).view(torch.float32)
    q = quantize(x, name)
    assert same_bits(q, torch.from_numpy(oracle(x.double().numpy(), get(name), "nearest")).float())
    if name == "e4m3fn":
        needs_torch("a cast to float8_e4m3fn that saturates")
    assert same_bits(q, x.to(get(name).torch_dtype).float())


def test_float64_is_rounded_once():
    x = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 3 * 2**-8 - 2**-50], dtype=torch.float64)
    assert quantize(x, "bf16").tolist() == [1 + 2**-7, 1.0, 1 + 2**-7]


def test_a_wider_format_changes_nothing(random_patterns, seed):
    x = random_patterns(torch.float32, 1000)
    assert same_bits(quantize(x, "fp32"), x)
    assert same_bits(quantize(x, "fp64", "stochastic"), x)
    assert same_bits(quantize(x.bfloat16(), "fp32", "up"), x.bfloat16())
    out = torch.empty(1000)
    assert quantize(x, "fp32", out=out) is out
    assert same_bits(out, x)


@pytest.mark.parametrize("rounding", ["nearest", Stochastic(1)])
def test_shapes_and_strides(rounding):
    x = torch.randn(6, 10, 14)
    flat = quantize(x.contiguous().view(-1), "e4m3fn", rounding).view(x.shape)
    cases = [x, x.transpose(0, 2).contiguous().transpose(0, 2), x.permute(2, 0, 1).contiguous().permute(1, 2, 0)]
    padded = torch.empty(6, 10, 20)
    padded[..., 3:17] = x
    cases.append(padded[..., 3:17])
    for y in cases:
        assert same_bits(quantize(y, "e4m3fn", rounding), flat)
        out = torch.empty_like(y)
        assert quantize(y, "e4m3fn", rounding, out=out) is out
        assert same_bits(out, flat)
        out = torch.empty(14, 10, 6).permute(2, 1, 0)
        assert same_bits(quantize(y, "e4m3fn", rounding, out=out), flat)
    row = x[:1, :1].expand(6, 10, 14)
    assert same_bits(quantize(row, "e4m3fn"), quantize(x[:1, :1], "e4m3fn").expand(6, 10, 14))
    for shape in [(), (0,), (3, 0, 2), (1,)]:
        y = torch.full(shape, 1.07)
        assert quantize(y, "e5m2", rounding).shape == shape
        assert same_bits(quantize(y, "e5m2", out=torch.empty(shape)), torch.full(shape, 1.0))


@pytest.mark.parametrize("rounding", ["nearest", "up", Stochastic(1)])
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3fn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_place_and_overlapping(rounding, name, dtype):
    x = torch.randn(1000, dtype=dtype)
    wanted = quantize(x, name, rounding)
    y = x.clone()
    quantize(y, name, rounding, out=y)
    assert same_bits(y, wanted)
    y = torch.cat([x, x[:1]])
    quantize(y[:-1], name, rounding, out=y[1:])
    assert same_bits(y[1:], wanted)


def test_chunks_and_threads_change_nothing(seed):
    x = torch.randn(200_000)
    wanted = quantize(x, "fp16", Stochastic(3))
    assert same_bits(quantize(x[:70_001], "fp16", Stochastic(3)), wanted[:70_001])
    torch.set_num_threads(2)
    try:
        assert same_bits(quantize(x, "fp16", Stochastic(3)), wanted)
    finally:
        torch.set_num_threads(1)


@inductor
def test_compiled_is_eager(random_patterns, seed, needs_torch):
    """One graph of every format and mode, default options: nothing elided, merged or recompiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # reset() leaves what other tests of this process counted
    names = ["bf16", "tf32", "e5m2", "e4m3fnuz", "e8m0", torch.float16]
    modes = ["nearest", "toward_zero", "up", "down", Stochastic(3), Stochastic()]

    def every(x, counter):
        done = [quantize(x, name, mode, counter=counter) for name in names for mode in modes]
        twice = [quantize(x, "fp16", Stochastic()), quantize(x, "fp16", Stochastic())]
        into = torch.empty_like(x)
        quantize(x * 2, "tf32", out=into)
        quantize(into, "bf16", Stochastic(), out=into)
        blocks = [quantize(x.view(-1, 80), block, Stochastic(1)) for block in ("mxfp4", "nvfp4")]
        return [*done, *twice, into, *blocks]

    compiled = torch.compile(every, fullgraph=True)
    x = random_patterns(torch.float32, 8000)
    x = torch.where(x.isfinite(), x, 1.0)
    for counter in range(4):
        torch.manual_seed(seed)
        wanted = every(x, counter)
        torch.manual_seed(seed)
        got = compiled(x, counter)
        differing = [i for i, (a, b) in enumerate(zip(got, wanted)) if not same_bits(a, b)]
        if differing == [*range(5, 36, 6), 36, 37, 38]:  # those without a seed, and no others
            needs_torch("random operators that Inductor keeps in order")
        assert not differing
        assert not torch.equal(got[36], got[37])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@inductor
def test_a_pair_of_casts_is_not_elided():
    torch._dynamo.reset()
    x = torch.randn(1000)
    compiled = torch.compile(lambda x: quantize(x, "bf16") - x, fullgraph=True)
    assert same_bits(compiled(x), x.bfloat16().float() - x)
    assert compiled(x).abs().max() > 0


def test_no_gradient():
    x = torch.randn(5, requires_grad=True)
    assert not quantize(x, "bf16").requires_grad
    assert not quantize(torch.nn.Parameter(torch.randn(5)), "fp32").requires_grad


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: quantize([1.0], "bf16"), TypeError, "torch.Tensor"),
        (lambda x: quantize(x.int(), "bf16"), TypeError, r"x.to\(torch.float32\)"),
        (lambda x: quantize(x.to(torch.complex64), "bf16"), TypeError, "view_as_real"),
        (lambda x: quantize(x.to(torch.float8_e5m2), "bf16"), TypeError, "convert it"),
        (lambda x: quantize(x, "bf61"), ValueError, "did you mean"),
        (lambda x: quantize(x, "bf16", "nearst"), ValueError, "did you mean nearest"),
        (lambda x: quantize(x, "bf16", Nearest), TypeError, r"Nearest\(\)"),
        (lambda x: quantize(x, "e4m3fn", overflow="inf"), ValueError, "no infinities"),
        (lambda x: quantize(x, "bf16", overflow="wrap"), ValueError, "saturate"),
        (lambda x: quantize(x.half(), "bf16"), ValueError, r"x.to\(torch.float32\)"),
        (lambda x: quantize(x.half(), "e8m0"), ValueError, "cannot hold"),
        (lambda x: quantize(x, "e11m3"), ValueError, "torch.float64"),
        (lambda x: quantize(x.bfloat16(), "fp16", overflow="saturate"), ValueError, "cannot hold"),
        (lambda x: quantize(x, "bf16", out=torch.empty(3)), ValueError, "shape"),
        (lambda x: quantize(x, "bf16", out=x.double()), ValueError, "dtype"),
        (lambda x: quantize(x, "bf16", out=torch.zeros(4, requires_grad=True)), ValueError, "no_grad"),
        (lambda x: quantize(x, Format("low", 5, 2, bias=1040)), NotImplementedError, "bias"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.ones(4))


def test_a_format_is_a_constant_of_the_graph(fresh_compiler, seed):
    """Any formats in turn, one graph for each: eager bits, equal formats share a graph, and so do equal seeds."""
    mine = [Format("mine", 4, 4), Format("mine", 5, 2, bias=20), Format("other", 5, 5, infinities=False, nan=None)]
    blocks = [get_block(name) for name in drawn([*block_names()], 3, "blocks in graphs")]
    blocks += [BlockFormat("my blocks", mine[0], get("e8m0"), size) for size in (8, 16)]
    scalars = [get(name) for name in names() if name != "fp64"]
    formats = [*drawn(scalars, 6, "formats in graphs"), *mine, *blocks]
    counter = CompileCounter()
    compiled = torch.compile(quantize, fullgraph=True, backend=counter)
    x = torch.randn(64)
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({limit: 4 * len(formats)}):
        for _ in range(2):
            for format in formats:
                assert same_bits(compiled(x, format), quantize(x, format)), format
                assert same_bits(compiled(x, dataclasses.replace(format)), quantize(x, format)), format
        assert counter.frame_count == len(formats)
        seeds = [3, 4, 2**63 + 1]
        for value in 2 * seeds:
            assert same_bits(compiled(x, mine[0], Stochastic(value)), quantize(x, mine[0], Stochastic(value)))
    assert counter.frame_count == len(formats) + len(seeds)


def test_a_traced_format_that_does_not_fit_is_named(fresh_compiler):
    compiled = torch.compile(quantize, backend="eager")
    with pytest.raises(ValueError, match="float16 cannot hold the values of bf16"):
        compiled(torch.ones(3, dtype=torch.float16), get("bf16"))
    with pytest.raises(ValueError, match="the elements of mxfp4 saturate"):
        compiled(torch.ones(3), get_block("mxfp4"), overflow="inf")


@pytest.mark.parametrize("name", ["e4m3fn", "mxfp8_e4m3"])
@pytest.mark.parametrize("rounding", ["nearest", Stochastic(1)])
@pytest.mark.parametrize("step", [1, 2])
def test_what_is_written_is_seen_as_written(name, rounding, step):
    """The version counter moves: autograd refuses a backward over it, where it would give the gradient of others."""
    x = torch.randn(64 * step, requires_grad=True)
    y = (x * 2)[::step]
    product = (y * y).sum()
    with torch.no_grad():
        into = y.detach()
        before = into._version
        quantize(into.clone(), name, rounding, out=into)
    assert into._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("name", ["e4m3fn", "bf16", torch.float16])
def test_who_watches_operators_sees_every_rounding(name):
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen, x = [], torch.randn(5)
    alone = quantize(x, name)
    with Watch():
        assert same_bits(quantize(x, name), alone)
        quantize(x, name, out=torch.empty(5))
    assert [one for one in seen if "quantize" in one] == ["halfulp.quantize.default", "halfulp.quantize_into.default"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(lambda x: quantize(x, name), (x,))
    assert "halfulp::quantize" in str(traced.graph)
    y = torch.randn(5)
    assert same_bits(traced(y), quantize(y, name))


def test_no_engine_but_the_chosen_one_rounds(monkeypatch):
    x = torch.randn(5)
    wanted = quantize(x, "e4m3fn")
    monkeypatch.setattr("halfulp.rounding._quantize.round_memory", None)
    with engine("reference"):
        assert same_bits(quantize(x, "e4m3fn"), wanted)


def test_outs_that_torch_or_memory_do_not_allow(seed):
    with torch.inference_mode():
        x = torch.randn(8)
    with pytest.raises(ValueError, match="inference"):
        quantize(x, "bf16", out=x)
    with torch.inference_mode():
        assert quantize(x, "bf16", out=x) is x
    turned = torch.complex(torch.zeros(4), torch.ones(4)).conj().imag
    with pytest.raises(ValueError, match="clone"):
        quantize(torch.randn(4), "bf16", out=turned)
    for dtype, format in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.bfloat16, "e4m3fn")):
        y = torch.randn(32).to(dtype)
        wanted = quantize(y[:-5], format)
        quantize(y[:-5], format, out=y[5:])
        assert torch.equal(y[5:], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rounding", [hu.Nearest(), hu.Stochastic(seed=3)], ids=lambda mode: mode.name)
def test_large_results_stored_past_the_caches_have_the_same_bits(dtype, rounding, seed, monkeypatch):
    monkeypatch.setattr(_kernels, "LEAST_STREAMED_BYTES", 1)
    used: list[bool] = []
    prepare = _kernels.prepare_rounding_plan
    monkeypatch.setattr(
        _kernels, "prepare_rounding_plan", lambda *given: (used.append(given[2:] == (True,)), prepare(*given))[1]
    )
    generator = torch.Generator().manual_seed(seed)
    for count in (1, 31, 32, 33, 16_384, 40_007):
        x = torch.randn(count + 1, generator=generator, dtype=torch.float64).to(dtype)
        for start, aligned in ((0, True), (1, False)):  # one that is not aligned is stored as ever
            given, room = x[start : start + count], torch.full((count + 2,), 7.0, dtype=dtype)
            used.clear()
            with engine("reference"):
                wanted = hu.quantize(given, "e4m3fn", rounding)
            found = hu.quantize(given, "e4m3fn", rounding, out=room[start : start + count])
            assert same_bits(found, wanted)
            assert any(used) == aligned
            assert (room[start + count :] == 7.0).all(), "written beyond the end"
        used.clear()
        own = x[:count].clone()
        assert same_bits(hu.quantize(own, "e4m3fn", rounding, out=own), hu.quantize(x[:count], "e4m3fn", rounding))


def test_subnormal_values_survive_a_process_that_flushes():
    x = torch.tensor([2.0**-127, 2.0**-126, 1.0])
    expected = quantize(x, "e8m0").view(torch.int32).tolist()
    torch.set_flush_denormal(True)
    try:
        got = quantize(x, "e8m0").view(torch.int32).tolist()
    finally:
        torch.set_flush_denormal(False)
    assert got == expected == [0x00400000, 0x00800000, 0x3F800000]
