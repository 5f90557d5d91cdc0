"""The CUDA twin: from the same recorded functions, bit for bit the reference, on CUDA or in Triton's interpreter."""

import contextlib
import math
import warnings

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp._torch_versions import HAS_GRADIENT_DTYPE
from halfulp.kernels import record_function, select
from halfulp.kernels.triton._writer import write_functions
from halfulp.optim._storage import STORE_BY_DTYPE
from halfulp.optim.step._triton_kernel import make_triton_step_kernel

from ...kernels.triton.interpreted import interpreted
from ...kernels.triton.source import check_source
from ...laws.optim.cases import (
    CODECS,
    RULES,
    STORE_NAMES,
    UPDATES,
    allowed,
    build,
    covering,
    differing,
    fit,
    snapshot,
    special_pairs,
)


def _kind(rule, update, store, codec, gradient, metered=False):
    parameter = torch.nn.Parameter(fit(special_pairs(0)[0], store))
    optimizer = build(rule, update, [parameter], store, state_dtype=CODECS[codec])
    plan = optimizer._make_plan(optimizer.param_groups[0], 0, STORE_BY_DTYPE[gradient])
    return plan.spec.lost_update_counting_spec if metered else plan.spec


def _check_source_of(*kind):
    kind = _kind(*kind)
    text = make_triton_step_kernel(kind).source
    assert text == make_triton_step_kernel.__wrapped__(kind).source, "not deterministic"
    assert {"element", "run"} <= check_source(text)


each_kind = pytest.mark.parametrize(("rule", "update", "store", "codec", "gradient"), covering())


@pytest.mark.sampled(1)
@each_kind
def test_every_kind_is_written_in_what_triton_can_compile(rule, update, store, codec, gradient):
    _check_source_of(rule, update, store, codec, gradient)


@pytest.mark.sampled(1)
@each_kind
def test_every_metered_kind_is_written_in_what_triton_can_compile(rule, update, store, codec, gradient):
    """All that differs from the plain kind is the meter."""
    _check_source_of(rule, update, store, codec, gradient, True)


def test_an_operation_without_a_form_on_blocks_is_refused():
    trace, (value,) = record_function(lambda x: [x.trace.emit("logarithm", (x,))], torch.float32, 1)
    with pytest.raises(NotImplementedError, match="logarithm of a device function has no form on Triton's blocks"):
        write_functions("logarithm", trace, (value.number,))


def test_constants_keep_their_bits():
    numbers = (-0.0, math.nan, 2.0**-149)
    trace, (value,) = record_function(lambda x: [select(x < numbers[0], numbers[1], numbers[2])], torch.float32, 1)
    (text,) = write_functions("chosen", trace, (value.number,))
    for written in (
        "real(tl.full([], 2147483648, tl.uint32))",
        "real(tl.full([], 2143289344, tl.uint32))",
        "tl.full([], 1.401298464324817e-45, tl.float32)",
    ):
        assert written in text
    assert np.float32(1.401298464324817e-45) == np.float32(2.0**-149)


def test_the_engine_names_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with hu.kernels.engine("triton"), pytest.raises(ValueError, match="CUDA tensors"):
        hu.kernels.select_engine("cpu")


def test_a_kernel_that_cannot_be_built_is_told_and_leaves_the_step_right(monkeypatch):
    from halfulp.kernels.triton import _launch, _writer

    def refuse(source):
        raise RuntimeError("no compiler here")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(hu.kernels._engine, "_explain_missing_package", lambda name: "")
    monkeypatch.setattr(_writer, "load_triton_module", refuse)
    monkeypatch.setattr(_launch, "_checked_kernel_by_key", {})
    case = ("lion", "kahan", "bf16", None, torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="no Triton kernel .* no compiler here"):
        told = _run("triton", 1, *case)[0]
    assert differing(told, _run("reference", 1, *case)[0]) == []


@pytest.mark.parametrize(
    "case",
    [
        ("adamw", "split8", "bf16", "default", torch.bfloat16, True),
        ("adamw", "kahan", "bf16", "8bit", torch.float32, False),
        ("adamw", "stochastic", "bf16", "4bit-64", torch.float32, False),
        ("sgd", "components-3", "fp16", "default", torch.float16, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("capability", [80, 90])
def test_the_compiler_fuses_and_flushes_nothing(case, capability, monkeypatch, tmp_path):
    """Down to machine code, which needs no device: a product is rounded before it is added."""
    # Triton 3.2, torch 2.6's, takes other arguments here; division and root of 3.4, torch 2.8's, flush subnormals, as a
    # step's comparison with the reference finds.
    triton = pytest.importorskip("triton", "3.5", reason="Triton is not installed, or older than 3.5")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = make_triton_step_kernel(_kind(*case))
    totals = {"totals": "*fp64"} if kernel.table.trace.sums else {}
    types = {"chunks": "*i64", "rows": "*i64", "width": "i64", **totals, "aligned": "constexpr"}
    whole = {(k,): [["tt.divisibility", 16]] for k, kind in enumerate(types.values()) if kind[0] == "*"}
    source = triton.compiler.ASTSource(kernel.triton_function, types, {(len(types) - 1,): True}, whole)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.options).asm["ptx"]
    instructions = {line.split()[0] for line in ptx.splitlines() if line.startswith("\t") and line.split()}
    assert "ld.global.v4.b32" in ptx, "16 bytes at a time"
    assert not [i for i in instructions if i.startswith("fma") or ".ftz" in i or ".approx" in i or ".full" in i]


SHARES = 8  # of the cases, each compiled on the way


# on a device, or interpreted ---------------------------------------------------------------------------------


def _run(engine, seed, rule, update, store, codec, gradient, device="cpu", steps=2, shapes=(), **more):
    """Everything after some steps on special values, and on parameters of other shapes beside them."""
    generator = torch.Generator().manual_seed(seed)
    given = [fit(special_pairs(seed)[0], store)] + [fit(torch.randn(s, generator=generator), store) for s in shapes]
    parameters = [torch.nn.Parameter(value.to(device)) for value in given]
    optimizer = build(rule, update, parameters, store, state_dtype=codec, seed=seed, **more)
    if HAS_GRADIENT_DTYPE:
        for parameter in parameters:
            parameter.grad_dtype = None
    else:
        gradient = parameters[0].dtype  # no other is assigned
    with hu.kernels.engine(engine):
        for step in range(steps):
            parameters[0].grad = special_pairs(seed + step + 1)[1].to(gradient).to(device)
            for parameter in parameters[1:]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(gradient).to(device)
            optimizer.step()
    return {name: tensor.cpu() for name, tensor in snapshot(optimizer).items()}, optimizer


def _cases():
    """Every weight update, rule, store and codec beside the common ones."""
    rows = [("adamw", update, "bf16", "default") for update in UPDATES if allowed("adamw", update, "bf16")]
    rows += [(rule, "split8", "bf16", "default") for rule in RULES]
    rows += [("adamw", "exact" if store == "fp32" else "kahan", store, "fp32") for store in STORE_NAMES]
    rows += [("adamw", "stochastic", "bf16", codec) for codec in CODECS]
    rows += [("sgd", update, "bf16", "default") for update in ("nearest", "stochastic", "split")]
    rows += [("lion", "nearest", "fp16", "8bit"), ("adam-amsgrad", "split8", "fp16", "8bit")]
    return list(dict.fromkeys(rows))


def compare(seed: int, device: str, share: int = 0, shares: int = 1) -> list[str]:
    """Which of a share of the cases differ from the reference; printed when run apart."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    found = []
    with np.errstate(all="ignore"):
        for number, (rule, update, store, codec) in list(enumerate(_cases()))[share::shares]:
            gradient = (torch.bfloat16, torch.float32, torch.float16)[number % 3]
            case = (seed, rule, update, store, CODECS[codec], gradient, device)
            if differing(_run("triton", *case)[0], _run("reference", *case[:-1])[0]):
                found.append(f"{case}")
        for codec in ("default", "8bit")[share::shares]:
            case = (seed, "adamw", "stochastic", "bf16", CODECS[codec], torch.bfloat16)
            more = {"shapes": [(7,), (33, 5), (), (0, 3), (3, 5472), (40_001,)], "report_interval": 1}
            (here, a), (there, b) = _run("triton", *case, device, **more), _run("reference", *case, **more)
            pairs = list(zip(a.report().rows, b.report().rows, strict=True))
            counted = all((m.updates, m.cancelled, m.samples) == (o.updates, o.cancelled, o.samples) for m, o in pairs)
            near = all(m.realised == pytest.approx(o.realised, rel=1e-9) for m, o in pairs)
            if differing(here, there) or not counted or not near:
                found.append(f"{case} of many shapes, metered")
    return found


@pytest.mark.cuda
@pytest.mark.parametrize("share", range(SHARES))
def test_steps_on_a_gpu_equal_the_reference_bit_for_bit(seed, share):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert compare(seed, "cuda", share, SHARES) == []


@pytest.mark.cuda
def test_a_step_waits_for_nothing(nothing_waits):
    """The table of a step goes to the device behind its back; torch's debug mode raises where it would wait."""
    pytest.importorskip("triton", reason="Triton is not installed")
    parameters = [torch.nn.Parameter(torch.randn(n, 64, device="cuda").bfloat16()) for n in (1, 40, 3000)]
    optimizer = hu.optim.AdamW(parameters, weight_update="kahan", state_dtype=torch.bfloat16, report_interval=0)
    before = [parameter.detach().clone() for parameter in parameters]
    for step in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        with nothing_waits() if step > 1 else contextlib.nullcontext():
            optimizer.step()
    assert not any(torch.equal(parameter, old) for parameter, old in zip(parameters, before))


def test_interpreted_steps_equal_the_reference_bit_for_bit(seed):
    """A third of the cases, which the seed picks: interpreted, all take more than a minute."""
    case = f"test.compare({seed}, 'cpu', {seed % 3}, 3)"
    assert interpreted("tests.optim.step.test_triton_launch", case) == "[]"
