"""Wanted changes beside those that took place: counts over parts of any length, of any numbers."""

import math

import numpy as np
import pytest
import torch

from halfulp.kernels import engine, same_bits
from halfulp.observation._record import Realised
from halfulp.observation.observing._batch import Parts, add_changes

LENGTHS = (0, 1, 7, 8, 9, 16, 37, 4096)


def odd_values(count: int) -> torch.Tensor:
    x = torch.randn(count, dtype=torch.float64)
    for value in (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-310, 1e300):
        x[torch.randint(count, (count // 40,))] = value
    return x


def expected(b: np.ndarray, a: np.ndarray, w: np.ndarray, decreases: bool) -> Realised:
    """Element by element in plain Python."""
    seen = cancelled = 0
    square = kept = 0.0
    for before, after, wanted in zip(b.tolist(), a.tolist(), w.tolist()):
        change = after - before
        if wanted and math.isfinite(wanted) and math.isfinite(change) and not (decreases and wanted > 0):
            seen += 1
            cancelled += before == after and math.copysign(1, before) == math.copysign(1, after)
            square += wanted * wanted
            kept += wanted * change
    share = kept / square if square else 0.0
    return Realised(seen, cancelled, seen if square else 0, seen * share)


@pytest.mark.parametrize("name", ["llvm", "reference"])
@pytest.mark.parametrize("decreases", [False, True])
@pytest.mark.parametrize("as_values", [False, True])
def test_counts_are_those_of_each_element(seed, as_values, decreases, name):
    ends = np.cumsum([0, *LENGTHS])
    before, wanted = odd_values(int(ends[-1])), odd_values(int(ends[-1])) * 1e-3
    after = torch.where(torch.rand(len(before)) < 0.3, before, before + wanted * torch.randn(len(before)))
    given = before + wanted if as_values else wanted
    records = [Realised() for _ in LENGTHS]
    rounded = torch.empty(len(before), dtype=torch.float32)
    with engine(name):
        add_changes(
            records, before, after, given, Parts(ends), decreases=decreases, as_values=as_values, rounded=rounded
        )
    asked = given - before if as_values else wanted
    assert same_bits(rounded, asked.float())
    for record, start, end in zip(records, ends, ends[1:]):
        right = expected(*(x[start:end].numpy() for x in (before, after, asked)), decreases)
        assert (record.seen, record.cancelled, record.wanted) == (right.seen, right.cancelled, right.wanted)
        assert math.isclose(record.kept, right.kept, rel_tol=1e-9, abs_tol=1e-12) or not math.isfinite(right.kept)
