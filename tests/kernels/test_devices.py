"""Devices that cannot be had here: which engine they take, and that they are refused by name where bits differ."""

import pytest
import torch

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import _canary, _engine, require_same_bits_as_cpu, select_engine, to_float64
from halfulp.kernels._canary import compute_float32_square_root
from halfulp.optim.step import _run
from halfulp.rounding import _kernels

OTHERS = ["mps", "xpu", "hpu", "mtia", "privateuseone", "xla", "vulkan"]
ENVIRONMENT = "halfulp env"


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALFULP_ENGINE", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_canary, "_refusal_by_device_and_key", {})
    monkeypatch.setattr(_engine, "_fallback_counts", type(_engine._fallback_counts)())
    monkeypatch.setattr(_engine, "_explain_missing_package", lambda name: "")


@pytest.mark.parametrize("device", OTHERS)
@pytest.mark.parametrize("wish", ["auto", "llvm", "reference"])
def test_other_devices_take_plain_torch(device: str, wish: str) -> None:
    with kernels.engine(wish):
        assert select_engine(device) == "reference"


@pytest.mark.parametrize("device", [*OTHERS, "cpu"])
def test_triton_asked_for_where_it_cannot_run_is_refused_by_name(device: str) -> None:
    with kernels.engine("triton"), pytest.raises(ValueError, match=f"tensors on {device}.*{ENVIRONMENT}"):
        select_engine(device)


@pytest.mark.parametrize("device", OTHERS)
def test_the_interpreter_reaches_the_cpu_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with kernels.engine("triton"):
        assert select_engine("cpu") == "triton"
        with pytest.raises(ValueError, match=f"tensors on {device}"):
            select_engine(device)


def test_rocm_takes_plain_torch_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_engine("cuda") == "triton"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.warns(RuntimeWarning, match="ROCm.*HALFULP_ENGINE=triton"):
        assert select_engine("cuda") == "reference"
    assert select_engine("cuda") == "reference"
    assert any("ROCm" in line for line in kernels.count_fallbacks())
    with kernels.engine("triton"):
        assert select_engine("cuda") == "triton"


@pytest.mark.parametrize("missing", ["is not installed (pip install triton)", "cannot be imported (OSError: libcuda)"])
def test_no_triton_or_a_broken_one(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine, "_explain_missing_package", lambda name: f"{name} {missing}")
    with pytest.warns(RuntimeWarning, match="triton"):
        assert select_engine("cuda") == "reference"
    with kernels.engine("triton"), pytest.raises(ImportError, match=ENVIRONMENT) as caught:
        select_engine("cuda")
    assert missing in str(caught.value)


def test_why_a_package_cannot_be_used(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in {
        "halfulp_test_old": "raise ImportError('It needs NumPy 2.3 or less.\\nGot NumPy 2.9.')",
        "halfulp_test_part": "import halfulp_test_nowhere",
        "halfulp_test_good": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    why = _engine._explain_missing_package
    assert why("halfulp_test_nowhere") == "halfulp_test_nowhere is not installed (pip install halfulp_test_nowhere)"
    old = "halfulp_test_old cannot be imported (ImportError: It needs NumPy 2.3 or less.)"
    assert why("halfulp_test_old") == old
    assert "cannot be imported (ModuleNotFoundError" in why("halfulp_test_part")
    assert why("halfulp_test_good") == ""


SAME = [torch.tensor([1.0, torch.nan])]


def _told(device: str, found: list[torch.Tensor] | Exception) -> None:
    def run(where: torch.device) -> list[torch.Tensor]:
        if where.type == "cpu":
            return SAME
        runs.append(where)
        if isinstance(found, Exception):
            raise found
        return found

    runs: list[torch.device] = []
    for _ in range(2):
        try:
            require_same_bits_as_cpu(torch.device(device), "a thing", "key", run, "Keep it on the CPU")
        finally:
            assert len(runs) == (device not in ("cpu", "cuda", "meta")), "tried once"


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", "mps", "xpu"])
def test_the_same_bits_are_let_through(device: str) -> None:
    _told(device, [SAME[0].clone()])


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([torch.tensor([1.0, 2.0])], "other bits there than on the CPU"),
        ([], "other bits"),
        (
            TypeError("Cannot convert a MPS Tensor to float64\nmore"),
            r"TypeError: Cannot convert a MPS Tensor to float64\)",
        ),
        (AssertionError(), r"AssertionError: \)"),
    ],
)
@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_bits_are_refused_by_name(device: str, found, why: str) -> None:
    with pytest.raises(NotImplementedError, match=f"a thing on {device}: .*{why}.*Keep it on the CPU; .*{ENVIRONMENT}"):
        _told(device, found)


def test_rocm_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(NotImplementedError, match="a thing on cuda"):
        require_same_bits_as_cpu(
            torch.device("cuda"), "a thing", 0, lambda where: [torch.ones(1 + (where.type == "cpu"))], ""
        )


class _Batch:
    """What `compile_kernels` reads of a batch."""

    def __init__(self, device: str) -> None:
        parameter = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
        optimizer = hu.optim.AdamW([parameter], weight_update="kahan")
        self.spec = optimizer._make_plan(optimizer.param_groups[0], 0, _store("bf16")).spec
        self.device = torch.device(device)


def _store(name: str):
    from halfulp.optim._storage import STORE_BY_DTYPE

    return STORE_BY_DTYPE[torch.bfloat16] if torch.bfloat16 in STORE_BY_DTYPE else STORE_BY_DTYPE[name]


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_step_on_a_device_that_torch_cannot_reach_is_refused_before_it_begins(device: str) -> None:
    if getattr(torch, device).is_available():
        pytest.skip(f"{device} is here")
    with pytest.raises(NotImplementedError, match=f"optimizer step adamw_kahan_bf16 on {device}.*torch.optim.*"):
        _run.compile_kernels(_Batch(device))


def test_a_step_of_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, flushed = _run._run_step_on_check_elements, []

    def flushing(spec, run=None, device="cpu"):
        found = trial(spec, run, "cpu")
        if torch.device(device).type == "xpu":
            for tensor in found:
                below = (tensor != 0) & (tensor.abs() < torch.finfo(torch.float32).tiny)
                flushed.append(int(below.sum()))
                tensor[below] = 0.0
        return found

    monkeypatch.setattr(_run, "_run_step_on_check_elements", flushing)
    with pytest.raises(NotImplementedError, match=r"adamw_kahan_bf16 on xpu.*subnormal numbers are flushed"):
        _run.compile_kernels(_Batch("xpu"))
    assert sum(flushed) > 0, "the fixed elements have subnormal results"


def test_a_step_of_the_same_bits_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = _run._run_step_on_check_elements
    monkeypatch.setattr(
        _run, "_run_step_on_check_elements", lambda spec, run=None, device="cpu": trial(spec, run, "cpu")
    )
    _run.compile_kernels(_Batch("xpu"))
    _run.compile_kernels(_Batch("mps"))


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_rounding_on_a_device_that_torch_cannot_reach_is_refused(device: str) -> None:
    if getattr(torch, device).is_available():
        pytest.skip(f"{device} is here")

    class Elsewhere:
        dtype, device = torch.float32, torch.device("cpu")

    Elsewhere.device = torch.device(device)
    with pytest.raises(NotImplementedError, match=f"quantize of torch.float32 on {device}.*x.cpu.*{ENVIRONMENT}"):
        _kernels.check_device_rounding(Elsewhere(), "target", lambda elements, out: out.copy_(elements))


def test_without_float64_roots_go_through_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS cannot be had here: the CPU stands in for it, and says where numbers were taken to."""
    moved = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(_canary, "_DEVICES_WITHOUT_FLOAT64", frozenset(("cpu",)))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: moved.append(x.dtype) or real(x))
    x = torch.rand(1000) + 2.0**-100
    assert torch.equal(compute_float32_square_root(x), x.double().sqrt().float())
    assert to_float64(x).dtype == torch.float64
    assert moved == [torch.float32] * 2


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("ScaledTensors", lambda x: hu.ScaledTensor.encode(x)),
        ("ScaledTensors", lambda x: hu.ScaledTensor(x.half(), 1.0)),
        ("ScaledTensors", lambda x: hu.scalify(torch.nn.Linear(2, 2))),
        ("MCTensors", lambda x: hu.MCTensor.encode(x)),
        ("MCTensors", lambda x: hu.MCTensor.encode("0.1", device="cpu")),
        ("MCTensors", lambda x: hu.MCTensor.from_components([x, x])),
    ],
)
def test_what_needs_float64_is_refused_on_devices_without(what: str, make, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4)
    scaled, several = hu.ScaledTensor.encode(x), hu.MCTensor.encode(x)
    monkeypatch.setattr(_canary, "_DEVICES_WITHOUT_FLOAT64", frozenset(("cpu", "meta")))
    with pytest.raises(NotImplementedError, match=f"{what} on cpu: the device has no float64. .*{ENVIRONMENT}"):
        make(x)
    with pytest.raises(NotImplementedError, match="on meta: the device has no float64"):
        (scaled if what == "ScaledTensors" else several).to("meta")


def test_exact_sums_are_refused_on_devices_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfulp.arithmetic import _exact_sums as sums

    class Elsewhere:
        device, dtype, shape = torch.device("mps"), torch.float32, torch.Size((2, 3))

    with pytest.raises(NotImplementedError, match=f"exact sums on mps: the device has no float64.*{ENVIRONMENT}"):
        sums.sum_rows(Elsewhere(), None, torch.float32)
