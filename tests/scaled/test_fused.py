"""Kernels on payloads and scales: as the reference under Triton's interpreter, and down to machine code."""

import itertools
import math

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.kernels.triton import _launch
from halfulp.kernels.triton._writer import COMPILE_OPTIONS, load_triton_module
from halfulp.scaled import _fused as fused

from ..kernels.triton.source import check_functions

KINDS = list(fused.PAYLOAD_CODEC_BY_DTYPE)
POINTERS = dict(zip(KINDS, ("*fp32", "*bf16", "*fp16", "*u8", "*u8")))
FORMS = [("product", count) for count in range(4)]
FORMS += [("values", 1), ("factor", 2), ("levelled", 2), ("brought", 2)]


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's interpreter, of a process that imported triton with it."""
    triton = pytest.importorskip("triton", "3.5", reason="Triton is not installed, or older than 3.5")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 must be set before triton is imported")
    monkeypatch.setattr(_launch, "_checked_kernel_by_key", {})
    with hu.kernels.engine("triton"):
        yield


@pytest.mark.parametrize("of", KINDS, ids=str)
def test_kernels_have_the_bits_of_the_reference(interpreted, of, recwarn):
    """Each is compared on its fixed elements, which have zeros, infinities, NaN and numbers beyond every range."""
    scales = [torch.tensor(power) for power in (0.5, 4.0, 2.0, 0.25)]
    y = torch.randn(3, 5).to(of)
    x = torch.randn(3, 5).to(torch.float16)
    for k, (mode, count) in enumerate(FORMS):  # every mode and storage of y, and in turn of the result
        fused.multiply_payload(y, scales[:count], KINDS[(k + KINDS.index(of)) % len(KINDS)], mode)
    for to in KINDS:
        for sign, keep in ((1.0, to in (torch.float16, torch.float8_e5m2)), (-1.0, False)):
            fused.add_payloads(x, y, *scales[:2], to, sign, keep)
            fused.add_payloads(x, y[0], *scales[:2], to, sign, keep)
        fused.measure_rms_scale(y, to, 1.0)
    fused.compute_addmm_scale_and_factors(*scales[:3], 1.0, 2.0)
    assert _launch._checked_kernel_by_key
    assert None not in _launch._checked_kernel_by_key.values()
    assert not [str(warning.message) for warning in recwarn.list]


@pytest.mark.parametrize("storage", KINDS, ids=str)
def test_a_sum_takes_the_larger_scale_but_not_a_masks(storage, benchmark_module):
    launches = benchmark_module("_gpu._launches")

    def add(power, other):
        zero, mask = torch.tensor([0.0, 0.0]), torch.tensor([0.0, -1.0])
        with launches.blind(), launches.fused_kernels():
            x, y = (hu.ScaledTensor(p.to(storage), 2.0**k) for p, k in ((zero, power), (mask, other)))
            found = x + y
            assert same_bits((y + x).scale, found.scale)
        return math.log2(found.scale.item()), found.decode()[1].item()

    assert add(-20, 101) == (101, -(2.0**101))
    assert add(-126, 127) == (127, -(2.0**127))  # zeros of any scale
    assert add(126, 127) == (127, -(2.0**127))
    assert add(3, 127)[0] == 3
    for power in (3, -20, -120):
        assert add(power, 127)[1] <= -128


@pytest.mark.parametrize("storage", ["float16", "fp8 products"])
def test_kernels_give_a_model_the_gradients_of_plain_torch(interpreted, benchmark_module, storage):
    launches = benchmark_module("_gpu._launches")
    found = []
    for engine in ("reference", "triton"):
        parts = launches.training(storage)
        with launches.blind(), hu.kernels.engine(engine):
            for part in ("forward", "backward", "clipping"):
                parts[part]()
        gradients = [p.grad for p in parts.model.parameters()]
        found.append([x for g in gradients for x in (g.payload, g.scale)])
    assert all(map(hu.kernels.same_bits, *found))
    assert None not in _launch._checked_kernel_by_key.values()


def test_a_kernel_that_cannot_be_built_is_told_and_leaves_results_right(monkeypatch):
    def refuse(source):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(fused, "load_triton_module", refuse)
    monkeypatch.setattr(_launch, "_checked_kernel_by_key", {})
    with pytest.warns(RuntimeWarning, match="no Triton kernel for finish .* no compiler here"):
        payload, scale = fused.multiply_payload(
            torch.tensor([3.0, -1e9]), [torch.tensor(2.0)], torch.float16, factor=0.5
        )
    assert payload.tolist() == [1.5, -65504.0]
    assert scale.item() == 2.0


@pytest.mark.filterwarnings("ignore:no Triton kernel:RuntimeWarning")
@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("of", KINDS, ids=str)
def test_the_kernels_of_a_scale_measure_what_torch_measures(of, storage, seed):
    """The power of two next to the root mean square, at least what the largest needs; infinities, NaN, 0 left out."""
    limit = torch.finfo(storage).max
    for values in (
        *([0.5], [1.0], [1.0, 0.0], [0.75, -0.5], [1.5, 0.0, 0.0], [1.4], [1.45], [-2.0], [0.0], [-0.0, 0.0]),
        *([256.0, *[2.0**-6] * 300_000], [math.inf, 3.0, math.nan], [math.nan], torch.randn(50).tolist()),
    ):
        payload = torch.tensor(values).to(of)
        found = fused.measure_rms_scale(payload, storage, 4.0)
        held = [abs(x) for x in payload.double().tolist() if math.isfinite(x) and x]
        if not held:
            assert found.item() == 4.0
            continue
        rms = math.sqrt(math.fsum(x * x for x in held) / len(held))
        mantissa, exponent = math.frexp(rms)
        wanted = 2.0 ** (exponent - (mantissa < math.sqrt(0.5)))
        needed = max(held) / limit
        assert found.item() == max(wanted, 2.0 ** math.ceil(math.log2(needed))), values[:3]
        assert found.dtype == torch.float32


def _kernels() -> list[fused.FusedKernel]:
    """A choice of kernels: every pair of storages, every mode."""
    found = [fused.FusedKernel("affine_factors", fused.choose_addmm_scale_and_factors, None, (3, 2, 3))]
    for k, (of, to) in enumerate(itertools.product(KINDS, KINDS)):
        found.append(fused._make_multiplying_kernel(*FORMS[(3 * k) % len(FORMS)], of, to))
        keep, both = to in (torch.float16, torch.float8_e5m2), (torch.float16, of)
        found.append(
            fused.FusedKernel(
                "add", fused.choose_sum_scale_and_factors, fused.add_rescaled_elements, (2, 2, 1), both, to, keep
            )
        )
    return found


def _signature(
    names: list[str], constants: dict[str, object], payloads: dict[str, str], integer: str
) -> dict[str, str]:
    def type_of(name):
        if name in constants:
            return "constexpr"
        if name in payloads:
            return payloads[name]
        if name in ("n", "period", "programs", "loops"):
            return integer
        # Scales and what is kept of them; numbers.
        return "*fp32" if name[0] in "sr" or name == "out" else "fp32"

    return {name: type_of(name) for name in names}


def _sources() -> list[tuple[str, str, dict[str, str], dict[str, object]]]:
    """The modules' texts, a kernel's name in each, its pointers to payloads and its constants."""
    found = []
    for k, kernel in enumerate(_kernels()):
        payloads = {f"x{j}": POINTERS[dtype] for j, dtype in enumerate(kernel.payload_dtypes)}
        payloads |= {"out": POINTERS[kernel.result_dtype]} if kernel.payload_dtypes else {}
        constants = {"same": bool(k % 2), "BLOCK": fused.BLOCK_ELEMENTS} if kernel.payload_dtypes else {}
        found.append((fused.write_kernel_source(kernel), "kernel", payloads, constants))
    for dtype in KINDS:
        parts = {"y": POINTERS[dtype], "parts": "*fp64"}
        found.append((fused.write_rms_scale_source(dtype), "measure", parts, {"BLOCK": fused.BLOCK_ELEMENTS}))
    return [
        *found,
        (fused.write_rms_scale_source(KINDS[0]), "level", {"parts": "*fp64"}, {"BLOCK": fused.MAX_PARTIAL_SUMS}),
    ]


def test_every_function_is_written_in_what_triton_can_compile():
    for text, name, _, _ in _sources():
        assert name in check_functions(text)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_compiler_fuses_and_flushes_nothing(capability, monkeypatch, tmp_path):
    """Down to machine code, which needs no device: a product is rounded before it is added, and quotients are exact."""
    triton = pytest.importorskip("triton", "3.5", reason="Triton is not installed, or older than 3.5")
    from triton.backends.compiler import GPUTarget

    if triton.knobs.runtime.interpret:
        pytest.skip("interpreted functions are not compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = _sources()
    # Of tensors with more than 2^31 elements, the last of each kernel.
    for (text, name, payloads, constants), integer in [
        *((source, "i32") for source in sources),
        *((source, "i64") for source in sources[-12:]),
    ]:
        kernel = load_triton_module(text)[name]
        types = _signature(kernel.arg_names, constants, payloads, integer)
        places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
        whole = {
            (k,): [["tt.divisibility", 16]]
            for k, key in enumerate(kernel.arg_names)
            if types[key].startswith("*") or key in ("n", "period")
        }
        source = triton.compiler.ASTSource(kernel, types, places, whole)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=COMPILE_OPTIONS)
        ptx = compiled.asm["ptx"]
        instructions = {line.split()[0] for line in ptx.splitlines() if line.startswith("\t") and line.split()}
        wrong = [i for i in instructions if i.startswith("fma") or ".ftz" in i or ".approx" in i or ".full" in i]
        assert not wrong, (name, payloads, constants, wrong)
        if len(payloads) == 2 and payloads.get("x0", "*u8") != "*u8":
            assert "ld.global.v" in ptx, (name, payloads, constants)
