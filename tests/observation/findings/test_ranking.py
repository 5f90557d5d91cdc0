"""Of a fault in a random layer of a 12-layer GPT the first finding names layer and cure; healthy runs are silent.

benchmarks/bench_findings.py does so a hundred times; here are some of its runs, drawn from the seed.
"""

import random

import pytest


def test_faults_in_random_layers_come_first(seed, benchmark_module):
    """One of a hundred does not (benchmarks/results/findings.json): of three, one may not."""
    bench = benchmark_module("bench_findings")
    rows = [bench.planted(code, layer, drawn) for code, layer, drawn in bench.draws(3, seed)]
    assert sum(row["good"] for row in rows) >= 2, [row["first"] for row in rows if not row["good"]]


@pytest.mark.parametrize("number", range(2))
def test_a_healthy_run_shows_nothing_above_a_note(number, seed, benchmark_module):
    bench, models = benchmark_module("bench_findings"), benchmark_module("_finding_healthy")
    name, precision = random.Random(seed).sample(list(models.runs()), 2)[number]
    assert bench.healthy(name, precision, seed)["found"] == []
