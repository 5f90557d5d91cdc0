"""Formulas written by hand against autocast: a random choice each time; the benchmark runs them all."""

import random

import pytest

CHOSEN = 12
# Those that "none" gets wrong or not finite: they are always there.
HARD = ("entropy of a softmax", "SAC's tanh", "log sigmoid by hand", "InfoNCE, rows without eps", "cumulative decay")


@pytest.fixture
def bench(benchmark_module):
    return benchmark_module("bench_formulas")


@pytest.mark.filterwarnings("ignore")  # of autocast, about operators that stay in float32
def test_no_formula_is_far_worse_than_autocast(bench, seed):
    assert len(bench.FORMULAS) >= 100
    others = [name for name in bench.FORMULAS if name not in HARD]
    for name in (*HARD, *random.Random(seed).sample(others, CHOSEN)):
        # The draws of the benchmark: a formula may amplify one rounding more than another.
        rows = bench.measure(bench.FORMULAS[name], 0, ("eager", "blind"))
        assert name not in HARD or all(row["finite"] for row in rows), name
        for mode in ("eager", "blind"):
            assert bench.ratio(rows, mode) <= bench.BAR, (name, mode, rows)


@pytest.mark.filterwarnings("ignore")
def test_compiled_formulas_too(bench, fresh_compiler):
    rows = bench.measure(bench.FORMULAS["entropy of a softmax"], 0, ("compiled",), gains=(6.0,))
    assert bench.ratio(rows, "compiled") <= bench.BAR


def test_the_measure_tells_numbers_that_are_not_finite(bench):
    rows = bench.measure(bench.FORMULAS["entropy of a softmax"], 0, ("none",))
    assert bench.ratio(rows, "none") == float("inf")
