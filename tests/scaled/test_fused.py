"""Kernels on payloads and scales: as the reference under Triton's interpreter, and down to machine code."""

import itertools

import pytest
import torch

import halfulp as hu
from halfulp.kernels.triton import _launch
from halfulp.kernels.triton._writer import OPTIONS, load_module
from halfulp.scaled.fused import _operations as fused
from halfulp.scaled.fused._device_code import KINDS, MODES, module_text

POINTERS = {0: "*fp32", 1: "*bf16", 2: "*fp16", 3: "*u8", 4: "*u8"}
INTEGERS = ("n", "period", "programs", "loops")
NUMBERS = ("factor", "number", "sign", "beta", "beta_power", "alpha", "power", "limit", "of_zeros")
FORMS = [("product", count) for count in range(4)] + [("values", 1), ("ratio", 2), ("factor", 2), ("deviation", 1)]
FORMS += [("paired", 3), ("paired", 4), ("levelled", 2), ("brought", 2), ("held", 1)]


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's interpreter, of a process that imported triton with it."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 must be set before triton is imported")
    monkeypatch.setattr(_launch, "_kernels", {})
    with hu.kernels.engine("triton"):
        yield


@pytest.mark.parametrize("of", KINDS, ids=str)
def test_kernels_have_the_bits_of_the_reference(interpreted, of, recwarn):
    """Each is compared on its fixed elements, which have zeros, infinities, NaN and numbers beyond every range."""
    scales = [torch.tensor(power) for power in (0.5, 4.0, 2.0, 0.25)]
    y = torch.randn(3, 5).to(of)
    x = torch.randn(3, 5).to(torch.float16)
    for to in KINDS:
        for mode, count in FORMS:
            fused.finish(y, scales[:count], to, mode)
        for sign, keep in ((1.0, to in (torch.float16, torch.float8_e5m2)), (-1.0, False)):
            fused.add(x, y, *scales[:2], to, sign, keep)
            fused.add(x, y[0], *scales[:2], to, sign, keep)
        fused.level(y, to, 1.0)
        fused.affine(x, y[0], tuple(scales[:3]), to, 1.0, 1.0, 0.75, 0.5)
    fused.affine_factors(*scales[:3], 1.0, 2.0)
    assert _launch._kernels
    assert None not in _launch._kernels.values()
    assert not recwarn.list


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
    assert None not in _launch._kernels.values()


def test_a_kernel_that_cannot_be_built_is_told_and_leaves_results_right(monkeypatch):
    def refuse():
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(fused, "_kernels", refuse)
    monkeypatch.setattr(_launch, "_kernels", {})
    with pytest.warns(RuntimeWarning, match="no Triton kernel for finish .* no compiler here"):
        payload, scale = fused.finish(torch.tensor([3.0, -1e9]), [torch.tensor(2.0)], torch.float16, factor=0.5)
    assert payload.tolist() == [1.5, -65504.0]
    assert scale.item() == 2.0


def _signature(kernel: object, kinds: dict[str, int], constants: dict[str, object], integer: str) -> dict[str, str]:
    found = {}
    for argument in kernel.arg_names:
        if argument in constants:
            found[argument] = "constexpr"
        elif argument in INTEGERS:
            found[argument] = integer
        elif argument in NUMBERS:
            found[argument] = "fp32"
        elif argument == "parts":
            found[argument] = "*fp64"
        else:
            found[argument] = POINTERS[kinds.get(argument, 0)]
    return found


def _forms() -> list[tuple[str, dict[str, int], dict[str, object]]]:
    """The kernels' names, with the kinds of payloads and the constants of a choice of launches."""
    found = []
    for of, to in itertools.product(KINDS.values(), KINDS.values()):
        mode, count = FORMS[(3 * of + to) % len(FORMS)]
        kinds = {"y": of, "out": to, **dict.fromkeys(("s0", "s1", "s2", "s3")[count:], of)}
        kinds |= {"out_scale": to} if mode in ("factor", "held") else {}
        constants = {"mode": MODES.index(mode), "count": count, "of": of, "to": to, "block": fused.BLOCK}
        found.append(("finish", kinds, constants))
        same = {"same": bool((of + to) % 2), "block": fused.BLOCK}
        both = {"of_x": 2, "of_y": of, "to": to, "keep": to in (2, 3), **same}
        found.append(("add", {"x": 2, "y": of, "out": to}, both))
        of_two = {"of_y": of, "of_base": 2, "to": to, **same}
        found.append(("affine", {"y": of, "base": 2, "out": to}, of_two))
    found += [("measure", {"y": of}, {"of": of, "block": fused.BLOCK}) for of in KINDS.values()]
    return [*found, ("affine_factors", {}, {}), ("level", {}, {"block": fused.PARTS})]


@pytest.mark.parametrize("capability", [80, 90])
def test_the_compiler_fuses_and_flushes_nothing(capability, monkeypatch, tmp_path):
    """Down to machine code, which needs no device: a product is rounded before it is added, and quotients are exact."""
    triton = pytest.importorskip("triton", "3.5", reason="Triton is not installed, or older than 3.5")
    from triton.backends.compiler import GPUTarget

    if triton.knobs.runtime.interpret:
        pytest.skip("interpreted functions are not compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = load_module(module_text())
    forms = _forms()
    # Of tensors with more than 2^31 elements, the last of each kernel.
    for (name, kinds, constants), integer in [(form, "i32") for form in forms] + [
        (form, "i64") for form in forms[-12:]
    ]:
        kernel = kernels[name]
        types = _signature(kernel, kinds, constants, integer)
        places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
        whole = {
            (k,): [["tt.divisibility", 16]]
            for k, key in enumerate(kernel.arg_names)
            if types[key].startswith("*") or key in ("n", "period")
        }
        source = triton.compiler.ASTSource(kernel, types, places, whole)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=OPTIONS)
        ptx = compiled.asm["ptx"]
        instructions = {line.split()[0] for line in ptx.splitlines() if line.startswith("\t") and line.split()}
        wrong = [i for i in instructions if i.startswith("fma") or ".ftz" in i or ".approx" in i or ".full" in i]
        assert not wrong, (name, kinds, constants, wrong)
        if name == "finish" and constants["of"] in (0, 1, 2):
            assert "ld.global.v" in ptx, (name, kinds, constants)
