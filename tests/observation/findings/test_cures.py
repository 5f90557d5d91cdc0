"""A planted fault comes first, its healthy twin is silent, and its cure takes the finding and the harm away.

benchmarks/bench_plants.py has 28 of them; here are some, in blocks that are drawn from the seed.
"""

import random

import pytest

# A minute for the 28; these sum many micro-batches or train several copies.
LONG = ("96 micro-batches", "a layer that holds")
DRAWN = 3


@pytest.mark.parametrize("number", range(DRAWN))
def test_a_fault_is_found_and_its_cure_mends_it(number, seed, benchmark_module):
    bench, net = benchmark_module("bench_plants"), benchmark_module("_plant_net")
    draws = random.Random(seed)
    name = draws.sample([name for name in bench.names() if not name.startswith(LONG)], DRAWN)[number]
    layer = [draws.randrange(net.BLOCKS) for _ in range(DRAWN)][number]
    row = bench.three(name, layer, seed + number)
    assert row["first"], f"{name} in block {layer}: {row['said']}"
    assert row["silent"], f"{name} in block {layer}, healthy: {row['loud']}"
    assert row["gone"], f"{name} in block {layer} is still found after: {row['cure']}"
    assert row["mended"], f"{name} in block {layer}: {row['faulty']} before the cure, {row['cured']} after it"


def test_there_are_28_plants_of_most_codes_and_each_says_what_it_measures(benchmark_module):
    bench, plants = benchmark_module("bench_plants"), benchmark_module("_plants")
    assert len(bench.names()) == 28
    assert len({one.code for one in plants.PLANTS.values()}) >= 20
    assert all(one.mended and one.measured and one.cure for one in plants.PLANTS.values())
