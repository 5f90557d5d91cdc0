"""Hugging Face models, unmodified, with scaled parameters: eight of those that the benchmark counts."""

import warnings

import pytest


@pytest.fixture
def measure(benchmark_module):
    return benchmark_module("bench_scaled_architectures").measure


@pytest.mark.parametrize(
    ("name", "is_exact"),
    [
        *(("llama", True), ("gpt2", True), ("olmoe", False), ("mamba", False), ("bert", True), ("bart", True)),
        *(("vit", True), ("whisper", True)),
    ],
)
def test_gradients_are_the_plain_models(name, is_exact, measure, seed, needs_torch):
    if name == "olmoe":
        needs_torch("torch.nn.functional.grouped_mm")  # without it transformers takes an operator of its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about kernels that are not installed
        # A mixture's choice of experts may turn over in 16 bits: always the same draw for those that are not exact.
        row = measure(name, seed if is_exact else 0)
    assert row["fallbacks"] == {}
    assert row["float32"] <= 1e-6
    assert row["float16"] <= 1e-2
    if is_exact:
        assert row["bit-equal"] == 1
