"""The processor's name, as Linux lists it, and where nothing lists it."""

from pathlib import Path

import pytest
import torch

from halfulp import _processor_name as module


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Give the name where the list of processors, torch's answers and the platform's are these."""

    def named(listed: str | None, has: tuple[str, ...], told: str = "") -> str:
        path = tmp_path / "cpuinfo"
        if listed is not None:
            path.write_text(listed)
        monkeypatch.setattr(module, "_INFORMATION", path)
        for name in ("avx2", "avx512", "avx512_bf16", "amx_tile"):
            monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name in has, raising=False)
        monkeypatch.setattr(module.platform, "processor", lambda: told)
        monkeypatch.setattr(module.platform, "machine", lambda: "arm64")
        module.processor_name.cache_clear()
        return module.processor_name()

    yield named
    module.processor_name.cache_clear()


LISTED = "processor\t: 0\nmodel name\t: A Processor 7\nflags\t: fpu\n\nprocessor\t: 1\nmodel name\t: A Processor 7\n"


def test_the_listed_name_and_the_widest_instructions(named) -> None:
    assert named(LISTED, ()) == "A Processor 7"
    assert named(LISTED, ("avx2",)) == "A Processor 7 with AVX2"
    assert named(LISTED, ("avx2", "avx512")) == "A Processor 7 with AVX-512"
    assert named(LISTED, ("avx2", "avx512", "avx512_bf16")) == "A Processor 7 with AVX-512 and bfloat16 products"
    assert named(LISTED, ("avx2", "avx512", "avx512_bf16", "amx_tile")) == "A Processor 7 with AVX-512 and AMX"


def test_what_the_platform_says_where_nothing_is_listed(named, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(None, (), told="Another") == "Another"
    assert named("processor\t: 0\nBogoMIPS\t: 50.00\n", ()) == "arm64"
    named(None, ())
    for name in ("avx2", "avx512", "avx512_bf16", "amx_tile"):
        monkeypatch.delattr(torch.cpu, f"_is_{name}_supported")
    module.processor_name.cache_clear()
    assert module.processor_name() == "arm64"
