"""Rows: means and gaps paired by seed."""

import json

import pytest

from halfulp.trials.evidence._evidence import Evidence
from halfulp.trials.evidence._row import check_trial_record, make_rows


def test_gaps_are_paired_by_seed(make_record) -> None:
    records = [make_record("fp32", seed, loss) for seed, loss in ((0, 1.0), (1, 3.0), (2, 2.0))]
    records += [make_record("bf16", seed, loss) for seed, loss in ((2, 2.5), (0, 1.5), (1, 3.5))]
    reference, bf16 = make_rows("tiny", records)
    assert reference.verdict == "reference"
    assert reference.loss_spread == pytest.approx(1.0)
    assert (bf16.gap, bf16.gap_spread) == (pytest.approx(0.5), pytest.approx(0.0))
    assert bf16.verdict == "worse"
    assert bf16.speed == pytest.approx(0.75)
    assert bf16.cancelled == 0.5


def test_the_twin_sets_what_counts(make_record) -> None:
    records = [make_record("fp32", seed, 1.0) for seed in range(3)]
    records += [make_record("fp32-twin", seed, 1.0 + 0.1 * seed) for seed in range(3)]
    records += [make_record("bf16-kahan", seed, 1.1) for seed in range(3)]
    _, twin, kahan = make_rows("tiny", records)
    assert twin.verdict == "control"
    scatter = (0.05 / 3) ** 0.5
    assert kahan.noise == pytest.approx(3.1824463 * scatter / 3**0.5)
    assert kahan.tolerance == pytest.approx(3 * scatter)
    assert kahan.verdict == "no difference"


def test_scattered_gaps_are_unclear(make_record) -> None:
    records = [make_record("fp32", seed, 1.0) for seed in range(3)]
    records += [make_record("bf16", seed, loss) for seed, loss in enumerate((1.5, 2.0, 4.0))]
    records += [make_record("bf16-kahan", seed, loss) for seed, loss in enumerate((0.5, 1.0, 1.5))]
    _, bf16, kahan = make_rows("tiny", records)
    assert (bf16.verdict, kahan.verdict) == ("unclear", "unclear")
    assert bf16.gap < bf16.noise
    assert kahan.gap == pytest.approx(0.0)
    assert kahan.tolerance == pytest.approx(0.01)


def test_several_recipes_are_corrected_for_and_the_controls_are_none(make_record) -> None:
    losses = {"bf16": (1.02, 1.03, 1.025), "bf16-kahan": (1.0, 1.02, 1.04), "fp16": (1.5, None, 1.5)}
    records = [make_record(name, seed, 1.0) for name in ("fp32", "fp32-twin") for seed in range(3)]
    records += [make_record(name, seed, loss) for name, found in losses.items() for seed, loss in enumerate(found)]
    _, twin, bf16, kahan, _ = make_rows("tiny", records)
    assert twin.noise == twin.interval == pytest.approx(0.001)
    assert kahan.interval < kahan.noise < 1.2 * kahan.interval
    assert bf16.noise > 2 * bf16.interval
    assert (bf16.verdict, bf16.interval < bf16.gap) == ("unclear", True)
    one = make_rows(
        "tiny", [record for record in records if record["settings"]["recipe"]["name"] not in ("bf16-kahan",)]
    )[2]
    assert (one.verdict, one.noise) == ("worse", one.interval)


def test_no_verdict_from_two_seeds(make_record) -> None:
    records = [make_record(recipe, seed, loss) for recipe, loss in (("fp32", 1.0), ("bf16", 9.0)) for seed in (0, 1)]
    assert make_rows("tiny", records)[1].verdict is None


def test_divergence_is_a_result(make_record) -> None:
    records = [make_record("fp32", seed, 1.0) for seed in range(3)]
    records += [make_record("bf16", seed, 1.0 if seed else None) for seed in range(3)]
    row = make_rows("tiny", records)[1]
    assert (row.verdict, row.diverged) == ("diverged", 1)
    assert row.loss is row.gap is None


def test_a_judged_loss_that_is_not_finite_is_divergence(make_record) -> None:
    records = [make_record("fp32", seed, 1.0) for seed in range(3)]
    records += [make_record("bf16", seed, 1.0 if seed else None, diverged_at=None) for seed in range(3)]
    row = make_rows("tiny", records)[1]
    assert (row.verdict, row.diverged) == ("diverged", 1)
    assert row.loss is row.gap is None


@pytest.mark.parametrize("damage", [{}, None, [], "text", {"curve": []}])
def test_what_is_no_trial_is_refused_by_the_missing_field(make_record, damage) -> None:
    record = make_record("fp32", 0, 1.0)
    check_trial_record(record)
    with pytest.raises(ValueError, match=r"it has no '|of another kind"):
        check_trial_record(record | {"result": damage})
    with pytest.raises(ValueError, match=r"not the JSON of a comparison: it has no '|of another kind"):
        Evidence.from_json(json.dumps({"schema": 1, "run": {}, "trials": [record | {"result": damage}]}))


def test_skipped_is_a_mean(make_record) -> None:
    records = [make_record("fp32", seed, 1.0) for seed in range(3)]
    records += [make_record("fp16-dynamic", seed, 1.0, skipped=10 + seed) for seed in range(3)]
    reference, dynamic = make_rows("tiny", records)
    assert (reference.gradient_format, reference.skipped) == (None, None)
    assert (dynamic.gradient_format, dynamic.skipped) == ("fp16", 11)


def test_records_of_before_gradient_formats(make_record) -> None:
    records = [make_record("fp32", 0, 1.0)]
    for field in ("gradient_format", "gradient_scale"):
        del records[0]["settings"]["recipe"][field]
    assert make_rows("tiny", records)[0].gradient_format is None
