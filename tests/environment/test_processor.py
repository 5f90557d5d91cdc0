"""The processor's name and instructions on the systems that there are, from what each of them prints."""

import pytest

from halfulp.environment import _processor, describe_processor

CPUINFO = {
    "x86": "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t\t: fpu sse avx avx2 fma f16c\n\nprocessor\t: 1\n",
    "arm": "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp bf16 sve\nCPU part\t: 0xd40\n",
    "power": "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n",
    "empty": "",
}


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Let another system be asked, by what its cpuinfo holds."""

    def become(cpuinfo: str = "") -> None:
        for function in (_processor.read_processor_name, _processor.list_processor_instructions):
            function.cache_clear()
        path = tmp_path / "cpuinfo"
        path.write_text(cpuinfo, encoding="utf-8")
        monkeypatch.setattr(_processor, "_CPUINFO_FILE", path if cpuinfo else tmp_path / "none")
        told = {
            "get_host_cpu_name": "neoverse-v1",
            "get_host_cpu_features": {"neon": True, "fullfp16": True, "sve": False},
        }
        monkeypatch.setattr(_processor, "_call_llvm", told.get)

    yield become
    for function in (_processor.read_processor_name, _processor.list_processor_instructions):
        function.cache_clear()


@pytest.mark.parametrize(
    ("which", "name"),
    [
        ("x86", "AMD EPYC 7B13"),
        ("arm", "neoverse-v1"),
        ("power", "POWER9, altivec supported"),
        ("empty", "neoverse-v1"),
    ],
)
def test_linux(which: str, name: str, system) -> None:
    system(CPUINFO[which])
    assert (_processor.read_processor_name(), _processor.list_processor_instructions()) == (name, ("neon", "fullfp16"))


def test_other_systems(system) -> None:
    system()
    assert (_processor.read_processor_name(), _processor.list_processor_instructions()) == (
        "neoverse-v1",
        ("neon", "fullfp16"),
    ), "of LLVM"


@pytest.mark.parametrize(
    ("has", "limits", "line"),
    [
        (("avx2", "fma"), {}, "Chip (avx2, no 16-bit arithmetic), 2 cores"),
        (("avx2", "avx512f", "avx512bf16"), {}, "Chip (avx512f, avx512bf16), 2 cores"),
        (("neon", "fullfp16", "bf16"), {}, "Chip (neon, fullfp16, bf16), 2 cores"),
        ((), {}, "Chip, 2 cores"),
        (
            ("avx2",),
            {"ONEDNN_MAX_CPU_ISA": "AVX2"},
            "Chip (avx2, no 16-bit arithmetic), 2 cores, limited by ONEDNN_MAX_CPU_ISA=AVX2",
        ),
    ],
)
def test_one_line_to_stand_beside_times(has, limits, line, monkeypatch) -> None:
    for name in _processor.INSTRUCTION_LIMIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in limits.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_processor, "read_processor_name", lambda: "Chip")
    monkeypatch.setattr(_processor, "list_processor_instructions", lambda: has)
    monkeypatch.setattr(_processor, "count_cores", lambda: 2)
    assert describe_processor() == line
