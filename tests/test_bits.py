"""A sample of the bits on record in tests/vectors/bits.json; `python -m benchmarks.bench_bits` looks at all of them."""

import json

import pytest
from benchmarks.bench_bits import FAMILIES, RECORD, differing

EVERY = {"optimizer steps": 521, "roundings": 13, "exact sums": 5, "MCTensor": 7, "random stream": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_results_have_the_bits_on_record(family):
    wrong, found = differing(family, json.loads(RECORD.read_text())[family], EVERY[family])
    assert found
    assert not wrong, f"{wrong}: a change of bits that is meant is recorded by `bench_bits --write`"
