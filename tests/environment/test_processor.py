"""The processor's name and instructions on the systems that there are, from what each of them prints."""

import platform
import sys

import pytest

from halfulp.environment import _processor, processor_line

CPUINFO = {
    "x86": "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t\t: fpu sse avx avx2 fma f16c\n\nprocessor\t: 1\n",
    "sapphire": "model name : Intel(R) Xeon(R)\nflags : avx2 fma f16c avx512f avx512_bf16 avx512_fp16 amx_bf16\n",
    "arm": "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp bf16 sve\nCPU part\t: 0xd40\n",
    "power": "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n",
    "empty": "",
}


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Let another system be asked: its kind and what its cpuinfo holds."""

    def become(kind: str, cpuinfo: str = "") -> None:
        for function in (_processor.processor_name, _processor.instructions):
            function.cache_clear()
        path = tmp_path / "cpuinfo"
        path.write_text(cpuinfo, encoding="utf-8")
        monkeypatch.setattr(_processor, "_CPUINFO", path if cpuinfo else tmp_path / "none")
        monkeypatch.setattr(sys, "platform", kind)
        monkeypatch.setattr(_processor, "_llvm_name", lambda: "neoverse-v1")
        monkeypatch.setattr(_processor, "_llvm_features", lambda: ["neon", "fullfp16"])

    yield become
    for function in (_processor.processor_name, _processor.instructions):
        function.cache_clear()


@pytest.mark.parametrize(
    ("which", "name", "has"),
    [
        ("x86", "AMD EPYC 7B13", ("AVX2", "FMA", "F16C")),
        ("sapphire", "Intel(R) Xeon(R)", ("AVX2", "FMA", "F16C", "AVX-512", "AVX512_BF16", "AVX512_FP16", "AMX_BF16")),
        ("arm", "neoverse-v1", ("NEON", "FP16", "BF16", "SVE")),
        ("power", "POWER9, altivec supported", ("NEON", "FP16")),
        ("empty", "neoverse-v1", ("NEON", "FP16")),
    ],
)
def test_linux(which: str, name: str, has: tuple[str, ...], system) -> None:
    system("linux", CPUINFO[which])
    assert (_processor.processor_name(), _processor.instructions()) == (name, has)


def test_macos(system, monkeypatch) -> None:
    system("darwin")
    answers = {"machdep.cpu.brand_string": "Apple M3", "hw.optional.arm.FEAT_BF16": "1", "hw.optional.AdvSIMD": "1"}
    monkeypatch.setattr(_processor, "_sysctl", lambda *names: answers.get(names[0], ""))
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert (_processor.processor_name(), _processor.instructions()) == ("Apple M3", ("NEON", "BF16"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    answers["machdep.cpu.leaf7_features"] = "AVX2 BMI2 AVX512F"
    _processor.instructions.cache_clear()
    assert _processor.instructions() == ("AVX2", "AVX-512")


def test_macos_without_its_program(system) -> None:
    system("darwin")
    assert _processor.processor_name() == "neoverse-v1"
    assert _processor.instructions() == ()


def test_windows(system) -> None:
    system("win32")
    assert (_processor.processor_name(), _processor.instructions()) == ("neoverse-v1", ("NEON", "FP16")), "of LLVM"


@pytest.mark.parametrize(
    ("has", "limits", "line"),
    [
        (("AVX2", "FMA"), {}, "Chip (AVX2, no 16-bit arithmetic), 2 cores"),
        (("AVX2", "AVX-512", "AVX512_BF16"), {}, "Chip (AVX-512, AVX512_BF16), 2 cores"),
        (("NEON", "FP16", "BF16"), {}, "Chip (NEON, FP16, BF16), 2 cores"),
        ((), {}, "Chip, 2 cores"),
        (
            ("AVX2",),
            {"ONEDNN_MAX_CPU_ISA": "AVX2"},
            "Chip (AVX2, no 16-bit arithmetic), 2 cores, limited by ONEDNN_MAX_CPU_ISA=AVX2",
        ),
    ],
)
def test_one_line_to_stand_beside_times(has, limits, line, monkeypatch) -> None:
    for name in _processor.LIMITS:
        monkeypatch.delenv(name, raising=False)
    for name, value in limits.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_processor, "processor_name", lambda: "Chip")
    monkeypatch.setattr(_processor, "instructions", lambda: has)
    monkeypatch.setattr(_processor, "core_count", lambda: 2)
    assert processor_line() == line
