"""Loss scales: thresholds of the findings on records made by hand."""

import pytest

from halfulp.observation._record import Record, StepRecord

from .records import found, severity, tensors, with_scale


@pytest.mark.parametrize(
    ("scales", "skipped", "expected"),
    [
        ([], 0, None),
        ([65536.0, 32768.0], 1, None),
        ([65536.0, 1.0], 16, None),
        ([65536.0, 0.5, 2.0], 17, "warning"),
        ([65536.0, 0.5], 17, "error"),
        ([65536.0, 0.0, 65536.0], 166, "error"),
    ],
)
def test_scale_collapsed(scales, skipped, expected):
    assert severity("scale-collapsed", with_scale(Record(), scales, skipped=skipped)) == expected


def test_a_scale_that_no_step_is_taken_with_counts():
    record = with_scale(Record(), [65536.0], skipped=18, loss_scale=0.25)
    assert severity("scale-collapsed", record) == "error"
    assert severity("scale-collapsed", Record(skipped=18, loss_scale=0.25)) == "error"


def backward(*exponents: int, lowest: int = 0) -> Record:
    """Gradients of layers with largest magnitudes 2^e, of which the last has a share at the smallest float16."""
    small = {-24: lowest, -13: 1000 - lowest}
    return tensors(
        *(
            ("activation gradient", f"layers.{i}", {"amax": 2.0**e, "histogram": small if e < 0 else {0: 1000}})
            for i, e in enumerate(exponents)
        )
    )


def test_site_holds_scale():
    (finding,) = found("site-holds-scale", with_scale(backward(-8, 15, -9, -10, lowest=300)))
    assert finding.where == ("layers.1",)
    assert finding.severity == "warning"
    assert "hu.AdaptiveGradScaler" in finding.cure


@pytest.mark.parametrize(
    "record",
    [
        Record(),
        with_scale(backward(-8, 15)),
        backward(-8, 15, -9, -10, lowest=300),
        with_scale(backward(-8, 15, -9, -10)),
        with_scale(backward(12, 15, 12, -10, lowest=300)),
        with_scale(backward(-8, 9, -9, -10, lowest=300)),
        with_scale(backward(-8, 15, -9, -10, lowest=300), sites=[{"name": "layers.1", "exponent": 3}]),
    ],
    ids=["empty", "two layers", "no scaler", "no harm", "two of a size", "far from overflow", "a scale each"],
)
def test_no_site_holds_the_scale(record):
    assert severity("site-holds-scale", record) is None


def stepped(taken: int, scheduled: int, skipped: int) -> Record:
    history = [StepRecord(i, False, 1e-3, 1.0, 0, 0) for i in range(taken)]
    if history:
        history[0].scheduled = scheduled
    return Record(history=history, skipped=skipped)


@pytest.mark.parametrize(
    ("taken", "scheduled", "skipped", "expected"),
    [
        (0, 0, 0, None),
        (100, 100, 0, None),
        (100, 100, 10, None),
        (100, 101, 1, None),
        (100, 110, 10, "warning"),
        (100, 103, 3, "note"),
        (10000, 10010, 10, "note"),
        (100, 4, 10, None),
    ],
)
def test_scheduler_on_skips(taken, scheduled, skipped, expected):
    assert severity("scheduler-on-skips", stepped(taken, scheduled, skipped)) == expected


def test_a_run_without_a_scheduler_has_none_that_runs_ahead():
    record = Record(history=[StepRecord(0, True, 1e-3, 1.0, 5, None)], skipped=5)
    assert severity("scheduler-on-skips", record) is None
