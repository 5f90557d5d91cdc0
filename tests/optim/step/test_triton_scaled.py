"""Steps of scaled parameters by Triton: the reference's weights, states and scales, and no wait for a number."""

import contextlib
import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import halfulp as hu
from halfulp.kernels import engine, same_bits
from halfulp.kernels.triton._launch import PointerTableKernel
from halfulp.optim._storage import PAYLOAD_STORE_BY_DTYPE
from halfulp.optim.step._run import make_reduction_spec
from halfulp.optim.step._triton_kernel import make_triton_step_kernel
from halfulp.scaled import ScaledTensor

from ...kernels.triton.compiled import inexact
from ...kernels.triton.interpreted import interpreted
from ...kernels.triton.source import check_source
from ..test_rescaling import PAIRS, walk

HALF, BF16, E4M3, E5M2, FP32 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32
# Optimizer, its options, weight update, payload, gradient's payload (None: plain), states.
CASES = [
    ("AdamW", {"weight_decay": 0.1}, "kahan", HALF, E5M2, "fp8"),
    ("AdamW", {"amsgrad": True}, "stochastic", BF16, HALF, HALF),
    ("AdamW", {}, "kahan-stochastic", E5M2, BF16, "8bit"),
    ("SGD", {"momentum": 0.9}, "nearest", E4M3, E5M2, HALF),
    ("SGD", {}, "master", HALF, None, None),
    ("Lion", {}, "stochastic", E5M2, FP32, E5M2),
    ("AdamW", {}, None, FP32, HALF, HALF),
]
FACTORS = torch.linspace(-40, 40, 9)  # exponents of the steps of a random walk
SHARES = 4
THIS = "tests.optim.step.test_triton_scaled"
WIDE = 16_384 + 600  # of two chunks


def _parameters(seed, dtype, device, wide):
    """Scaled parameters of many shapes, at the ends of the scales' range, all zeros, infinite and NaN in places."""
    generator = torch.Generator().manual_seed(seed)
    made = [ScaledTensor.encode(torch.randn(s, generator=generator), dtype) for s in ((9, 70), (64,), (3,), (0, 2), ())]
    payload = torch.randn(33, generator=generator)
    made += [ScaledTensor(payload.to(dtype, copy=True), scale) for scale in (2.0**-126, 2.0**-100, 2.0**100)]
    made.append(ScaledTensor(torch.zeros(5, dtype=dtype), 2.0**-126))
    broken = payload.clone()
    broken[2], broken[3], broken[30] = torch.nan, torch.inf, -torch.inf
    made.append(ScaledTensor(broken.to(dtype), 0.5))
    made.append(ScaledTensor.encode(torch.randn(4, 6, generator=generator), dtype).t())
    if wide:
        made.append(ScaledTensor.encode(torch.randn(WIDE, generator=generator), dtype))
    return [torch.nn.Parameter(value.to(device)) for value in made]


def _gradients(seed, step, parameters, dtype):
    """Gradients of one step: usual, with zeros, infinities and NaN, all zero, then huge and tiny ones in turn."""
    generator = torch.Generator().manual_seed(seed + step)
    for number, parameter in enumerate(parameters):
        value = torch.randn(parameter.shape, generator=generator)
        if step == 1 and value.numel() > 8:
            flat = value.view(-1)
            flat[:3], flat[3], flat[4], flat[5] = 0.0, torch.inf, -torch.inf, torch.nan
        if step == 2:
            value = value * 0.0
        size = {3: 2.0 ** (110 - 20 * (number % 3)), 4: 2.0 ** (-100 - 8 * (number % 3))}.get(step, 1.0)
        if dtype is None:
            yield (value * size).to(parameter.device)
        else:
            yield ScaledTensor(value.to(dtype).to(parameter.device), size)


def _run(chosen, case, seed, device="cpu", steps=5, wide=False):
    """All that a parameter has after some steps, and the optimizer."""
    kind, options, update, dtype, gradient, states = case
    parameters = _parameters(seed, dtype, device, wide)
    more = {"weight_update": update, "state_dtype": states, "seed": seed, "report_interval": 2, **options}
    optimizer = getattr(hu.optim, kind)(parameters, lr=1e-2, **more)
    with engine(chosen):
        for step in range(steps):
            for parameter, value in zip(parameters, _gradients(seed, step, parameters, gradient)):
                parameter.grad = value
            optimizer.step()
    held = {}
    for number, parameter in enumerate(parameters):
        held[f"{number}.payload"], held[f"{number}.scale"] = parameter.payload.detach(), parameter.scale
        tensors = optimizer.state[parameter].items()
        held |= {f"{number}.{name}": value for name, value in tensors if isinstance(value, torch.Tensor)}
    return {name: value.cpu().clone() for name, value in held.items()}, optimizer


def compare(seed, device, share=0, shares=1):
    """What differs from the reference in a share of the cases; printed when run apart."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    found = []
    with np.errstate(all="ignore"):
        for number, case in list(enumerate(CASES))[share::shares]:
            here, a = _run("triton", case, seed, device, wide=number == 0)
            there, b = _run("reference", case, seed, wide=number == 0)
            wrong = [name for name in there if not same_bits(here[name], there[name])]
            pairs = list(zip(a.report().rows, b.report().rows, strict=True))
            counted = all((m.updates, m.cancelled, m.samples) == (o.updates, o.cancelled, o.samples) for m, o in pairs)
            if wrong or not counted or here.keys() != there.keys():
                found.append(f"{case}: {wrong} {counted=}")
        for update, dtype in PAIRS[share :: 4 * shares] if device == "cpu" else ():
            broken, *walked = walk(update, dtype, FACTORS, seed, "triton", steps=2)
            _, *expected = walk(update, dtype, FACTORS, seed, steps=2)
            if broken or not all(same_bits(a, b) for x, y in zip(walked, expected) for a, b in zip(x, y)):
                found.append(f"{update} {dtype} on its walk: {broken}")
    return found


def reach(chosen, device="cpu"):
    """The scale and the values after a step that takes nearly all of large weights away; printed when run apart."""
    payload = torch.tensor([0.0, 1.5, -1.25], dtype=HALF)
    parameter = torch.nn.Parameter(ScaledTensor(payload, 2.0**100).to(device))
    optimizer = hu.optim.SGD([parameter], lr=1.0, weight_update="master", report_interval=0)
    parameter.grad = torch.tensor([-(2.0**-20), 1.5 * 2.0**100, -1.25 * 2.0**100]).to(device)
    with engine(chosen), np.errstate(all="ignore"):
        optimizer.step()
    return parameter.scale.item(), parameter.detach().decode().tolist()


class _Operators(TorchDispatchMode):
    """Counts the operators that compute or copy on a device, and those that make the caller wait."""

    FREE = ("detach", "select", "slice", "view", "t", "unbind", "alias", "empty", "lift_fresh")
    RANGES = ("_record_function_enter_new", "_record_function_exit")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator.overloadpacket.__name__ not in self.FREE + self.RANGES:
            self.found.append(operator.overloadpacket.__name__)
        return operator(*arguments, **(options or {}))


def _counted(launch, launched, name):
    """A method that launches a kernel, and notes its name."""

    def run(kernel, *arguments):
        launched.append(name(kernel))
        with _disable_current_modes():  # the interpreter's own copies
            return launch(kernel, *arguments)

    return run


def launches(count):
    """Return the operators and the kernels of one step of some parameters; printed when run apart."""
    parameters = [torch.nn.Parameter(ScaledTensor.encode(torch.randn(48), HALF)) for _ in range(count)]
    options = {"weight_update": "kahan", "state_dtype": HALF, "report_interval": 0}
    optimizer, launched = hu.optim.AdamW(parameters, lr=1e-2, **options), []
    with engine("triton"), np.errstate(all="ignore"):
        for step in range(3):
            for parameter in parameters:
                parameter.grad = ScaledTensor.encode(torch.randn(48), HALF)
            if step == 2:
                PointerTableKernel.launch = _counted(
                    PointerTableKernel.launch, launched, lambda kernel: "largest" if kernel.maximum_count else "step"
                )
            with _Operators() if step == 2 else contextlib.nullcontext() as operators:
                optimizer.step()
    return sorted(operators.found), launched


def test_interpreted_scaled_steps_equal_the_reference_bit_for_bit(seed):
    """One of the cases, which the seed picks: interpreted, all take minutes."""
    count = len(CASES)
    assert interpreted(THIS, f"test.compare({seed}, 'cpu', {seed % count}, {count})") == "[]"


def test_the_largest_payload_limits_the_new_scale_as_in_the_reference():
    """Under the scale that 2^-20 would have, float32 does not hold the payload before the update is added."""
    assert reach("reference") == (2.0**-19, [2.0**-20, 0.0, 0.0])
    assert eval(interpreted(THIS, "test.reach('triton')")) == reach("reference")


def test_a_scaled_step_launches_as_much_for_many_parameters_as_for_one_and_reads_nothing():
    operators, launched = eval(interpreted(THIS, "test.launches(2)"))
    more = eval(interpreted(THIS, "test.launches(150)"))
    assert launched == ["largest", "step"]
    assert (operators, launched) == more
    assert operators.count("_foreach_copy_") == 3
    assert not {"_local_scalar_dense", "item", "index_put_"} & {*operators}, "none reads a number or a list of places"


def _spec(case, metered=False):
    kind, options, update, dtype, gradient, states = case
    parameter = torch.nn.Parameter(ScaledTensor.encode(torch.randn(64, 64), dtype))
    optimizer = getattr(hu.optim, kind)([parameter], lr=1e-2, weight_update=update, state_dtype=states, **options)
    spec = optimizer._make_plan(optimizer.param_groups[0], 0, PAYLOAD_STORE_BY_DTYPE[gradient or FP32]).spec
    return spec.lost_update_counting_spec if metered else spec


@pytest.mark.parametrize("metered", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kind_of_scaled_step_is_written_in_what_triton_can_compile(case, metered):
    spec = _spec(case, metered)
    for one in (spec, make_reduction_spec(spec, "amax")):
        text = make_triton_step_kernel(one).source
        assert text == make_triton_step_kernel.__wrapped__(one).source, "not deterministic"
        assert {"element", "run"} <= check_source(text)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("case", "metered"), [(CASES[0], False), (CASES[2], True), (CASES[4], False)], ids=str)
def test_the_compiler_fuses_and_flushes_nothing_in_scaled_steps(case, metered, capability, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", "3.5", reason="Triton is not installed, or older than 3.5")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec = _spec(case, metered)
    for kernel in map(make_triton_step_kernel, (spec, make_reduction_spec(spec, "amax"))):
        totals = {"totals": "*i32" if kernel.maximum_count else "*fp64"} if kernel.table.trace.sums else {}
        types = {"chunks": "*i64", "rows": "*i64", "width": "i64", **totals, "aligned": "constexpr"}
        whole = {(k,): [["tt.divisibility", 16]] for k, kind in enumerate(types.values()) if kind[0] == "*"}
        source = triton.compiler.ASTSource(kernel.triton_function, types, {(len(types) - 1,): True}, whole)
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.options).asm["ptx"]
        lines = [[w for w in line.split() if w[0] != "@"] for line in ptx.splitlines() if line.startswith("\t")]
        found = [words[0] for words in lines if words]
        assert not inexact(found)
        if kernel.maximum_count:
            assert any(i.startswith("atom") and i.endswith("max.s32") for i in found)


def failing(engine_name):
    """Payload and scale after a step whose kernel fails once the scales are chosen; printed when run apart."""
    parameter = torch.nn.Parameter(ScaledTensor.encode(torch.randn(48), HALF))
    optimizer = hu.optim.AdamW([parameter], lr=1e9, weight_update="kahan", report_interval=0)
    launch = PointerTableKernel.launch

    def refuse(kernel, *rest):
        if not kernel.maximum_count:
            raise RuntimeError("no memory here")
        return launch(kernel, *rest)

    with engine(engine_name), np.errstate(all="ignore"):
        parameter.grad = ScaledTensor.encode(torch.randn(48), HALF)
        optimizer.step()
        before = parameter.detach().decode().tolist()
        PointerTableKernel.launch = refuse
        with contextlib.suppress(RuntimeError):
            optimizer.step()
        PointerTableKernel.launch = launch
    return before == parameter.detach().decode().tolist()


def test_a_step_that_fails_leaves_weights_and_scales_as_they_were():
    assert interpreted(THIS, "test.failing('triton')") == "True"


@pytest.mark.cuda
@pytest.mark.parametrize("share", range(SHARES))
def test_scaled_steps_on_a_gpu_equal_the_reference_bit_for_bit(seed, share):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert compare(seed, "cuda", share, SHARES) == []
    assert reach("auto", "cuda") == reach("reference")


@pytest.mark.cuda
def test_a_scaled_step_waits_for_nothing(nothing_waits):
    """Scales are read, chosen and written on the device: torch's debug mode raises where a step would wait."""
    pytest.importorskip("triton", reason="Triton is not installed")
    values = [torch.randn(n, 64, device="cuda") for n in (1, 40, 3000)]
    parameters = [torch.nn.Parameter(ScaledTensor.encode(value, HALF)) for value in values]
    options = {"weight_update": "kahan", "state_dtype": HALF, "report_interval": 0}
    optimizer = hu.optim.AdamW(parameters, lr=1e-2, **options)
    before = [parameter.payload.detach().clone() for parameter in parameters]
    for step in range(5):
        for parameter in parameters:
            parameter.grad = ScaledTensor.encode(torch.randn(parameter.shape, device="cuda"), HALF)
        with nothing_waits() if step > 1 else contextlib.nullcontext():
            optimizer.step()
    assert not any(torch.equal(parameter.payload, old) for parameter, old in zip(parameters, before))
