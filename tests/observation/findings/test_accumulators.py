"""Long sums in narrow formats: thresholds of the findings on records made by hand."""

import math

import pytest

from halfulp.observation._record import AverageRecord, RealisedChanges, Record

from .records import BRAIN, parameter, realised, severity


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({}, None),
        ({"exp_avg_sq": realised(0.0)}, "warning"),
        ({"exp_avg_sq": realised(0.49)}, "warning"),
        ({"exp_avg_sq": realised(0.51)}, None),
        # The decay is lost, though large changes, which are most of the movement, are kept.
        ({"exp_avg_sq": realised(1.0, lost=0.99)}, "warning"),
        ({"exp_avg_sq": realised(0.0, seen=31)}, None),
        ({"exp_avg_sq": realised(0.0, known=False)}, None),
        ({"exp_avg_sq": realised(math.nan, lost=0.4)}, None),
        ({"exp_avg": realised(0.0)}, None),
    ],
)
def test_second_moment_stuck(states, expected):
    record = parameter(states=states, state_dtypes=dict.fromkeys(states, BRAIN))
    assert severity("second-moment-stuck", record) == expected


def test_a_second_moment_that_is_rounded_stochastically_is_right_on_average():
    few, many = 3999, 1 << 14  # of few changes, 1% of which are kept, so little may take place by chance
    for share, seen, expected in ((1.0, many, None), (0.51, many, None), (0.49, many, "warning"), (0.0, few, None)):
        states = {"exp_avg_sq": realised(share, lost=0.99, seen=seen)}
        record = parameter(states=states, optimizer_module="halfulp.optim._algorithms")
        assert severity("second-moment-stuck", record) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (RealisedChanges(), None),
        (realised(0.0), "error"),
        (realised(0.11), "warning"),
        (realised(0.51), None),
        (realised(0.0, seen=15), None),
    ],
)
def test_average_stuck(change, expected):
    record = Record(averages={"ema.weight": AverageRecord("ema.weight", BRAIN, change)})
    assert severity("average-stuck", record) == expected


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        (None, None),
        (RealisedChanges(), None),
        (realised(0.4), "error"),
        (realised(0.6), "warning"),
        (realised(0.91), None),
        (realised(0.0, seen=31), None),
    ],
)
def test_accumulation_swamped(sums, expected):
    assert severity("accumulation-swamped", parameter(accumulation=sums)) == expected
