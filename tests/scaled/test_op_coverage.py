"""torch's own table of operators: a random choice of entries each time; the benchmark of coverage runs them all."""

import random

import pytest

ENTRIES, SAMPLES = 60, 4


@pytest.fixture
def coverage(benchmark_module):
    return benchmark_module("bench_op_coverage")


@pytest.mark.filterwarnings("ignore")
def test_a_choice_of_entries_computes_right(coverage, seed):
    chosen = random.Random(seed).sample(coverage.operators(), ENTRIES)
    entries = [coverage.examined(op, most=SAMPLES) for op in chosen]
    wrong = [entry for entry in entries if entry.problem and entry.name not in coverage.KNOWN]
    assert not wrong, "\n".join(f"{entry.name}: {entry.problem}" for entry in wrong)
    fallbacks = {entry.name: entry.fallbacks for entry in entries if entry.fallbacks}
    assert fallbacks.keys() <= coverage.KNOWN.keys(), fallbacks
