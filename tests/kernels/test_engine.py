"""Which engine runs, and what is reported."""

import pytest
import torch

from halfulp import kernels
from halfulp.kernels import count_fallbacks, engine, note_fallback, select_engine, warn_once_of_fallback
from halfulp.rounding import quantize


def test_engine_block(monkeypatch):
    monkeypatch.delenv("HALFULP_ENGINE", raising=False)
    assert select_engine("cpu") == "llvm"
    assert select_engine("mps") == "reference"
    with engine("reference"):
        assert select_engine("cpu") == "reference"
        with engine("llvm"):
            assert select_engine("cpu") == "llvm"
        assert select_engine("cpu") == "reference"
    assert select_engine("cpu") == "llvm"
    with pytest.raises(ValueError, match="reference"), engine("fast"):
        pass


def test_environment(monkeypatch):
    monkeypatch.setenv("HALFULP_ENGINE", "reference")
    assert select_engine("cpu") == "reference"
    with engine("llvm"):
        assert select_engine("cpu") == "llvm"
    monkeypatch.setenv("HALFULP_ENGINE", "quick")
    with pytest.raises(ValueError, match="HALFULP_ENGINE='quick'"):
        quantize(torch.ones(2), "bf16")


def test_the_engines_name_of_before_is_refused_with_that_of_now(monkeypatch):
    with pytest.raises(ValueError, match=r"engine 'numba' is unknown.*called 'llvm' now"), engine("numba"):
        pass
    monkeypatch.setenv("HALFULP_ENGINE", "numba")
    with pytest.raises(ValueError, match=r"HALFULP_ENGINE='numba' is unknown.*called 'llvm' now"):
        quantize(torch.ones(2), "bf16")


def test_the_reference_needs_no_llvmlite(python, cache):
    program = """
        import sys
        sys.modules["llvmlite"] = None
        import torch, halfulp.rounding as r
        from halfulp import kernels
        with kernels.engine("reference"):
            print(r.quantize(torch.tensor([1.3]), "e5m2").tolist())
    """
    assert python(program) == "[1.25]\n"
    assert not cache.exists()


def test_without_llvmlite(monkeypatch):
    monkeypatch.delenv("HALFULP_ENGINE", raising=False)
    monkeypatch.setattr(
        kernels._engine, "_explain_missing_package", lambda name: f"{name} is not installed (pip install {name})"
    )
    monkeypatch.setattr(kernels._engine, "_fallback_counts", type(kernels._engine._fallback_counts)())
    with pytest.warns(RuntimeWarning, match="llvmlite is not installed"):
        assert select_engine("cpu") == "reference"
    assert select_engine("cpu") == "reference"
    assert any("llvmlite is not installed" in line for line in count_fallbacks())
    with engine("llvm"), pytest.raises(ImportError, match="pip install"):
        select_engine("cpu")


def test_notes(monkeypatch):
    monkeypatch.setattr(kernels._engine, "_fallback_counts", type(kernels._engine._fallback_counts)())
    note_fallback("kind", "one thing")
    note_fallback("kind", "one thing")
    with pytest.warns(RuntimeWarning, match="another"):
        warn_once_of_fallback("kind", "another")
    warn_once_of_fallback("kind", "another")
    assert count_fallbacks() == {"kind: one thing": 2, "kind: another": 2}
