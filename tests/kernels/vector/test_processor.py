"""What a processor has decides how kernels are compiled, under which name they are cached, and no bit of a result."""

import os

import pytest

from halfulp.kernels import find_vector_bits
from halfulp.kernels.vector import _processor

# Any 64-bit processor. benchmarks/bench_processors.py runs the suite so.
RESTRICTED = {"HALFULP_CPU_NAME": "generic"}
RESULTS = """
    import hashlib, torch
    import halfulp as hu
    from halfulp.kernels import find_vector_bits
    sink = hashlib.sha256()
    def tell(*tensors):
        for x in tensors:
            sink.update(x.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    x = torch.arange(-700, 701, dtype=torch.float64) / 97
    tell(hu.quantize(x.float(), "e4m3fn", hu.Stochastic(seed=3)))
    a = hu.MCTensor.encode(x, components=2, dtype=torch.float64)
    for y in (a * a, a.reshape(-1, 3).sum(0), hu.MCTensor.encode(x, components=2, dtype=torch.float16) + 1):
        tell(*y.components)
    for dtype in (torch.float16, torch.float64):
        tell(hu.exact_sum((x / 3).to(dtype)))
    assert not hu.kernels.count_fallbacks(), hu.kernels.count_fallbacks()
    print(find_vector_bits(), sink.hexdigest())
"""


def test_features_are_those_of_the_machine_codes_target(monkeypatch):
    monkeypatch.setattr(_processor, "find_llvm_target", lambda: ("x86_64", "any", "+avx2,-avx512f,+fma"))
    assert (_processor.has_cpu_features("avx2", "fma"), _processor.has_cpu_features("avx512f")) == (True, False)
    assert (find_vector_bits(), _processor.has_vector_fma(256), _processor.has_vector_fma(512)) == (
        256,
        True,
        False,
    )
    monkeypatch.setattr(_processor, "find_llvm_target", lambda: ("x86_64", "generic", ""))
    assert (find_vector_bits(), _processor.has_vector_fma(256)) == (256, False)


def test_a_lesser_processor_gives_the_same_bits_from_entries_of_its_own(cache, python, forked_python):
    if os.environ.get("HALFULP_CPU_NAME") == RESTRICTED["HALFULP_CPU_NAME"]:
        pytest.skip("this run is on the lesser processor already")
    bits, here = forked_python(RESULTS).split()
    count = len(set(cache.iterdir()))
    assert count
    restricted, there = python(RESULTS, **RESTRICTED).split()
    assert int(restricted) == 256 <= int(bits)
    assert there == here
    assert len(set(cache.iterdir())) == 2 * count


def test_what_the_environment_says_is_taken(monkeypatch):
    monkeypatch.delenv("HALFULP_CPU_NAME", raising=False)
    monkeypatch.delenv("HALFULP_CPU_FEATURES", raising=False)
    triple, name, features = _processor.find_llvm_target()
    assert triple
    assert name
    assert features
    monkeypatch.setenv("HALFULP_CPU_NAME", "x86-64-v3")
    assert _processor.find_llvm_target() == (triple, "x86-64-v3", features), "the machine's own unless others are given"
    monkeypatch.setenv("HALFULP_CPU_FEATURES", "+avx2,-avx512f")
    assert _processor.find_llvm_target() == (triple, "x86-64-v3", "+avx2,-avx512f")
    monkeypatch.delenv("HALFULP_CPU_FEATURES")
    monkeypatch.setenv("HALFULP_CPU_NAME", "generic")
    assert _processor.find_llvm_target() == (triple, "generic", "+f16c" if triple.startswith("x86") else "")


def test_kernels_need_instructions_for_float16(monkeypatch):
    monkeypatch.setattr(_processor, "find_llvm_target", lambda: ("x86_64-unknown-linux-gnu", "generic", "+avx"))
    monkeypatch.setattr(_processor, "_is_x86", lambda: True)
    assert "F16C" in _processor.explain_unsupported_machine.__wrapped__()
    monkeypatch.setattr(_processor, "find_llvm_target", lambda: ("x86_64-unknown-linux-gnu", "generic", "+avx,+f16c"))
    assert _processor.explain_unsupported_machine.__wrapped__() == ""


def test_a_feature_without_a_sign_is_refused(monkeypatch):
    monkeypatch.setenv("HALFULP_CPU_FEATURES", "+avx2,fma")
    _processor.check_cpu_feature_signs.cache_clear()
    with pytest.raises(ValueError, match="HALFULP_CPU_FEATURES names 'fma'"):
        _processor.check_cpu_feature_signs()
    monkeypatch.delenv("HALFULP_CPU_FEATURES")
    _processor.check_cpu_feature_signs()


def test_a_processor_that_llvm_does_not_know(python):
    """Plain torch runs, which is said once, and gives the same bits."""
    program = """
        import torch, halfulp as hu
        from llvmlite import binding
        binding.get_process_triple = lambda: "ferret-unknown-linux-gnu"
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = [hu.quantize(torch.tensor([1.3, -2.7]), "e5m2").tolist() for _ in range(2)]
        assert found == [[1.25, -2.5]] * 2, found
        assert sum("llvmlite cannot compile for this machine" in str(w.message) for w in seen) == 1, seen
        print("right")
    """
    assert python(program) == "right\n"
